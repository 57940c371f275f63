"""`make roundtrip`: whether the replay of a capture is the same traffic again.

Locust replays a trace against a server that captures it (`trace_path`). Then the capture is
replayed and captured as well. The two captures are compared: requests, lengths, prefix hits, and
times of arrival by the server's clock.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from tritium.backend.accounts.trace import TraceRequest
from tritium.loadtests.model_folder import read_config, serve_with
from tritium.loadtests.replay.options import (
    add_plan_options,
    max_lag_of,
    plan_of,
    read_tokenizer,
    slo_of,
)
from tritium.loadtests.replay.plan import Plan
from tritium.loadtests.replay.processes import ReplayError, Target, replay
from tritium.loadtests.report.page import print_checks, print_summaries, write_report
from tritium.loadtests.report.summary import Check, Summary
from tritium.loadtests.statistics import percentile
from tritium.loadtests.traces.convert import convert
from tritium.loadtests.traces.describe import describe
from tritium.loadtests.traces.format import read_trace

_MAX_HIT_DIFFERENCE = 0.01
_MAX_TIME_DIFFERENCE = 20.0  # ms
_WAIT = 10.0  # seconds to wait for the last row


def compare(first: Sequence[TraceRequest], second: Sequence[TraceRequest]) -> list[Check]:
    """Compare two captures of the same traffic.

    Their clocks have no common zero, so times are compared by their distance from the median
    difference. Requests that arrive at the same time may be in another order.
    """
    lengths, again = (sorted((r.input_length, r.output_length) for r in x) for x in (first, second))
    others = sum(one != other for one, other in zip(lengths, again, strict=False))
    hits, hits_again = (describe(x).hit_ratio["endless"] for x in (first, second))
    checks = [
        Check("requests", f"{len(first)}", f"{len(second)}", abs(len(first) - len(second)), 0),
        Check("requests of other lengths", "0", f"{others}", others, 0),
        Check(
            "prefix hits of an endless cache",
            f"{hits:.2%}",
            f"{hits_again:.2%}",
            abs(hits - hits_again),
            _MAX_HIT_DIFFERENCE,
        ),
    ]
    if len(first) == len(second):
        times, times_again = (np.array([r.timestamp for r in x]) for x in (first, second))
        off = np.abs(times_again - times - np.median(times_again - times))
        checks.append(
            Check(
                "time of arrival, p99 ms",
                f"over {times[-1] / 1000:.1f} s",
                f"p50 {percentile(off, 50):.1f}, largest {off.max():.1f}",
                percentile(off, 99),
                _MAX_TIME_DIFFERENCE,
            )
        )
    return checks


def _capture_of(written: Path, past: int, num_requests: int, output: Path) -> list[TraceRequest]:
    """Sort the rows that the server wrote after the first `past` bytes.

    Raises:
        ReplayError: requests are missing.
    """
    deadline = time.monotonic() + _WAIT
    while written.read_bytes()[past:].count(b"\n") < num_requests:
        if time.monotonic() > deadline:
            raise ReplayError(f"{written}: not all of {num_requests} requests are captured")
        time.sleep(0.2)
    part = output.with_suffix(".part")
    part.write_bytes(written.read_bytes()[past:])
    convert(part, output, "server")
    part.unlink()
    return list(read_trace(output))


def _locust(options: argparse.Namespace, url: str, metrics_url: str) -> None:
    """Replay the trace under locust."""
    given = ("start", "window", "rate", "input_scale", "output_scale", "max_lag_ms", "processes")
    subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py"))),
            *("--headless", "--only-summary", "--loglevel=WARNING", f"--trace={options.trace}"),
            *(f"--{name.replace('_', '-')}={getattr(options, name)}" for name in given),
            *(f"--url={url}", f"--metrics-url={metrics_url}"),
            *(f"--ledger={options.output / 'ledger'}", f"--output={options.output / 'locust'}"),
        ],
        check=False,  # the report says what is wrong
    )


def run(options: argparse.Namespace, console: Console) -> tuple[Summary, list[Check]]:
    """Make the round trip.

    Returns:
        (the replay of the capture, the two captures compared)

    Raises:
        ReplayError, TraceError, ValueError, OSError: the round trip failed.
    """
    options.output.mkdir(parents=True, exist_ok=True)
    written, ledger = options.output.resolve() / "written.jsonl", options.output / "ledger"
    written.unlink(missing_ok=True)
    num_requests = sum(1 for _ in plan_of(options, options.rate).requests())
    parameters = {"prefix_cache": "on", "trace_path": written, "ledger_path": ledger.resolve()}
    with (options.output / "server.log").open("wb") as log, serve_with(parameters, log) as server:
        url = f"localhost:{server.grpc_port}"
        metrics_url = f"http://localhost:{server.metrics_port}/metrics"
        _locust(options, url, metrics_url)
        captured = options.output / "captured.jsonl"
        first = _capture_of(written, 0, num_requests, captured)
        past = written.stat().st_size
        target = Target(
            url,
            metrics_url,
            "smollm2",
            read_tokenizer(read_config().model),
            seed="again",
            num_processes=options.processes,
            ledger=ledger,
        )
        again = replay("the capture", Plan(captured), target, slo_of(options), max_lag_of(options))
        summary = write_report(again, options.output / "again")
        print_summaries(console, [summary])
        second = _capture_of(written, past, num_requests, options.output / "again.jsonl")
    return summary, compare(first, second)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tritium loadtest roundtrip",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, help="trace in Tritium's format")
    parser.add_argument("--rate", type=float, default=1.0, help="factor by which time runs faster")
    parser.add_argument("--processes", type=int, default=1, help="client processes")
    parser.add_argument("--output", type=Path, default=Path("results/roundtrip"), help="folder")
    add_plan_options(parser)
    console = Console()
    try:
        summary, checks = run(parser.parse_args(arguments), console)
    except (ReplayError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console.print("\nThe first capture, and that of its replay:")
    print_checks(console, checks)
    return int(bool(summary.invalid) or not all(check.holds for check in checks))


if __name__ == "__main__":
    sys.exit(main())
