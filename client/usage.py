"""The command `tritium usage`: reports, checks and exports of ledgers."""

import argparse
import csv
import io
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tritium.client.bill import GROUPS, Line, Report, without_name
from tritium.client.ledger import Ledger, LedgerError, Row
from tritium.client.usage_html import to_html

_KV_TOLERANCE = 1e-9
_ROW_GROUP = 10_000
_UNITS = {"m": 60, "h": 3600, "d": 86400}


# -- formats --


def show_table(report: Report, console: Console) -> None:
    table = Table(title=f"basis: {report.basis}")
    for column in report.by:
        table.add_column(column)
    for column in ("requests", "prompt", "cached", "output", "busy s", "saved s", "KV block s"):
        table.add_column(column, justify="right")
    table.add_column("cost", justify="right")
    for line in report.lines:
        table.add_row(*map(_printable, line.name), *_cells(line))
    whole = Line(("sum", *[""] * (len(report.by) - 1)), cost=report.cost)
    for line in report.lines:
        whole.add(line)
    table.add_section()
    table.add_row(*whole.name, *_cells(whole))
    console.print(table)
    console.print(
        f"busy {report.busy_ns / 1e9:.3f} s, idle {report.idle_ns / 1e9:.3f} s", highlight=False
    )


def _printable(name: str) -> Text:
    """A name as plain text: callers choose names, so markup and control codes must not act."""
    return Text("".join(c if c.isprintable() else ascii(c)[1:-1] for c in name))


def _cells(line: Line) -> list[str]:
    return [
        *(
            f"{number:,}"
            for number in (
                line.requests,
                line.prompt_tokens,
                line.cached_tokens,
                line.output_tokens,
            )
        ),
        f"{line.busy_ns / 1e9:,.3f}",
        f"{line.saved_ns / 1e9:,.3f}",
        f"{line.kv_block_seconds:,.1f}",
        f"{line.cost:,.6f}",
    ]


def to_csv(report: Report) -> str:
    text = io.StringIO()
    names = [*report.by, *without_name(Line(()))]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(report.records())
    return text.getvalue()


def to_json(report: Report) -> str:
    whole = {name: getattr(report, name) for name in ("basis", "busy_ns", "idle_ns", "cost")}
    return json.dumps({**whole, "lines": report.records()}, indent=2)


# -- the command --


def add_commands(commands: Any) -> None:
    """`usage report`, `usage check` and `usage export`."""
    usage = commands.add_parser(
        "usage",
        help="bills from the files of a ledger",
        description="Compute bills from the files of a ledger, check them, and export their rows.",
    )
    actions = usage.add_subparsers(required=True, metavar="ACTION")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "ledgers",
        nargs="*",
        type=Path,
        default=[Path("ledger")],
        help="files, or directories with *.ledger files (default: ./ledger); several are merged",
    )
    window = argparse.ArgumentParser(add_help=False)
    for name in ("--since", "--until"):
        window.add_argument(
            name, type=parse_time, metavar="WHEN", help="2026-11-30[T12:00] (UTC), or 90m, 24h, 7d"
        )
    window.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")

    report = actions.add_parser(
        "report",
        parents=[common, window],
        help="what each line used and what it costs",
        description="Print what each group of requests used and what it costs.",
    )
    report.add_argument(
        "--by",
        type=parse_groups,
        default=("business_line",),
        metavar="COLUMN,...",
        help=f"columns to group by: {', '.join(GROUPS)}; default: business_line",
    )
    report.add_argument(
        "--price",
        type=parse_price,
        default=0.0,
        help="price of the device, for example 2.5/gpu-hour",
    )
    report.add_argument(
        "--basis",
        choices=("usage", "allocation"),
        default="usage",
        help="usage (default): a line pays for its busy time; allocation: idle time is shared, too",
    )
    report.add_argument(
        "--format",
        choices=("table", "csv", "json", "html"),
        default="table",
        help="default: %(default)s",
    )
    report.set_defaults(run=_report)
    check = actions.add_parser(
        "check",
        parents=[common],
        help="check that the bills add up",
        description="Check that the bills and the system accounts add up to the busy time.",
    )
    check.set_defaults(run=_check)
    export = actions.add_parser(
        "export",
        parents=[common, window],
        help="one row per request",
        description="Write one row per request.",
    )
    export.add_argument(
        "--format", choices=("jsonl", "parquet"), default="jsonl", help="default: %(default)s"
    )
    export.set_defaults(run=_export)


