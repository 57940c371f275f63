"""The ledger: one row per finished request, in SQLite files of this process (docs/billing.md).

Requests never wait for it: a writer thread commits their rows within a second. Files only grow; a
new one is begun periodically, and old ones are deleted as a whole. Prompts and answers are not
stored.
"""

import logging
import math
import os
import queue
import re
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from tritium.backend.accounts.request_usage import RequestRow
from tritium.backend.engine.usage import Weights
from tritium.backend.supervisor import Supervisor

logger = logging.getLogger("tritium")

SCHEMA_VERSION = 1
_COMMIT_SECONDS = 0.5
_RETRY_SECONDS = 60  # after a new file could not be created
_MAX_PENDING = 100_000  # rows kept while the file can't be written; beyond, the oldest are lost
_LONGEST_PAUSE = (
    86400  # seconds between two runs; after a longer one, old files are kept for longer
)
_SQL_TYPES = {int: "INTEGER", float: "REAL", str: "TEXT"}


@dataclass(frozen=True, slots=True)
class TotalsRow:
    """What the device's time was spent on at one moment, in ns since the server started."""

    time: float  # seconds since 1970
    busy_ns: int
    idle_ns: int
    open_ns: int  # part of busy_ns: requests without a row before this one
    warmup_ns: int
    preemption_ns: int
    fault_ns: int
    overrun_ns: int
    kv_block_ns: int
    is_quiet: int  # 1: the rows before this one account for all of kv_block_ns


