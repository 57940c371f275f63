"""`make gpu-check`: whether the kernels are right on this GPU, and how fast everything is.

    tritium benchmark gpu-check                       # at most 10 minutes on one H200
    tritium benchmark gpu-check --device cpu --small  # a test of the same code, one minute

It needs torch, triton, numpy, transformers and pydantic, and no downloads: weights are random. From
a source tree without installation: `python3 -m tritium.benchmarks.gpu_check`. Each phase runs in a
process of its own, so that a phase that fails, hangs or breaks the CUDA context does not affect the
others. After every case the results are written to gpu_check.json in $OUT, or in results/.
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
import triton

from tritium.benchmarks.engine_checks import engine_checks
from tritium.benchmarks.kernel_checks import (
    attention_checks,
    batch_invariant_checks,
    elementwise_checks,
    quantised_checks,
    rope_checks,
    sampling_checks,
)
from tritium.benchmarks.models import MODELS
from tritium.benchmarks.phases import Phase, Setup
from tritium.benchmarks.speed import (
    ceilings,
    decode_attention_speed,
    model_speed,
    prefill_attention_speed,
)

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 570  # seconds for everything

PHASES = [
    Phase("ceilings", 40, ceilings),
    Phase("attention", 120, attention_checks),
    Phase("batch-invariant", 60, batch_invariant_checks),
    Phase("quantised weights", 40, quantised_checks),
    Phase("rope and cache", 60, rope_checks),
    Phase("elementwise", 40, elementwise_checks),
    Phase("sampling", 60, sampling_checks),
    Phase("decode attention", 80, decode_attention_speed),
    Phase("prefill attention", 60, prefill_attention_speed),
    *(Phase(f"engine, {name}", 120, partial(engine_checks, m)) for name, m in MODELS.items()),
    *(Phase(name, 120, partial(model_speed, m)) for name, m in MODELS.items()),
]

Row = dict[str, Any]  # phase, case, seconds; then numbers, goals and optionally passed, or error


# -- running --


def run_phase(phase: Phase, setup: Setup, seconds: float) -> Iterator[Row]:
    """Yield the results of a phase's cases as they arrive; kills the phase after its time."""
    # Forked, so that nothing is imported again. CUDA must not have been used before.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_cases, args=(phase, setup, sender), daemon=True)
    process.start()
    sender.close()
    deadline = time.monotonic() + seconds
    error = "its time limit was reached"
    while receiver.poll(max(deadline - time.monotonic(), 0)):
        try:
            yield {"phase": phase.name} | receiver.recv()
        except EOFError:
            process.join()
            error = f"its process ended with {process.exitcode}" if process.exitcode else ""
            break
    process.kill()
    process.join()
    if error:
        yield {"phase": phase.name, "case": "the rest", "error": error}


def _run_cases(phase: Phase, setup: Setup, sender: Connection) -> None:
    cases = phase.cases(setup)
    while True:
        start = time.perf_counter()
        row: Row = {"case": "the rest"}
        try:
            case = next(cases, None)
            if case is None:
                return
            row["case"] = case.name
            numbers = case.run()
            if "passed" in numbers:
                row["passed"] = numbers.pop("passed")
            row["numbers"] = numbers
            row["goals"] = case.goals
        except Exception:  # noqa: BLE001 -- goes into the results
            row["error"] = traceback.format_exc()
        sender.send(row | {"seconds": time.perf_counter() - start})
        if row["case"] == "the rest":
            return


# -- reporting --


def table(rows: list[Row]) -> str:
    """The failures, then one line per measurement."""
    checks = [row for row in rows if "passed" in row]
    failed = [row for row in checks if not row["passed"]]
    broken = [row for row in rows if "error" in row]
    lines = [f"\n{len(checks)} checks, {len(failed)} failed, {len(broken)} errors"]
    lines += [f"FAILED {_name(row)}: {_numbers(row)}" for row in failed]
    lines += [f"ERROR {_name(row)}: {row['error'].strip().splitlines()[-1]}" for row in broken]
    for row in rows:
        if "numbers" in row and "passed" not in row and not row["case"].startswith("by kernel"):
            lines.append(f"{_name(row):<45} {_numbers(row)}")
    return "\n".join(lines)


def _name(row: Row) -> str:
    return f"{row['phase']}: {row['case']}"


def _numbers(row: Row) -> str:
    goals = {name: f" (goal {goal})" for name, goal in row["goals"].items()}
    return "  ".join(
        f"{name} {_short(number)}{goals.get(name, '')}" for name, number in row["numbers"].items()
    )


def _short(number: Any) -> str:
    return f"{number:.4g}" if isinstance(number, float) else str(number)[:40]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium benchmark gpu-check",
        description="Check all kernels and models on one GPU, and measure their speed.",
    )
    parser.add_argument(
        "--device", type=torch.device, default="cuda:0", help="default: %(default)s"
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--only", default="", help="only phases whose names contain this text")
    options = parser.parse_args(arguments)
    setup = Setup(options.device, options.small)
    path = Path(os.environ.get("OUT") or ROOT / "results", "gpu_check.json")
    path.parent.mkdir(exist_ok=True)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }
    deadline = time.monotonic() + SECONDS
    rows: list[Row] = []
    for phase in PHASES:
        if options.only not in phase.name:
            continue
        seconds = min(phase.seconds, deadline - time.monotonic())
        for row in run_phase(phase, setup, seconds):
            rows.append(row)
            path.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1))
            outcome = row.get("passed", "error" not in row)
            print(f"{'ok' if outcome else 'BAD':<4} {row.get('seconds', 0):6.1f} s  {_name(row)}")
            sys.stdout.flush()
    print(table(rows))
    sys.exit(any("error" in row or not row.get("passed", True) for row in rows))


if __name__ == "__main__":
    main()
