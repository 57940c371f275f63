"""Reads the ledgers of one or more servers as one. docs/billing.md has their schema.

Rows stay in their files: SQLite computes sums, and rows are read one after the other.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import NamedTuple

SCHEMA_VERSION = 1

Row = sqlite3.Row


class LedgerError(ValueError):
    """A ledger can't be read; the message names the file and what is wrong."""


class Gap(NamedTuple):
    """By how much the identity fails for one server; zero in a correct ledger."""

    server: str
    num_totals: int
    busy_ns: int  # sum of absolute differences
    kv_block_seconds: float  # the largest, relative
    num_later_rows: int  # rows after the last totals, which no totals cover yet


class _Part(NamedTuple):
    """The rows that are read from one file: sequence numbers first to last, inclusive."""

    path: Path
    first: int
    last: int


class Ledger:
    """Rows of requests and of totals, each once, in the order in which their servers wrote them.

    Rows written after `read` are not seen, so all queries agree.
    """

    def __init__(self, servers: dict[str, list[_Part]], since: float | None = None) -> None:
        self._servers = servers
        self.since = since  # seconds since 1970; None: from the start

    @classmethod
    def read(cls, paths: list[Path]) -> "Ledger":
        """Read files, or all `*.ledger` files of directories; a copy of a file adds nothing.

        Raises:
            LedgerError: names the file.
        """
        found: dict[str, list[_Part]] = {}
        for path in _files(paths):
            version, server = _one(path, "SELECT schema_version, server FROM server")
            if version != SCHEMA_VERSION:
                raise LedgerError(
                    f"{path}: has version {version} of the schema; this client reads version "
                    f"{SCHEMA_VERSION}"
                )
            ends = " UNION ALL ".join(  # separate queries, which SQLite answers without a scan
                f"SELECT {end}(sequence) AS n FROM {table}"
                for table in ("requests", "totals")
                for end in ("min", "max")
            )
            first, last = _one(path, f"SELECT min(n), max(n) FROM ({ends})")
            if first is not None:
                found.setdefault(server, []).append(_Part(path, first, last))
        return cls({server: _once(parts) for server, parts in sorted(found.items())})

    def window(self, since: float | None, until: float | None) -> "Ledger":
        """Per server: from the last totals before `since` to the last totals before `until`.

        The window holds every row between them, so the identity holds within it.
        """
        servers = {}
        for server, ledger in self.by_server():
            first = ledger._last_totals_by(since, 0)
            last = ledger._last_totals_by(until, -1)
            servers[server] = [
                _Part(path, max(start, first), end if until is None else min(end, last))
                for path, start, end in self._servers[server]
            ]
        return Ledger(servers, since)

    def by_server(self) -> "Iterator[tuple[str, Ledger]]":
        for server, parts in self._servers.items():
            yield server, Ledger({server: parts}, self.since)

    def select(self, what: str, table: str, how: str = "") -> Iterator[Row]:
        """SELECT `what` FROM `table` WHERE ... `how`, in one file after the other.

        Raises:
            LedgerError: a file is damaged.
        """
        for parts in self._servers.values():
            for path, first, last in parts:
                sql = f"SELECT {what} FROM {table} WHERE sequence BETWEEN {first} AND {last} {how}"
                yield from _execute(path, sql)

    def columns(self, table: str) -> dict[str, str]:
        """Column names and their SQLite types."""
        paths = (path for parts in self._servers.values() for path, *_ in parts)
        information = f"PRAGMA table_info({table})"
        return {
            row["name"]: row["type"]
            for path in islice(paths, 1)
            for row in _execute(path, information)
        }

    def ends(self) -> tuple[Row, Row] | None:
        """The first and the last totals of one server; None if there are none."""
        found = self.select("min(sequence), max(sequence)", "totals")
        numbers = [number for row in found for number in row if number is not None]
        if not numbers:
            return None
        condition = f"AND sequence IN ({min(numbers)}, {max(numbers)}) ORDER BY sequence"
        rows = list(self.select("*", "totals", condition))
        return rows[0], rows[-1]

    def check(self) -> list[Gap]:
        """Check the identity between consecutive totals, per server::

        busy = rows + open + warm-up + preemption + fault + overrun
        """
        gaps = [ledger._check(server) for server, ledger in self.by_server()]
        return [gap for gap in gaps if gap.num_totals]

    def _check(self, server: str) -> Gap:
        requests = self.select(
            "sequence, prefill_ns + decode_ns AS busy_ns, kv_block_seconds",
            "requests",
            "ORDER BY sequence",
        )
        row = next(requests, None)
        num_totals, busy_ns, kv_gap, held = 0, 0, 0.0, 0.0
        before = quiet = None
        for after in self.select("*", "totals", "ORDER BY sequence"):
            billed = 0
            while row and row["sequence"] < after["sequence"]:
                billed += row["busy_ns"]
                held += row["kv_block_seconds"]
                row = next(requests, None)
            if before:
                busy_ns += abs(_unbilled(after) - _unbilled(before) - billed)
            if after["is_quiet"]:
                if quiet:
                    expected = (after["kv_block_ns"] - quiet["kv_block_ns"]) / 1e9
                    kv_gap = max(kv_gap, abs(held - expected) / max(abs(expected), 1e-9))
                quiet, held = after, 0.0
            before = after
            num_totals += 1
        num_later_rows = bool(row) + sum(1 for _ in requests)
        return Gap(server, num_totals, busy_ns, kv_gap, num_later_rows)

    def _last_totals_by(self, moment: float | None, otherwise: int) -> int:
        """Sequence number of the last totals by `moment`; `otherwise` if there are none."""
        if moment is None:
            return otherwise
        found = self.select("max(sequence)", "totals", f"AND time <= {moment!r}")
        return max((number for (number,) in found if number is not None), default=otherwise)


