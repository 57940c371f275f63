"""Whether bills are neutral and what billing costs, with a real Triton Server and a real model.

1. Neutrality: two lines with the same traffic, a line with twice the traffic, and the same traffic
   in four orders of arrival, 8 requests at once. The figures are read from the ledger, which must
   add up to the nanosecond. Other requests run before and after, so that no line has the device to
   itself.
2. Overhead: the speed with ledger and metrics divided by the speed without (overhead.py). `make
   bench` measures this as well.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from tritium.backend.front.tokenizer import Tokenizer
from tritium.backend.host.serve import TritonServer
from tritium.backend.runner.models.loader import resolve
from tritium.client import GrpcClient
from tritium.client.bill import Report
from tritium.client.ledger import Ledger
from tritium.loadtests.bench import Prompts, measure_bill
from tritium.loadtests.model_folder import read_config, serve_with

_CONCURRENCY = 8
_REQUESTS = 16  # per line and round: prompts of 64 tokens, answers of 16 to 46


def send(server: TritonServer, name: str, order: list[str], prompts: Prompts, seed: int) -> None:
    """One request per element of `order`; each 16 requests of a line have the same lengths."""
    client = GrpcClient(f"localhost:{server.grpc_port}")
    rng = random.Random(f"{name} {seed}")
    counts: Counter[str] = Counter()
    others = ["others"] * _CONCURRENCY

    def run(line: str, text: str, num_tokens: int) -> None:
        sampling = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}
        client.generate(text, sampling=sampling, business_line=f"{name}, {line}")

    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        futures = []
        for line in (*others, *order, *others):
            length = 16 + 2 * (counts[line] % _REQUESTS)
            counts[line] += 1
            futures.append(pool.submit(run, line, prompts.draw(rng, 64)[1], length))
    for future in futures:
        future.result()


def neutrality(server: TritonServer, path: Path, rounds: int) -> Iterator[str]:
    """Yield the results as lines of text. A drift of the machine averages out over the rounds."""
    prompts = Prompts(Tokenizer(resolve(read_config().model)))
    red, blue = ["red"] * _REQUESTS, ["blue"] * _REQUESTS
    orders = {
        "in turns": [line for pair in zip(red, blue, strict=True) for line in pair],
        "red first": red + blue,
        "blue first": blue + red,
        "shuffled": random.Random(0).sample(red + blue, 2 * _REQUESTS),
    }
    twice = ["red", "blue", "blue"] * _REQUESTS
    send(server, "warm", red, prompts, 0)
    for i in range(rounds):
        for name, order in (*orders.items(), ("twice", twice)):
            send(server, name, order, prompts, i)
    time.sleep(2)  # until the ledger's thread has written the rows and the totals after them
    ledger = Ledger.read([path])
    report = Report.of(ledger, ("business_line",), "usage", 0.0)
    bills = {line.name[0]: line.busy_ns for line in report.lines}

    def share(name: str) -> float:
        return bills[f"{name}, red"] / (bills[f"{name}, red"] + bills[f"{name}, blue"])

    ratio = bills["in turns, red"] / bills["in turns, blue"]
    yield f"two lines with the same traffic: {ratio:.3f} (wanted 0.95 to 1.05)"
    ratio = bills["twice, blue"] / bills["twice, red"]
    yield f"twice the requests: {ratio:.3f} (wanted 1.9 to 2.1)"
    shares = {name: share(name) / share("in turns") for name in orders}
    text = ", ".join(f"{name} {value:.3f}" for name, value in shares.items())
    yield f"a line's share of the bill, by order of arrival: {text} (wanted 0.95 to 1.05)"
    for gap in ledger.check():
        yield f"busy time - bills - system: {gap.busy_ns} ns over {gap.num_totals} totals"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium loadtest bill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=int, default=4, help="rounds of the neutrality test; default: %(default)s"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=180,
        help="duration of the overhead test; default: %(default)s",
    )
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as log:
        path = Path(directory) / "ledger"
        with serve_with({"ledger_path": path}, log) as server:
            for line in neutrality(server, path, options.rounds):
                console.print(line)
        console.print(measure_bill(options.seconds, Path(directory) / "log"))


if __name__ == "__main__":
    main()
