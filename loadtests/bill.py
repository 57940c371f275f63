"""Whether the bill is neutral and what it costs, through a real Triton Server and the real model.

1. Neutrality: two lines with the same traffic, a line with twice as much, and the same traffic in
   four orders of arrival. Read from the ledger, which must add up to the nanosecond.
2. Overhead: tokens/s with ledger and metrics over those without, in turns of a few seconds. This is
   in `make bench`, too.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from backend.models.loader import resolve
from backend.tokenizer import Tokenizer
from client import GrpcClient
from client.ledger import Ledger
from client.usage import Report
from loadtests.bench import Prompts, overhead_workload, read_config, served
from loadtests.overhead import Billed, pairs, serve_billed, verdict

_CONCURRENCY = 8
_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 32


def send(billed: Billed, name: str, order: list[str], prompts: Prompts) -> None:
    """Requests of a length, one for each line of `order`, 8 at once."""
    client = GrpcClient(f"localhost:{billed.server.grpc_port}")
    rng = random.Random(name)
    texts = [prompts.draw(rng, _PROMPT_TOKENS)[1] for _ in order]
    sampling = {"temperature": 0, "max_tokens": _OUTPUT_TOKENS, "ignore_eos": True}

    def run(line: str, text: str) -> None:
        client.generate(text, sampling=sampling, business_line=f"{name}, {line}")

    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        for future in [pool.submit(run, *request) for request in zip(order, texts, strict=True)]:
            future.result()


def neutrality(billed: Billed, prompts: Prompts, count: int) -> Iterator[str]:
    """Lines that say what came out, `count` requests a line and way."""
    red, blue = ["red"] * count, ["blue"] * count
    orders = {
        "in turns": [line for pair in zip(red, blue, strict=True) for line in pair],
        "red first": red + blue,
        "blue first": blue + red,
        "shuffled": random.Random(0).sample(red + blue, 2 * count),
    }
    send(billed, "warm", red[:_CONCURRENCY], prompts)
    for name, order in orders.items():
        send(billed, name, order, prompts)
    send(billed, "twice", ["red", "blue", "blue"] * (count * 2 // 3), prompts)
    time.sleep(2)  # the ledger's thread has written, and totals behind it
    ledger = Ledger.read([billed.ledger])
    report = Report.of(ledger, ("business_line",), "usage", 0.0)
    bills = {line.name[0]: line.busy_ns for line in report.lines}

    def share(name: str) -> float:
        return bills[f"{name}, red"] / (bills[f"{name}, red"] + bills[f"{name}, blue"])

    ratio = bills["in turns, red"] / bills["in turns, blue"]
    yield f"two lines with the same traffic: {ratio:.3f} (wanted 0.95 to 1.05)"
    twice = bills["twice, blue"] / bills["twice, red"]
    yield f"twice the requests: {twice:.3f} (wanted 1.9 to 2.1)"
    shares = {name: share(name) / share("in turns") for name in orders}
    told = ", ".join(f"{name} {value:.3f}" for name, value in shares.items())
    yield f"a line's part of the bill, by order of arrival: {told} (wanted 0.95 to 1.05)"
    for gap in ledger.check():
        yield f"busy time - bills - system: {gap.busy_ns} ns over {gap.num_totals} totals"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bill", description=__doc__)
    parser.add_argument("--requests", type=int, default=48, help="a line, for neutrality")
    parser.add_argument("--pairs", type=int, default=40, help="of turns, for overhead")
    options = parser.parse_args()
    console = Console(highlight=False)
    prompts = Prompts(Tokenizer(resolve(read_config().model)))
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryFile() as log,
        serve_billed(Path(directory), log) as billed,
    ):
        for line in neutrality(billed, prompts, options.requests):
            console.print(line)
        results = []
        requests = overhead_workload(prompts)
        for result in pairs(billed, lambda: served(billed.server, requests, 32), options.pairs):
            results.append(result)
            console.print(f"{result.way}: {result.tokens_per_second:.1f} tokens/s")
        console.print(verdict(results))


if __name__ == "__main__":
    main()
