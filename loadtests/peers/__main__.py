"""`make bench-peers`: other engines beside Tritium, with the requests of `make bench`, in one run.

    engine          Tritium's engine in this process; `engine int8`: 8-bit weights
    server          Tritium behind Triton Server, streamed over gRPC
    vllm            vLLM's CPU build, in process; VLLM_DTYPE sets another dtype than bfloat16
    vllm backend    vLLM's Triton backend in the same Triton Server, with the same client. No
                    package contains its model.py: VLLM_BACKEND names a folder with it
    openvino ...    OpenVINO GenAI's ContinuousBatchingPipeline, in process
    llama.cpp ...   its server, streamed over HTTP; LLAMA_SERVER names another binary

Each peer runs in its own environment with the same weights (model_files.py). Only the process that
is measured runs; the others are frozen. Workloads: `uniform` of `make bench`, with at most four
requests per request in flight; and, if 64 at once are measured, `shared prefix`: 64 requests with
512 common prompt tokens, 32 of their own and 32 output tokens, with prefix reuse.
"""

import argparse
import json
import os
import random
from pathlib import Path

from rich.console import Console

from tritium.backend.front.tokenizer import Tokenizer
from tritium.backend.runner.models.loader import resolve
from tritium.loadtests.bench import Prompts, Request, uniform_workload
from tritium.loadtests.model_folder import read_config
from tritium.loadtests.peers.variants import VARIANTS, Variant, started
from tritium.loadtests.results import Goal, Result, load, report, save

_REUSING = ("engine", "vllm")  # variants measured with the shared prefix


def shared_prefix_workload(prompts: Prompts) -> list[Request]:
    rng = random.Random(2)
    prefix, prefix_text = prompts.draw(rng, 512)
    own = [prompts.draw(rng, 32) for _ in range(64)]
    return [Request(prefix + token_ids, prefix_text + text, 32) for token_ids, text in own]


def goals() -> list[Goal]:
    """The goals against the peers."""

    def uniform(variant: str, concurrency: int) -> tuple[str, str, int]:
        return "uniform", variant, concurrency

    found = []
    for concurrency, wanted in ((1, 2.0), (8, 1.5), (32, 1.4)):
        ours, theirs = uniform("server", concurrency), uniform("vllm backend", concurrency)
        name = f"server / vllm backend at {concurrency}"
        found.append(Goal(name, ours, theirs, wanted))
        found += [Goal(f"  {time} p50", ours, theirs, 1.0, time) for time in ("TTFT", "TPOT")]
    for variant, at, peer, wanted in (
        ("server", (8, 32), "llama.cpp q8_0", 1.0),
        ("server", (32,), "llama.cpp bf16", 1.0),
        ("engine", (64,), "vllm", 1.2),
        ("engine", (8, 32), "openvino bf16", 1.0),
        ("engine int8", (8, 32), "openvino int8", 1.0),
        ("server", (32,), "engine", 0.85),
    ):
        found += [
            Goal(f"{variant} / {peer} at {n}", uniform(variant, n), uniform(peer, n), wanted)
            for n in at
        ]
    prefix = ("shared prefix", "engine", 64), ("shared prefix", "vllm", 64)
    return [*found, Goal("engine / vllm, shared prefix", *prefix, 1.0)]


def measure(variant: Variant, workload: str, num_requests: int, concurrency: int) -> Result:
    """Measure one cell; all other processes stay frozen."""
    variant.thaw()
    try:
        return variant.measure(workload, num_requests, concurrency)
    finally:
        variant.freeze()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium loadtest peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=VARIANTS,
        default=VARIANTS,
        metavar="VARIANT",
        help=f"{', '.join(VARIANTS)}; default: all",
    )
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=(1, 8, 32, 64), help="default: 1 8 32 64"
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--first-round", type=int, default=0, help="number of the first round")
    parser.add_argument("--port", type=int, default=8200, help="first of eight consecutive ports")
    parser.add_argument("--append", action="store_true", help="add to existing results")
    parser.add_argument(
        "--output", type=Path, default=Path("results/peers.json"), help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    folder = Path("results/peers")
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=110)
    prompts = Prompts(Tokenizer(resolve(read_config().model)))
    workloads = {
        "uniform": uniform_workload(prompts),
        "shared prefix": shared_prefix_workload(prompts),
    }
    results, found = [], {}
    versions = options.output.with_suffix(".versions.json")
    if options.append and options.output.exists():
        results, found = load(options.output), json.loads(versions.read_text())
    # The missing keepalive of a frozen server must not count as a broken connection.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    with started(options.only, workloads, folder, options.port) as variants:
        versions.write_text(
            json.dumps(found | {variant.name: variant.version for variant in variants})
        )
        for number in range(options.first_round, options.first_round + options.rounds):
            cells = [("uniform", min(4 * n, 64), n) for n in options.concurrency]
            if 64 in options.concurrency:
                cells.append(("shared prefix", 64, 64))
            for workload, num_requests, concurrency in cells:
                for variant in variants:
                    if workload != "uniform" and variant.name not in _REUSING:
                        continue
                    result = measure(variant, workload, num_requests, concurrency)
                    result.round = number
                    again = (*result.cell, number)
                    results = [old for old in results if (*old.cell, old.round) != again]
                    results.append(result)
                    save(options.output, results)
                    speed = f"{result.tokens_per_second:.1f} tokens/s"
                    console.print(*again, speed, highlight=False)
    results.sort(
        key=lambda result: (result.workload, VARIANTS.index(result.variant), result.concurrency)
    )
    report(console, results, goals())


if __name__ == "__main__":
    main()
