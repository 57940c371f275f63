"""Prefix reuse of a trace: by the engine's shadow index, and by the trace's own hash ids.

    tritium loadtest overlap TRACE --scale 16 --blocks 512 1024 4096

The engine runs without a model and receives the trace's prompts one after the other, in which equal
hash ids are equal tokens. The column of the hash ids is calculated from the ids alone.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tritium.backend.accounts.trace import TraceRequest
from tritium.backend.config import EngineConfig
from tritium.backend.engine.engine import Engine, EngineStats
from tritium.backend.engine.request import EngineRequest, SampledToken
from tritium.backend.engine.sequence import ScheduledSequence
from tritium.loadtests.traces.describe import PrefixCache
from tritium.loadtests.traces.format import read_trace

BLOCK_SIZE = 16


class NoModel:
    """A runner that computes nothing."""

    overlaps = False

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def start(self) -> None:
        pass

    def launch(self, batch: list[ScheduledSequence]) -> Callable[[], list[SampledToken]]:
        sampled = [SampledToken(0, None)] * sum(scheduled.samples for scheduled in batch)
        return lambda: sampled


def scaled(request: TraceRequest, scale: int) -> TraceRequest:
    """The request with its lengths divided by `scale`."""
    return msgspec.structs.replace(
        request,
        input_length=-(-request.input_length // scale),
        hash_block_size=request.hash_block_size // scale,
    )


def tokens_of(request: TraceRequest) -> list[int]:
    token_ids: list[int] = []
    for hash_id in request.hash_ids:
        draw = random.Random(hash_id)
        token_ids += [draw.randrange(1 << 16) for _ in range(request.hash_block_size)]
    return token_ids[: request.input_length]


def run(requests: list[TraceRequest], num_blocks: int, prefix_cache: str) -> EngineStats:
    config = EngineConfig.model_validate(
        {"model": "none", "block_size": BLOCK_SIZE, "prefix_cache": prefix_cache}
    )
    num_ended = 0

    def count(outputs: list) -> None:
        nonlocal num_ended
        num_ended += sum(output.finish_reason is not None for output in outputs)

    engine = Engine(config, NoModel(num_blocks), count)
    for number, request in enumerate(requests):
        engine.reserve()
        engine.submit(EngineRequest(number, tokens_of(request), max_tokens=1))
        in_flight = None
        while num_ended <= number:
            in_flight = engine.step(in_flight)
    return engine.stats()


def hit_ratio(requests: list[TraceRequest], num_blocks: int) -> float:
    cache = PrefixCache(num_blocks * BLOCK_SIZE)
    for request in requests:
        cache.add(request)
    return cache.hit_ratio


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium loadtest overlap",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, help="trace in Tritium's format")
    parser.add_argument(
        "--scale", type=int, default=16, help="divisor of all lengths; default: %(default)s"
    )
    parser.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        default=[512, 1024, 2048, 4096],
        help="cache sizes in blocks; default: %(default)s",
    )
    options = parser.parse_args(arguments)
    requests = [scaled(request, options.scale) for request in read_trace(options.trace)]
    table = Table("KV cache, blocks", "shadow index", "hash ids", "reused with prefix_cache on")
    for num_blocks in options.blocks:
        overlap = run(requests, num_blocks, "auto").prefix_overlap
        num_computed = run(requests, num_blocks, "on").num_computed_tokens
        table.add_row(
            str(num_blocks),
            f"{overlap.num_pool_tokens / overlap.num_tokens:.2%}",
            f"{hit_ratio(requests, num_blocks):.2%}",
            f"{1 - num_computed / overlap.num_tokens:.2%}",
        )
    table.add_row(
        "endless",
        f"{overlap.num_window_tokens / overlap.num_tokens:.2%}",
        f"{hit_ratio(requests, 0):.2%}",
        "",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
