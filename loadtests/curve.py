"""Tokens/s and TPOT's 95th percentile against concurrency: `tritium loadtest curve`.

Draws the results of `make bench-peers ARGS="--concurrency 1 2 4 8 16 32 64"`, and saves its points.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tritium.loadtests.results import Result, load, rounds
from tritium.loadtests.statistics import percentile

_OURS = ("engine", "engine int8", "server")


class Point(NamedTuple):
    concurrency: int
    tokens_per_second: float  # median of the rounds
    tpot_p95_ms: float  # over all requests of all rounds


def points(results: Sequence[Result]) -> dict[str, list[Point]]:
    """The points of each variant, by concurrency."""
    found: dict[str, list[Point]] = {}
    cells = {result.cell for result in results if result.workload == "uniform"}
    for cell in sorted(cells, key=lambda cell: cell[2]):
        _, variant, concurrency = cell
        measured = rounds(results, cell).values()
        speed = statistics.median(result.tokens_per_second for result in measured)
        tpot = percentile([time for result in measured for time in result.tpot], 95)
        found.setdefault(variant, []).append(Point(concurrency, speed, tpot * 1000))
    return found


def draw(curves: dict[str, list[Point]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # Without date and random names, the same points give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "curve", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for variant in sorted(curves, key=lambda name: (name not in _OURS, name)):
        ours = variant in _OURS
        for axis, values in zip(
            axes,
            (
                [p.tokens_per_second for p in curves[variant]],
                [p.tpot_p95_ms for p in curves[variant]],
            ),
            strict=True,
        ):
            axis.plot(
                [point.concurrency for point in curves[variant]],
                values,
                marker="o",
                markersize=3,
                linewidth=2 if ours else 1,
                linestyle="-" if ours else "--",
                label=f"Tritium, {variant}" if ours else variant,
            )
    for axis, title in zip(axes, ("output tokens/s", "TPOT p95, ms"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 2, 4, 8, 16, 32, 64], labels=["1", "2", "4", "8", "16", "32", "64"])
        axis.set_xlabel("requests at once")
        axis.set_ylim(bottom=0)
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium loadtest curve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results/peers.json"),
        help="results of `make bench-peers`; default: %(default)s",
    )
    parser.add_argument(
        "--points",
        type=Path,
        default=Path("results/curve.json"),
        help="the points as JSON; default: %(default)s",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("docs/curve.svg"), help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    curves = points(load(options.results))
    fields = {name: [point._asdict() for point in curve] for name, curve in curves.items()}
    options.points.write_text(json.dumps(fields))
    draw(curves, options.output)


if __name__ == "__main__":
    main()