def _unbilled(totals: Row) -> int:
    """Busy time that the rows of requests must account for."""
    accounts = ("open_ns", "warmup_ns", "preemption_ns", "fault_ns", "overrun_ns")
    unbilled: int = totals["busy_ns"] - sum(totals[account] for account in accounts)
    return unbilled


def _once(parts: list[_Part]) -> list[_Part]:
    """Parts in order, each without the rows that an earlier part has as well.

    A file holds everything that its server wrote in its time, and begins with the last rows of the
    file before it. A shorter copy of a file is contained in the longer one.
    """
    kept: list[_Part] = []
    position = -1
    for path, first, last in sorted(parts, key=lambda part: part[1:]):
        if last > position:
            kept.append(_Part(path, max(first, position + 1), last))
            position = last
    return kept


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = sorted(path.glob("*.ledger"))
            if not found:
                raise LedgerError(f"{path}: there is no *.ledger in this directory")
            yield from found
        elif path.is_file():
            yield path
        else:
            raise LedgerError(f"{path}: there is no such file or directory")


def _one(path: Path, sql: str) -> Row:
    for row in _execute(path, sql):
        return row
    raise LedgerError(f"{path}: is not a ledger, or is damaged: there is no server in it")


def _execute(path: Path, sql: str) -> Iterator[Row]:
    try:
        with closing(_connect(path)) as database:
            database.row_factory = sqlite3.Row
            yield from database.execute(sql)
    except sqlite3.Error as error:
        raise LedgerError(f"{path}: is not a ledger, or is damaged: {error}") from None


def _connect(path: Path) -> sqlite3.Connection:
    """If the writer was killed, the end of the file is in its -wal, and SQLite must write there to
    read it. In a read-only folder a file without a -wal is read as it is."""
    if os.access(path.parent, os.W_OK) or path.with_name(f"{path.name}-wal").exists():
        return sqlite3.connect(path)
    return sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)