def parse_price(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/(?:gpu-)?hour)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected a price such as 2.5/gpu-hour, got {text!r}")
    return float(match[1])


def parse_groups(text: str) -> tuple[str, ...]:
    columns = tuple(text.split(","))
    for column in columns:
        if column not in GROUPS:
            raise argparse.ArgumentTypeError(f"{column!r} is none of {', '.join(GROUPS)}")
    if len(set(columns)) < len(columns):
        raise argparse.ArgumentTypeError(f"{text!r} names a column twice")
    return columns


def parse_time(text: str) -> float:
    """Seconds since 1970."""
    if match := re.fullmatch(r"(\d+)([mhd])", text):
        return time.time() - int(match[1]) * _UNITS[match[2]]
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a time such as 2026-11-30, 2026-11-30T12:00 or 24h, got {text!r}"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _read(args: argparse.Namespace) -> Ledger:
    if args.since is not None and args.until is not None and args.since > args.until:
        raise LedgerError("--since is later than --until, so there is nothing between them")
    return Ledger.read(args.ledgers).window(args.since, args.until)


def _report(args: argparse.Namespace) -> int:
    ledger = _read(args)
    report = Report.of(ledger, args.by, args.basis, args.price)
    if args.format == "table":
        with _output(args.output) as file:
            show_table(report, Console(file=file, width=None if file.isatty() else 160))
        return 0
    if args.format == "html":
        text = to_html(report, ledger, args.price)
    else:
        text = to_csv(report) if args.format == "csv" else to_json(report) + "\n"
    with _output(args.output) as file:
        file.write(text)
    return 0


def _check(args: argparse.Namespace) -> int:
    gaps = Ledger.read(args.ledgers).check()
    if not gaps:
        raise LedgerError("there are no totals in these ledgers yet, so nothing can be checked")
    good = True
    for gap in gaps:
        good &= gap.busy_ns == 0 and gap.kv_block_seconds <= _KV_TOLERANCE
        print(
            f"server {gap.server}: busy time - bills - system: {gap.busy_ns} ns over "
            f"{gap.num_totals} totals; KV block-seconds off by {gap.kv_block_seconds:.1e} "
            f"(relative); {gap.num_later_rows} rows behind the last totals"
        )
    print("the bill adds up" if good else "THE BILL DOES NOT ADD UP")
    return 0 if good else 1


def _export(args: argparse.Namespace) -> int:
    ledger = _read(args)
    rows = ledger.select("*", "requests", "ORDER BY sequence")
    if args.format == "parquet":
        if not args.output:
            raise LedgerError("--format parquet needs --output FILE")
        _write_parquet(rows, ledger.columns("requests"), args.output)
        return 0
    with _output(args.output) as file:
        for row in rows:
            file.write(json.dumps(dict(row)) + "\n")
    return 0


def _write_parquet(rows: Iterator[Row], columns: dict[str, str], path: Path) -> None:
    """Holds one row group in memory at a time."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise LedgerError(
            "--format parquet needs pyarrow, which is not installed: pip install pyarrow"
        ) from None
    types = {"INTEGER": pyarrow.int64(), "REAL": pyarrow.float64(), "TEXT": pyarrow.string()}
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
    with _writing(path), pyarrow.parquet.ParquetWriter(path, schema) as writer:
        while group := [dict(row) for row in islice(rows, _ROW_GROUP)]:
            writer.write_table(pyarrow.Table.from_pylist(group, schema))


@contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    """The file to write to, or standard output, which stays open."""
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    with _writing(path), path.open("w", encoding="utf-8") as file:
        yield file


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LedgerError(f"--output {path}: can't be written: {error}") from None
