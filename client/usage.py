"""The `usage` command: what business lines have used, what it costs, and whether it adds up."""

import argparse
import csv
import io
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tritium.client.ledger import Ledger, LedgerError, Row

NS_PER_HOUR = 3_600_000_000_000
# What can be grouped by, in SQL.
GROUPS = {
    "business_line": "coalesce(nullif(business_line, ''), '(none)')",
    "request_class": "coalesce(nullif(request_class, ''), '(none)')",
    "outcome": "outcome",
    "server": "server",
    "day": "date(arrival, 'unixepoch')",
}
ACCOUNTS = ("warmup", "preemption", "fault", "overrun", "open")  # parts of busy
_KV_TOLERANCE = 1e-9
_ROW_GROUP = 10_000
_UNITS = {"m": 60, "h": 3600, "d": 86400}


@dataclass(slots=True)
class Line:
    """What one group of requests has used, or one account of the system."""

    name: tuple[str, ...]  # values of the columns that were grouped by
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    recompute_ns: int = 0  # on the account _preemption, not here
    saved_ns: int = 0
    kv_block_seconds: float = 0.0
    busy_ns: int = 0
    cost: float = 0.0

    def add(self, other: "Line") -> None:
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_SUMMED = [field.name for field in fields(Line)][1:-1]
_SUMS = ", ".join(
    {"requests": "count(*)", "busy_ns": "sum(prefill_ns + decode_ns)"}.get(name, f"sum({name})")
    for name in _SUMMED
)


@dataclass(frozen=True, slots=True)
class Report:
    """A bill.

    With the basis `usage` a line pays for its busy time, and the system's accounts have lines of
    their own; with `allocation` the lines share all of the time, idle too, as they share the busy
    time. Either way the costs sum to `cost`.
    """

    by: tuple[str, ...]
    basis: str
    lines: list[Line]  # the most expensive first, the system's accounts last
    busy_ns: int
    idle_ns: int
    cost: float

    @classmethod
    def of(cls, ledger: Ledger, by: tuple[str, ...], basis: str, price_per_hour: float) -> "Report":
        groups: dict[tuple[str, ...], Line] = {}
        names = ", ".join(GROUPS[column] for column in by)
        for row in ledger.select(f"{names}, {_SUMS}", "requests", f"GROUP BY {names}"):
            name, sums = tuple(row)[: len(by)], tuple(row)[len(by) :]
            groups.setdefault(name, Line(name)).add(Line(name, *sums))
        accounts = dict.fromkeys((*ACCOUNTS, "busy", "idle"), 0)
        for _, of_server in ledger.by_server():
            for account, ns in _accounts(of_server).items():
                accounts[account] += ns
        busy, idle = accounts["busy"], accounts["idle"]
        system = [
            Line((f"_{account}", *[""] * (len(by) - 1)), busy_ns=accounts[account])
            for account in ACCOUNTS
            if accounts[account]
        ]
        lines = sorted(groups.values(), key=lambda line: (-line.busy_ns, line.name))
        if basis == "allocation":
            billed = sum(line.busy_ns for line in lines)
            whole = busy + idle
            if not billed:  # nobody to share it
                system = [Line(("_unused", *[""] * (len(by) - 1)), busy_ns=busy)]
            for line in lines if billed else system:
                share = line.busy_ns / billed if billed else 1.0
                line.cost = whole * share / NS_PER_HOUR * price_per_hour
            lines = lines if billed else [*lines, *system]
        else:
            lines += system
            for line in lines:
                line.cost = line.busy_ns / NS_PER_HOUR * price_per_hour
        return cls(by, basis, lines, busy, idle, sum(line.cost for line in lines))

    def records(self) -> list[dict[str, Any]]:
        """One a line: the columns that were grouped by, then what it has used."""
        return [
            {**dict(zip(self.by, line.name, strict=True)), **_without_name(line)}
            for line in self.lines
        ]


def _without_name(line: Line) -> dict[str, Any]:
    return {name: value for name, value in asdict(line).items() if name != "name"}


def _accounts(ledger: Ledger) -> dict[str, int]:
    """Where a server's time went between its first totals and the last ones."""
    accounts = dict.fromkeys((*ACCOUNTS, "busy", "idle"), 0)
    behind = ""
    if ends := ledger.ends():
        first, last = ends
        # A server's very first totals have its warm-up, which is in the bill of that time.
        is_first = first["busy_ns"] == first["warmup_ns"]
        is_first &= ledger.since is None or first["time"] > ledger.since
        for account in accounts:
            column = f"{account}_ns"
            accounts[account] = last[column] - (0 if is_first else first[column])
        behind = f"AND sequence > {last['sequence']}"
    # Rows behind the last totals: what they used was open then, as far as it was used by then.
    sums = ledger.select("coalesce(sum(prefill_ns + decode_ns), 0)", "requests", behind)
    later: int = sum(ns for (ns,) in sums)
    was_open = min(later, max(accounts["open"], 0))
    accounts["open"] -= was_open
    accounts["busy"] += later - was_open
    return accounts


# -- forms --


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
    """Callers choose names: neither rich's markup nor a terminal's control codes."""
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
    names = [*report.by, *(name for name in _without_name(Line(())))]
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
    usage = commands.add_parser("usage", help="read ledgers: a bill, a check, an export")
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

    report = actions.add_parser("report", parents=[common, window], help="who has used what")
    report.add_argument(
        "--by",
        type=parse_groups,
        default=("business_line",),
        metavar="COLUMN,...",
        help=f"of {', '.join(GROUPS)}; default: business_line",
    )
    report.add_argument(
        "--price", type=parse_price, default=0.0, help="of the device, as 2.5/gpu-hour"
    )
    report.add_argument(
        "--basis",
        choices=("usage", "allocation"),
        default="usage",
        help="usage: lines pay for their busy time; allocation: they share idle time, too",
    )
    report.add_argument("--format", choices=("table", "csv", "json", "html"), default="table")
    report.set_defaults(run=_report)
    check = actions.add_parser("check", parents=[common], help="prove that the bill adds up")
    check.set_defaults(run=_check)
    export = actions.add_parser("export", parents=[common, window], help="all rows of requests")
    export.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
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
        from tritium.client.usage_html import to_html  # plotly takes a second

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
    """So many rows at a time are in memory as a row group has."""
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
    """A file to write to, or standard output, which is not closed."""
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
