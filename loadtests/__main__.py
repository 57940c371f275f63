"""`python -m loadtests`: traces of real traffic, and their replay."""

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from loadtests.traces.convert import SOURCES, convert, guess_source
from loadtests.traces.describe import describe, description_table
from loadtests.traces.format import TraceError, read_trace, write_trace
from loadtests.traces.synthesize import Lengths, Shape, synthesize


def _add_convert(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("convert", help="make a trace of another format's file")
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--source", choices=SOURCES, help="default: what the file looks like")
    parser.add_argument("--sort", action="store_true", help="take rows in any order")
    parser.add_argument("--skip-bad-rows", action="store_true", help="leave them out")
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
    console.print(f"{options.output}: {count} requests, {num_bad} bad rows left out")


def _add_describe(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("describe", help="rates, lengths, prefix hits of a trace")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_describe)


def _describe(options: argparse.Namespace, console: Console) -> None:
    found = describe(read_trace(options.trace))
    if options.json:
        print(msgspec.json.encode(found).decode())
    else:
        console.print(description_table(options.trace.name, found))


def _add_synthesize(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("synthesize", help="make a trace up, with given statistics")
    parser.add_argument("output", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s")
    parser.add_argument("--dispersion", type=float, default=1.0, help="of arrivals; 1: Poisson")
    parser.add_argument("--hit-ratio", type=float, default=0.0, help="of prompt tokens")
    for name, median, p95 in (("input", 256, 1024), ("output", 64, 256)):
        parser.add_argument(
            f"--{name}-length",
            type=float,
            nargs=2,
            metavar=("MEDIAN", "P95"),
            default=(median, p95),
            help=f"tokens; default: {median} {p95}",
        )
    parser.add_argument("--seed", type=int, default=0)
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_convert, _add_describe, _add_synthesize):
        add(commands)
    options = parser.parse_args()
    console = Console()
    try:
        options.run(options, console)
    except (TraceError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
