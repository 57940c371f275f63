"""`make gains`: what each idea of the engine gains on the traffic of a trace, as one table.

Engine, KV memory and requests are the same each time, and all requests wait from the start. Each
variant differs from the previous one in one idea:

    static      a batch starts full and runs to its longest answer. The length of an answer is not
                known before, so each row has KV memory for max_model_len tokens
    contiguous  continuous batching: a row that ends makes room for the next request; the memory
                per row is the same
    paged       KV blocks on demand: as many sequences run as fit with their tokens
    prefixes    paged, with prefix reuse
"""

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from tritium.backend.engine.engine import EngineStats
from tritium.backend.front.tokenizer import Tokenizer
from tritium.backend.runner.model_runner import ModelRunner
from tritium.backend.runner.models.loader import resolve
from tritium.loadtests.bench import Alone, Request
from tritium.loadtests.model_folder import read_config
from tritium.loadtests.replay.plan import Plan
from tritium.loadtests.replay.prompts import Prompts
from tritium.loadtests.report.gains import Gains, VariantGain, gains_table
from tritium.loadtests.report.page import write_page
from tritium.loadtests.results import Goal, Ratio, Result, ratio, rounds


class Variant(NamedTuple):
    """One configuration that runs the requests."""

    name: str
    at_once: int  # most sequences at once
    prefix_cache: str = "off"
    reserved: int = 0  # tokens of KV reserved per sequence; 0: on demand


class Held:
    """The peak load of a run."""

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
    # Load on a thread that ends, since OpenMP keeps threads for each live thread.
    with ThreadPoolExecutor(1) as pool:
        runner = pool.submit(ModelRunner, config).result()
    most = min(config.max_num_seqs, len(requests))
    reserving = min(most, max(runner.num_blocks * config.block_size // max_model_len, 1))
    variants = (
        Variant("static", reserving, reserved=max_model_len),
        Variant("contiguous", reserving, reserved=max_model_len),
        Variant("paged", most),
        Variant("prefixes", most, prefix_cache="on"),
    )
    Alone(config, runner).continuous(requests[:4], 4)  # warm-up
    for i in range(num_rounds):
        for variant in variants:
            held = Held()
            reuse = config.model_copy(update={"prefix_cache": variant.prefix_cache})
            alone = Alone(reuse, runner, held.update)
            if variant.name == "static":
                result = alone.static(requests, variant.at_once)
            else:
                result = alone.continuous(requests, variant.at_once, variant.name)
            if variant.reserved:  # reserved, used or not
                held.kv_tokens = held.running * variant.reserved
            yield replace(result, workload=plan.trace.stem, round=i), held


def gains_of(title: str, results: Sequence[Result], held: Mapping[str, Held]) -> Gains:
    """Compare each variant with the previous one and with the first, within each round."""
    cells = list(dict.fromkeys(result.cell for result in results))

    def over(cell: tuple[str, str, int], other: tuple[str, str, int]) -> Ratio:
        found = ratio(results, Goal("", cell, other, wanted=0))
        assert found  # every round measures all variants
        return found

    return Gains(
        title,
        [
            VariantGain(
                name=cell[1],
                running=held[cell[1]].running,
                kv_tokens=held[cell[1]].kv_tokens,
                tokens_per_second=statistics.median(
                    result.tokens_per_second for result in rounds(results, cell).values()
                ),
                over_before=over(cell, before),
                over_first=over(cell, cells[0]),
            )
            for before, cell in pairwise([cells[0], *cells])
        ],
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium loadtest gains",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, help="trace in Tritium's format")
    parser.add_argument("--start", type=float, default=0.0, help="seconds into the trace")
    parser.add_argument("--input-scale", type=float, default=1.0, help="factor of input lengths")
    parser.add_argument("--output-scale", type=float, default=1.0, help="factor of output lengths")
    parser.add_argument("--requests", type=int, default=64, help="default: %(default)s")
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=2048,
        help="longer requests are skipped; default: %(default)s",
    )
    parser.add_argument(
        "--kv-cache-mib", type=int, default=512, help="size of the KV cache; default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--output", type=Path, default=Path("results/gains"), help="folder; default: %(default)s"
    )
    options = parser.parse_args(arguments)
    plan = Plan(
        options.trace,
        start=options.start,
        input_scale=options.input_scale,
        output_scale=options.output_scale,
    )
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
        held[result.variant] = found
        console.print(*result.cell, f"{result.tokens_per_second:.1f} tokens/s")
    title = (
        f"{options.requests} requests of {options.trace.stem}, max_model_len "
        f"{options.max_model_len}, {options.kv_cache_mib} MiB of KV cache"
    )
    gains = gains_of(title, results, held)
    console.print(gains_table(gains))
    gains.save(options.output / "gains.json")
    write_page([], options.output / "report.html", title, gains)
    console.print(f"{options.output}/report.html")


if __name__ == "__main__":
    main()
