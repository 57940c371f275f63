"""`make tune`: which limits of config.pbtxt suit the traffic of a trace on this machine.

For each pair of max_num_batched_tokens and max_num_seqs a real server receives the trace twice: at
its recorded times, for latencies, and all at once, for throughput. A page shows the Pareto
frontier. The command prints the limits with most tokens/s, and the fastest ones within the bounds
of TTFT and TPOT.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from rich.console import Console
from rich.table import Table

from tritium.loadtests.model_folder import read_config, serve_with
from tritium.loadtests.replay.options import (
    add_plan_options,
    max_lag_of,
    plan_of,
    read_tokenizer,
    slo_of,
)
from tritium.loadtests.replay.processes import Target, replay
from tritium.loadtests.report.page import write_report
from tritium.loadtests.report.summary import Summary

_HOUR_MS = 3_600_000
_AT_ONCE = 1e6  # replay rate at which any trace is sent at once


class Point(NamedTuple):
    """The result of a pair of limits."""

    max_num_batched_tokens: int
    max_num_seqs: int
    timed: Summary  # at the trace's own times
    at_once: Summary

    @property
    def parameters(self) -> dict[str, int]:
        """The limits by parameter name."""
        return {
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
        }

    @property
    def label(self) -> str:
        return f"{self.max_num_batched_tokens} / {self.max_num_seqs}"

    def keeps(self, ttft_ms: float, tpot_ms: float) -> bool:
        """Whether all requests were answered and p95 is within the bounds (0: no bound)."""
        timed = self.timed
        return timed.completed == timed.sent and all(
            not bound or (found is not None and found <= bound)
            for found, bound in ((timed.ttft.p95, ttft_ms), (timed.tpot.p95, tpot_ms))
        )


def fastest(points: Sequence[Point]) -> Point:
    """The limits with most tokens/s when all requests are sent at once."""
    return max(points, key=lambda point: point.at_once.output_tokens_per_second)


def within(points: Sequence[Point], ttft_ms: float, tpot_ms: float) -> Point | None:
    """The fastest limits that keep the bounds at the trace's recorded times."""
    keeping = [point for point in points if point.keeps(ttft_ms, tpot_ms)]
    return fastest(keeping) if keeping else None


def config_lines(point: Point) -> str:
    """The lines for config.pbtxt."""
    return "\n".join(
        f'  {{ key: "{name}", value: {{ string_value: "{value}" }} }},'
        for name, value in point.parameters.items()
    )


def measure(options: argparse.Namespace) -> Iterator[Point]:
    timed = plan_of(options, options.rate)
    at_once = plan_of(options, _AT_ONCE)
    lengths = [planned.input_length for planned in at_once.requests()]
    options.output.mkdir(parents=True, exist_ok=True)
    for batched, seqs in product(options.max_num_batched_tokens, options.max_num_seqs):
        if batched < seqs:
            continue
        parameters = {
            "max_num_batched_tokens": batched,
            "max_num_seqs": seqs,
            # No request may be refused when all are sent at once.
            "max_queue_size": len(lengths),
            "max_queue_tokens": sum(lengths) + 1,
            "max_queue_delay_ms": _HOUR_MS,
        }
        with (
            (options.output / "server.log").open("ab") as log,
            serve_with(parameters, log) as server,
        ):
            summaries = []
            for what, plan in (("timed", timed), ("at-once", at_once)):
                name = f"{batched}-{seqs}-{what}"
                target = Target(
                    f"localhost:{server.grpc_port}",
                    f"http://localhost:{server.metrics_port}/metrics",
                    "smollm2",
                    read_tokenizer(read_config().model),
                    seed=name,
                    num_processes=options.processes,
                )
                # If all requests are sent at once, lateness does not matter.
                max_lag = max_lag_of(options) if what == "timed" else float("inf")
                run = replay(name, plan, target, slo_of(options), max_lag)
                if run.interrupted:
                    return
                summaries.append(write_report(run, options.output / name))
        yield Point(batched, seqs, *summaries)


def frontier(points: Sequence[Point], ttft_ms: float, tpot_ms: float) -> go.Figure:
    """Tokens/s with all requests at once, against the latencies at the recorded times."""
    titles = ("TTFT p95, ms", "TPOT p95, ms")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles, shared_yaxes=True)
    speeds = [point.at_once.output_tokens_per_second for point in points]
    for column, times, bound in (
        (1, [point.timed.ttft.p95 for point in points], ttft_ms),
        (2, [point.timed.tpot.p95 for point in points], tpot_ms),
    ):
        figure.add_scatter(
            x=times,
            y=speeds,
            mode="markers+text",
            text=[point.label for point in points],
            textposition="top center",
            showlegend=False,
            row=1,
            col=column,
        )
        best = _undominated([(x, y) for x, y in zip(times, speeds, strict=True) if x is not None])
        figure.add_scatter(
            x=[x for x, _ in best], y=[y for _, y in best], showlegend=False, row=1, col=column
        )
        if bound:
            figure.add_vline(bound, line_dash="dash", row=1, col=column)
    figure.update_yaxes(title="output tokens/s, all requests at once", row=1, col=1)
    return figure.update_layout(title="max_num_batched_tokens / max_num_seqs")


def _undominated(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other point beats in both latency and speed."""
    best: list[tuple[float, float]] = []
    for time, speed in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or speed > best[-1][1]:
            best.append((time, speed))
    return best


def points_table(points: Sequence[Point]) -> Table:
    table = Table(title="Latencies at the trace's times; tokens/s with all requests at once")
    for name in ("tokens / seqs", "TTFT p95 ms", "TPOT p95 ms", "attainment", "tokens/s"):
        table.add_column(name, justify="right")
    for point in points:
        times = (point.timed.ttft.p95, point.timed.tpot.p95)
        table.add_row(
            point.label + (" INVALID" if point.timed.invalid else ""),
            *("-" if time is None else f"{time:.1f}" for time in times),
            f"{point.timed.attainment:.1%}",
            f"{point.at_once.output_tokens_per_second:.1f}",
        )
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium loadtest tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, help="trace in Tritium's format")
    parser.add_argument("--rate", type=float, default=1.0, help="factor by which time runs faster")
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        nargs="+",
        default=[128, 256, 512, 1024],
        help="values to try; default: %(default)s",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        nargs="+",
        default=[16, 32, 64],
        help="values to try; default: %(default)s",
    )
    parser.add_argument("--processes", type=int, default=1, help="client processes")
    parser.add_argument(
        "--output", type=Path, default=Path("results/tune"), help="folder; default: %(default)s"
    )
    add_plan_options(parser)
    options = parser.parse_args(arguments)
    console = Console()
    bounds = (options.slo_ttft_ms, options.slo_tpot_ms)
    points = []
    for point in measure(options):
        points.append(point)
        console.print(points_table(points[-1:]))
    if not points:
        parser.error("no pair has max_num_batched_tokens >= max_num_seqs")
    frontier(points, *bounds).write_html(options.output / "frontier.html", include_plotlyjs=True)
    console.print(points_table(points))
    console.print(f"most tokens/s (offline):\n{config_lines(fastest(points))}", highlight=False)
    wanted = " and ".join(
        f"{name} p95 <= {bound:g} ms"
        for name, bound in zip(("TTFT", "TPOT"), bounds, strict=True)
        if bound
    )
    if found := within(points, *bounds):
        console.print(f"{wanted or 'any latency'} (interactive):\n{config_lines(found)}")
    else:
        console.print(f"no pair keeps {wanted}", style="bold red")
    console.print(f"{options.output}/frontier.html")


if __name__ == "__main__":
    main()
