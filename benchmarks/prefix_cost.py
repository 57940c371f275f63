"""The host's cost of prefix look-ups if no prompt has a known prefix; an engine without a model.

    tritium benchmark prefix-cost

It measures all of the engine's own work for a number of requests, in seconds of one core, with
the prefix cache off, on (hash, look up, publish) and auto (hash, shadow index). Divided by the
number of prompt tokens it can be compared with a model's cost per prompt token.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable

from tritium.backend.config import EngineConfig
from tritium.backend.engine.engine import Engine
from tritium.backend.engine.request import EngineRequest, SampledToken
from tritium.backend.engine.sequence import ScheduledSequence

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, ROUNDS = 128, 512, 64, 15


class NoModel:
    """A runner that computes nothing."""

    num_blocks = NUM_REQUESTS * (PROMPT_TOKENS + OUTPUT_TOKENS) // 16
    overlaps = False

    def start(self) -> None:
        pass

    def launch(self, batch: list[ScheduledSequence]) -> Callable[[], list[SampledToken]]:
        sampled = [SampledToken(7, None)] * sum(scheduled.samples for scheduled in batch)
        return lambda: sampled


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium benchmark prefix-cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    seconds: dict[str, list[float]] = {"off": [], "on": [], "auto": []}
    engines = {mode: _engine(mode) for mode in seconds}
    numbers = itertools.count()
    for _ in range(ROUNDS):
        prompts = [
            [random.randrange(49152) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_REQUESTS)
        ]
        for mode, (engine, ended) in engines.items():
            seconds[mode].append(_run(engine, ended, prompts, numbers))
    num_tokens = NUM_REQUESTS * PROMPT_TOKENS
    off = statistics.median(seconds["off"])
    for mode, values in seconds.items():
        median = statistics.median(values)
        print(
            f"{mode:>4}: {median * 1e3:6.1f} ms for {NUM_REQUESTS} requests; "
            f"{(median - off) / num_tokens * 1e9:5.0f} ns per prompt token more than off"
        )


def _engine(mode: str) -> tuple[Engine, list[int]]:
    ended: list[int] = []
    config = EngineConfig.model_validate(
        {"model": "none", "prefix_cache": mode, "max_num_seqs": 64, "max_queue_size": NUM_REQUESTS}
    )
    engine = Engine(
        config,
        NoModel(),
        lambda outputs: ended.extend(o.request_id for o in outputs if o.finish_reason),
    )
    return engine, ended


def _run(
    engine: Engine, ended: list[int], prompts: list[list[int]], numbers: itertools.count
) -> float:
    ended.clear()
    began = time.thread_time()
    for prompt in prompts:
        engine.reserve()
        engine.submit(EngineRequest(next(numbers), prompt, OUTPUT_TOKENS))
    in_flight = None
    while len(ended) < len(prompts):
        in_flight = engine.step(in_flight)
    return time.thread_time() - began


if __name__ == "__main__":
    main()
