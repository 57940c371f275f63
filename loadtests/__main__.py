"""`tritium loadtest`: traces of real traffic, and their replay."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from tritium.loadtests.replay.options import (
    RATE_HELP,
    add_plan_options,
    add_target_options,
    max_lag_of,
    plan_of,
    slo_of,
    target_of,
)
from tritium.loadtests.replay.processes import ReplayError, replay
from tritium.loadtests.replay.run import Record, load_run
from tritium.loadtests.report.gains import Gains, load_gains
from tritium.loadtests.report.page import print_summaries, write_page, write_report
from tritium.loadtests.report.summary import summarize
from tritium.loadtests.traces.convert import SOURCES, convert, guess_source
from tritium.loadtests.traces.describe import describe, description_table
from tritium.loadtests.traces.format import read_trace, write_trace
from tritium.loadtests.traces.synthesize import Lengths, Shape, synthesize


def _add_parser(
    commands: argparse._SubParsersAction, name: str, summary: str
) -> argparse.ArgumentParser:
    description = f"{summary[0].upper()}{summary[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description
    )
    return parser


def _add_convert(commands: argparse._SubParsersAction) -> None:
    parser = _add_parser(commands, "convert", "make a trace from a file of another format")
    parser.add_argument("input", type=Path, help="file to convert")
    parser.add_argument("output", type=Path, help="trace to write")
    parser.add_argument("--source", choices=SOURCES, help="default: guessed from the first line")
    parser.add_argument("--sort", action="store_true", help="accept rows in any order")
    parser.add_argument(
        "--skip-bad-rows", action="store_true", help="skip bad rows instead of failing"
    )
    parser.set_defaults(run=_convert)


def _convert(options: argparse.Namespace, console: Console) -> None:
    source = options.source or guess_source(options.input)
    count, num_bad = convert(
        options.input,
        options.output,
        source,
        options.sort,
        options.skip_bad_rows,
        report=lambda message: console.print(message, style="red", highlight=False),
    )
    console.print(f"{options.output}: {count} requests, {num_bad} bad rows skipped")


def _add_describe(commands: argparse._SubParsersAction) -> None:
    parser = _add_parser(commands, "describe", "rates, lengths, prefix hits of a trace")
    parser.add_argument("trace", type=Path, help="trace in Tritium's format")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_describe)


def _describe(options: argparse.Namespace, console: Console) -> None:
    found = describe(read_trace(options.trace))
    if options.json:
        print(msgspec.json.encode(found).decode())
    else:
        console.print(description_table(options.trace.name, found))


def _add_synthesize(commands: argparse._SubParsersAction) -> None:
    parser = _add_parser(commands, "synthesize", "make a trace with given statistics")
    parser.add_argument("output", type=Path, help="trace to write")
    parser.add_argument("--requests", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s; default: %(default)s")
    parser.add_argument(
        "--dispersion", type=float, default=1.0, help="index of dispersion of arrivals; 1: Poisson"
    )
    parser.add_argument(
        "--hit-ratio",
        type=float,
        default=0.0,
        help="share of prompt tokens that a prefix cache could reuse",
    )
    for name, median, p95 in (("input", 256, 1024), ("output", 64, 256)):
        parser.add_argument(
            f"--{name}-length",
            type=float,
            nargs=2,
            metavar=("MEDIAN", "P95"),
            default=(median, p95),
            help=f"tokens; default: {median} {p95}",
        )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.set_defaults(run=_synthesize)


def _synthesize(options: argparse.Namespace, console: Console) -> None:
    shape = Shape(
        options.requests,
        options.rate,
        Lengths(*options.input_length),
        Lengths(*options.output_length),
        options.dispersion,
        options.hit_ratio,
    )
    shape.check()
    count = write_trace(options.output, synthesize(shape, options.seed))
    console.print(f"{options.output}: {count} requests")


def _add_gains_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gains", type=Path, help="file written by `make gains`, to show in the report"
    )


def _gains_of(options: argparse.Namespace) -> Gains | None:
    return load_gains(options.gains) if options.gains else None


def _add_replay(commands: argparse._SubParsersAction) -> None:
    parser = _add_parser(commands, "replay", "replay a trace against a server, and report")
    parser.add_argument("trace", type=Path, help="trace in Tritium's format")
    add_plan_options(parser)
    add_target_options(parser)
    parser.add_argument("--rate", type=float, nargs="+", default=[1.0], help=RATE_HELP)
    parser.add_argument("--processes", type=int, default=1, help="client processes")
    parser.add_argument(
        "--output", type=Path, default=Path("results/replay"), help="folder; default: %(default)s"
    )
    _add_gains_option(parser)
    parser.set_defaults(run=_replay)


def _replay(options: argparse.Namespace, console: Console) -> None:
    gains = _gains_of(options)
    runs = []
    for rate in options.rate:
        plan = plan_of(options, rate)
        target = target_of(options, options.processes)
        several = len(options.rate) > 1
        name = f"{options.trace.stem} x {rate:g}"
        with _progress(console, name) as on_start_and_record:
            run = replay(
                name, plan, target, slo_of(options), max_lag_of(options), *on_start_and_record
            )
        folder = options.output / f"rate-{rate:g}" if several else options.output
        print_summaries(console, [write_report(run, folder, gains)])
        console.print(f"{folder}/report.html")
        runs.append(run)
        if run.interrupted:
            break
    if len(runs) > 1:
        write_page(runs, options.output / "report.html", options.trace.stem, gains)
        console.print(f"{options.output}/report.html")


@contextmanager
def _progress(
    console: Console, name: str
) -> Iterator[tuple[Callable[[int], None], Callable[[Record], None]]]:
    """A progress bar of ended requests, with the number of those without an answer."""
    columns = (
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        "{task.fields[failures]} without an answer",
        TimeElapsedColumn(),
    )
    failures = 0
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=None, failures=0)

        def record_ended(record: Record) -> None:
            nonlocal failures
            failures += record.outcome != "completed"
            progress.update(bar, advance=1, failures=failures)

        yield lambda total: progress.update(bar, total=total), record_ended


def _add_compare(commands: argparse._SubParsersAction) -> None:
    parser = _add_parser(commands, "compare", "put runs side by side")
    parser.add_argument("runs", type=Path, nargs="+", help="output folders of replays")
    parser.add_argument(
        "--output", type=Path, default=Path("results/compare.html"), help="default: %(default)s"
    )
    _add_gains_option(parser)
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace, console: Console) -> None:
    runs = [load_run(folder) for folder in options.runs]
    for run, folder in zip(runs, options.runs, strict=True):
        run.name = folder.name
    print_summaries(console, [summarize(run) for run in runs])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    names = ", ".join(run.name for run in runs)
    write_page(runs, options.output, names, _gains_of(options))
    console.print(f"{options.output}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tritium loadtest", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_convert, _add_describe, _add_synthesize, _add_replay, _add_compare):
        add(commands)
    options = parser.parse_args(arguments)
    console = Console()
    try:
        options.run(options, console)
    except (ReplayError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
