"""Reads the ledgers of one or several servers as one. Their schema is in docs/billing.md."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

SCHEMA_VERSION = 1

Row = dict[str, Any]  # by the columns' names


class LedgerError(ValueError):
    """A ledger can't be read; the message names the file and what is wrong."""


class Gap(NamedTuple):
    """What the identity is off by; both are zero in a good ledger."""

    server: str
    num_totals: int
    busy_ns: int  # sum of absolute differences
    kv_block_seconds: float  # the largest, relative
    num_later_rows: int  # rows behind the last totals, which nothing speaks of yet


class Ledger:
    """Rows of requests and of totals, each once, in the order in which their servers wrote them."""

    def __init__(self, requests: list[Row], totals: list[Row]) -> None:
        self.requests = requests
        self.totals = totals

    @classmethod
    def read(cls, paths: list[Path]) -> "Ledger":
        """Of files, or of all `*.ledger` in directories; a file's copy adds nothing.

        Raises:
            LedgerError: names the file.
        """
        requests: dict[str, Row] = {}
        totals: dict[tuple[str, int], Row] = {}
        for path in _files(paths):
            for row in _rows(path, "requests"):
                requests.setdefault(row["key"], row)
            for row in _rows(path, "totals"):
                totals.setdefault((row["server"], row["sequence"]), row)
        return cls(*(sorted(rows.values(), key=_order) for rows in (requests, totals)))

    def window(self, since: float | None, until: float | None) -> "Ledger":
        """From the last totals before `since` to the last ones before `until`, server by server.

        So every row in between is there, and the identity holds for it.
        """
        requests: list[Row] = []
        totals: list[Row] = []
        for server, of_server in self.totals_by_server().items():
            marks = [row for row in of_server if until is None or row["time"] <= until]
            before = [row for row in marks if since is not None and row["time"] <= since]
            marks = marks[max(len(before) - 1, 0) :]
            if not marks:
                continue
            totals += marks
            first, last = marks[0]["sequence"], marks[-1]["sequence"]
            requests += [
                row
                for row in self.requests
                if row["server"] == server
                and (row["sequence"] > first or since is None)
                and (row["sequence"] < last or until is None)
            ]
        return Ledger(requests, totals)

    def totals_by_server(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.totals:
            found.setdefault(row["server"], []).append(row)
        return found

    def check(self) -> list[Gap]:
        """The identity between each totals and the next ones, server by server::

        busy = rows + open + warm-up + preemption + fault + overrun
        """
        return [self._check(server, rows) for server, rows in self.totals_by_server().items()]

    def _check(self, server: str, totals: list[Row]) -> Gap:
        rows = [row for row in self.requests if row["server"] == server]
        busy_ns, kv_gap, held = 0, 0.0, 0.0
        quiet = totals[0] if totals[0]["is_quiet"] else None
        position = sum(row["sequence"] < totals[0]["sequence"] for row in rows)
        for before, after in pairwise(totals):
            billed = 0
            while position < len(rows) and rows[position]["sequence"] < after["sequence"]:
                row = rows[position]
                billed += row["prefill_ns"] + row["decode_ns"]
                held += row["kv_block_seconds"]
                position += 1
            busy_ns += abs(_unbilled(after) - _unbilled(before) - billed)
            if after["is_quiet"]:
                if quiet:
                    expected = (after["kv_block_ns"] - quiet["kv_block_ns"]) / 1e9
                    kv_gap = max(kv_gap, abs(held - expected) / max(abs(expected), 1e-9))
                quiet, held = after, 0.0
        return Gap(server, len(totals), busy_ns, kv_gap, len(rows) - position)


def _unbilled(totals: Row) -> int:
    """What rows of requests have to make up for."""
    accounts = ("open_ns", "warmup_ns", "preemption_ns", "fault_ns", "overrun_ns")
    return totals["busy_ns"] - sum(totals[account] for account in accounts)


def _order(row: Row) -> tuple[str, int]:
    return row["server"], row["sequence"]


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


def _rows(path: Path, table: str) -> list[Row]:
    try:
        # Not read-only: where its writer was killed, the file's end is still in its -wal.
        with closing(sqlite3.connect(path)) as database:
            database.row_factory = sqlite3.Row
            (version,) = database.execute("SELECT schema_version FROM server").fetchone()
            if version != SCHEMA_VERSION:
                raise LedgerError(
                    f"{path}: has version {version} of the schema; this client reads version "
                    f"{SCHEMA_VERSION}"
                )
            return [dict(row) for row in database.execute(f"SELECT * FROM {table}")]
    except (sqlite3.Error, TypeError) as error:
        raise LedgerError(f"{path}: is not a ledger, or is damaged: {error}") from None