class Ledger:
    """Appends rows to a file of this process, on a thread of its own.

    Args:
        directory: Where the files are; created if it does not exist.
        model: Part of the files' names, with the time and the process id.
        weights: The weights that share a step's time among requests; stored with each row.
        rotate_hours: How long a file is written to before the next one is begun.
        retention_days: How long this model's files are kept after their last row.
        clock: Seconds since 1970. It may jump: no file is deleted because of that.
        supervisor: Starts the thread.

    Raises:
        OSError, sqlite3.Error: the file can't be created.
    """

    def __init__(
        self,
        directory: Path,
        model: str,
        weights: Weights,
        rotate_hours: float,
        retention_days: float,
        clock: Callable[[], float] = time.time,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.server = uuid.uuid4().hex
        self._directory = directory
        self._model = re.sub(r"[^\w.-]", "_", model)
        self._weights = weights
        self._rotate_seconds = rotate_hours * 3600
        self._retention_seconds = retention_days * 86400
        self._clock = clock
        self._pending: list[RequestRow | TotalsRow] = []
        self._sequence = 0  # number of the next row; counts rows of both tables
        self._failing = False
        self._rows: queue.SimpleQueue[RequestRow | TotalsRow | None] = queue.SimpleQueue()
        directory.mkdir(parents=True, exist_ok=True)
        # The latest time that can be right, less the monotonic clock: no more than half of the
        # retention after the last file was written. After a longer pause, old files stay longer.
        last = max((t for _, t in self._files()), default=math.inf)
        self._latest = min(clock(), last + self._retention_seconds / 2) - time.monotonic()
        self.path = self._make()
        self._delete_old()
        self._thread = (supervisor or Supervisor()).start("ledger", self._run)

    def add(self, row: RequestRow | TotalsRow) -> None:
        """Queue a row; rows are written in this order. For any thread."""
        self._rows.put(row)

    def close(self) -> None:
        """Write all queued rows, then stop."""
        self._rows.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._database = sqlite3.connect(self.path, timeout=1)
        stopping = False
        while not stopping:
            deadline = time.monotonic() + _COMMIT_SECONDS
            while not stopping and (left := deadline - time.monotonic()) > 0:
                try:
                    row = self._rows.get(timeout=left)
                except queue.Empty:
                    break
                if row is None:
                    stopping = True
                else:
                    self._pending.append(row)
            try:
                if not self.path.exists():
                    self._restore()
                self._write()
            except (sqlite3.Error, OSError) as error:
                self._keep(error)
            if self._clock() >= self._rotation and self.path.exists():
                self._rotate()
        if self._pending:
            logger.error(f"ledger: {len(self._pending)} rows could not be written and are lost")
        self._database.close()

    def _write(self) -> None:
        """Write all pending rows in one transaction."""
        if not self._pending:
            return
        with self._database:
            for number, row in enumerate(self._pending, self._sequence):
                self._insert(number, row)
        self._sequence += len(self._pending)
        self._pending.clear()
        if self._failing:
            logger.info(f"ledger: {self.path} can be written again")
            self._failing = False

    def _restore(self) -> None:
        """Write a file again that somebody has removed: the open connection still has its rows."""
        self._directory.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.unlink(missing_ok=True)
        self._database.execute("VACUUM INTO ?", (str(new),))
        new.rename(self.path)
        # Only now: it has the only copy until then. Closing deletes a -wal file of this name, which
        # the new file does not have yet.
        self._database.close()
        self._database = sqlite3.connect(self.path, timeout=1)
        self._database.execute("PRAGMA journal_mode=WAL")
        logger.error(f"ledger: {self.path} was removed while in use; all of it is written again")

    def _insert(self, number: int, row: RequestRow | TotalsRow) -> None:
        values = (number, self.server, *astuple(row))
        table = "requests" if isinstance(row, RequestRow) else "totals"
        if isinstance(row, RequestRow):
            values += self._weights
        placeholders = ", ".join("?" * len(values))
        self._database.execute(f"INSERT OR IGNORE INTO {table} VALUES ({placeholders})", values)

    def _keep(self, error: Exception) -> None:
        if not self._failing:
            logger.error(f"ledger: {self.path} can't be written, rows are kept: {error}")
            self._failing = True
        if too_many := max(len(self._pending) - _MAX_PENDING, 0):
            del self._pending[:too_many]
            self._sequence += too_many  # a gap shows that rows are missing
            logger.error(f"ledger: {too_many} rows are lost")

    def _rotate(self) -> None:
        """Continue in a new file, or in the old one if none can be created."""
        try:
            path = self._make()
            database = sqlite3.connect(path, timeout=1)
            try:
                self._begin(database)
            except sqlite3.Error:
                database.close()
                path.unlink()
                raise
        except (sqlite3.Error, OSError) as error:
            logger.error(f"ledger: no new file can be created, {self.path} is kept: {error}")
            self._rotation = self._clock() + _RETRY_SECONDS
            return
        self._database.close()
        self._database, self.path = database, path
        self._delete_old()

    def _make(self) -> Path:
        """Create a file with empty tables, under a temporary name until it is complete."""
        now = self._clock()
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        name = f"{self._model}-{moment}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        path = self._directory / f"{name}.new"
        try:
            with closing(sqlite3.connect(path, timeout=1)) as database, database:
                database.execute("PRAGMA journal_mode=WAL")
                for statement in _statements():
                    database.execute(statement)
                database.execute(
                    "INSERT INTO server VALUES (?, ?, ?, ?)",
                    (SCHEMA_VERSION, self.server, self._model, now),
                )
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self._rotation = now + self._rotate_seconds
        return path.rename(path.with_suffix(".ledger"))

    def _begin(self, database: sqlite3.Connection) -> None:
        """Copy the last totals of the previous file, and the rows after them, into a new file."""
        database.execute("ATTACH ? AS old", (str(self.path),))
        last = "(SELECT max(sequence) FROM old.totals)"
        with database:
            for table in ("totals", "requests"):
                database.execute(
                    f"INSERT INTO {table} SELECT * FROM old.{table} WHERE sequence >= {last}"
                )
        database.execute("DETACH old")

    def _delete_old(self) -> None:
        """Delete this model's files that were last written before the retention period."""
        now = min(self._clock(), self._latest + time.monotonic())
        try:
            for paths, last_written in self._files():
                if last_written < now - self._retention_seconds:
                    for path in paths:
                        path.unlink()
        except FileNotFoundError:
            pass  # another process deletes the same files
        except OSError as error:
            logger.error(f"ledger: an old file can't be deleted: {error}")

    def _files(self) -> list[tuple[list[Path], float]]:
        """This model's files, each with its -wal and -shm files, and when it was last written."""
        name = re.compile(rf"({re.escape(self._model)}-\d{{8}}T\d{{6}}Z-\d+-\w{{6}}\.).+")
        found: dict[str, list[tuple[Path, float]]] = {}
        for path in self._directory.iterdir():
            if match := name.fullmatch(path.name):
                with suppress(FileNotFoundError):  # another process deletes the same files
                    found.setdefault(match[1], []).append((path, path.stat().st_mtime))
        return [
            ([path for path, _ in files], max(written for _, written in files))
            for files in found.values()
            if files
        ]


def _statements() -> Iterator[str]:
    yield "CREATE TABLE server (schema_version INTEGER, server TEXT, model TEXT, started REAL)"
    common = "sequence INTEGER PRIMARY KEY, server TEXT NOT NULL"
    weights = ", ".join(f"weight_{name} INTEGER NOT NULL" for name in Weights._fields)
    yield f"CREATE TABLE requests ({common}, {_columns(RequestRow)}, {weights}, UNIQUE (key))"
    yield f"CREATE TABLE totals ({common}, {_columns(TotalsRow)})"


def _columns(row: type[RequestRow] | type[TotalsRow]) -> str:
    return ", ".join(f"{field.name} {_SQL_TYPES[field.type]} NOT NULL" for field in fields(row))  # type: ignore[index]
