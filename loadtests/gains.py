"""`make gains`: what each of the engine's ideas gains on a trace's traffic, as one table.

The same engine, KV memory and requests each time, all of them waiting from the start:

    static      batches start full and run to their longest answer; each row takes the memory that
                the longest request needs
    contiguous  continuous batching, but each sequence has max_model_len tokens of KV reserved, so
                no more run than fit that way
    paged       blocks on demand: as many run as their tokens fit
    prefixes    the same, with prefix reuse
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from backend.engine import EngineStats
from backend.model_runner import ModelRunner
from backend.models.loader import resolve
from backend.tokenizer import Tokenizer
from loadtests.bench import Alone, Request
from loadtests.model_folder import read_config
from loadtests.replay.plan import Plan
from loadtests.replay.prompts import Prompts
from loadtests.results import Goal, Result, report


class Way(NamedTuple):
    """To run the requests."""

    name: str
    at_once: int  # run at most
    prefix_cache: str = "off"
    reserved: int = 0  # tokens of KV a sequence, used or not; 0: none


class Held:
    """What a run held at its peak."""

    def __init__(self) -> None:
        self.running = self.kv_tokens = 0

    def update(self, stats: EngineStats) -> None:
        self.running = max(self.running, stats.num_running)
        self.kv_tokens = max(self.kv_tokens, stats.num_used_blocks * stats.block_size)


def requests_of(plan: Plan, tokenizer: Tokenizer, count: int, max_model_len: int) -> list[Request]:
    """The first requests of a plan that fit into max_model_len."""
    prompts = Prompts(tokenizer, "gains")
    fitting = (
        planned
        for planned in plan.requests()
        if planned.input_length + planned.output_length <= max_model_len
    )
    found = []
    for planned in islice(fitting, count):
        text = prompts.write(planned)
        found.append(Request(tokenizer.encode(text), text, planned.output_length))
    return found


def measure(
    plan: Plan, count: int, max_model_len: int, kv_cache_memory: int, num_rounds: int
) -> Iterator[tuple[Result, Held]]:
    config = read_config().model_copy(
        update={"max_model_len": max_model_len, "kv_cache_memory": kv_cache_memory}
    )
    requests = requests_of(plan, Tokenizer(resolve(config.model)), count, max_model_len)
    if not requests:
        raise ValueError(f"{plan.trace}: no request fits into max_model_len {max_model_len}")
    with ThreadPoolExecutor(1) as pool:  # as the server does: OpenMP keeps threads for each thread
        runner = pool.submit(ModelRunner, config).result()
    num_tokens = runner.num_blocks * config.block_size
    longest = max(len(request.token_ids) + request.num_output_tokens for request in requests)
    paged = Way("paged", min(config.max_num_seqs, len(requests)))
    ways = (
        Way("static", min(paged.at_once, max(num_tokens // longest, 1)), reserved=longest),
        Way("contiguous", max(num_tokens // max_model_len, 1), reserved=max_model_len),
        paged,
        paged._replace(name="prefixes", prefix_cache="on"),
    )
    Alone(config, runner).continuous(requests[:4], 4)  # warm
    for i in range(num_rounds):
        for way in ways:
            held = Held()
            reuse = config.model_copy(update={"prefix_cache": way.prefix_cache})
            alone = Alone(reuse, runner, held.update)
            if way.name == "static":
                result = alone.static(requests, way.at_once)
            else:
                result = alone.continuous(requests, way.at_once, way.name)
            if way.reserved:  # used or not
                held.kv_tokens = held.running * way.reserved
            yield replace(result, workload=plan.trace.stem, round=i), held


def held_table(held: dict[str, Held]) -> Table:
    table = Table(title="KV cache at the peak")
    for name in ("way", "running at once", "tokens held"):
        table.add_column(name, justify="right")
    for way, found in held.items():
        table.add_row(way, str(found.running), str(found.kv_tokens))
    return table


def gains(results: list[Result]) -> list[Goal]:
    """Each way over the one before it."""
    cells = dict.fromkeys(result.cell for result in results)
    return [
        Goal(f"{after[1]} / {before[1]}", after, before, wanted=1.0)
        for before, after in pairwise(cells)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtests.gains", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--input-scale", type=float, default=1.0)
    parser.add_argument("--output-scale", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--kv-cache-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    plan = Plan(options.trace, input_scale=options.input_scale, output_scale=options.output_scale)
    results: list[Result] = []
    held: dict[str, Held] = {}
    console = Console()
    for result, found in measure(
        plan,
        options.requests,
        options.max_model_len,
        options.kv_cache_mib * 2**20,
        options.rounds,
    ):
        results.append(result)
        held[result.way] = found
        console.print(*result.cell, f"{result.tokens_per_second:.1f} tokens/s")
    report(console, results, gains(results))
    console.print(held_table(held))


if __name__ == "__main__":
    main()
