"""The ledger's files: what is written, rotated and deleted, and what survives a crash."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import asdict, astuple, replace
from pathlib import Path

import pytest

from tritium.backend.accounts.ledger import Ledger, TotalsRow
from tritium.backend.accounts.request_usage import RequestRow
from tritium.backend.engine.usage import DEFAULT_WEIGHTS
from tritium.loadtests.harness import until

ROW = RequestRow(
    key="s/0",
    request_id="r",
    trace_id="",
    business_line="search",
    request_class="interactive",
    arrival=1.5,
    outcome="stop",
    n=1,
    prompt_tokens=7,
    cached_tokens=0,
    output_tokens=3,
    queue_ms=1.0,
    ttft_ms=2.0,
    total_ms=3.0,
    prefill_ns=10,
    decode_ns=20,
    recompute_ns=0,
    saved_ns=0,
    kv_block_seconds=0.5,
    peak_blocks=2,
    peak_own_blocks=1,
    preemptions=0,
)
TOTALS = TotalsRow(2.0, 35, 100, 0, 5, 0, 0, 0, 500_000_000, 1)


def make_ledger(directory, **changes) -> Ledger:
    settings = dict(rotate_hours=24.0, retention_days=1.0) | changes
    return Ledger(directory, "smollm2", DEFAULT_WEIGHTS, **settings)


def rows(path, table) -> list[dict]:
    with sqlite3.connect(path) as database:
        database.row_factory = sqlite3.Row
        found = [dict(row) for row in database.execute(f"SELECT * FROM {table}")]
    database.close()
    return found


def test_rows_are_written_in_order(tmp_path):
    ledger = make_ledger(tmp_path)
    ledger.add(ROW)
    ledger.add(TOTALS)
    ledger.add(replace(ROW, key="s/1"))
    ledger.close()
    first, second = rows(ledger.path, "requests")
    assert first.items() >= asdict(ROW).items()
    assert (first["weight_token"], first["weight_context"]) == DEFAULT_WEIGHTS[:2]
    (totals,) = rows(ledger.path, "totals")
    assert totals.items() >= asdict(TOTALS).items()
    assert [first["sequence"], totals["sequence"], second["sequence"]] == [0, 1, 2]
    assert {first["server"], totals["server"], second["server"]} == {ledger.server}


def test_duplicate_row_is_written_once(tmp_path):
    ledger = make_ledger(tmp_path)
    for _ in range(2):
        ledger.add(ROW)
    ledger.close()
    assert len(rows(ledger.path, "requests")) == 1


WRITER = """
import sys, time
from pathlib import Path
from tests.backend.accounts.test_ledger import ROW, make_ledger
from dataclasses import replace
ledger = make_ledger(Path(sys.argv[1]))
for i in range(10**9):
    ledger.add(replace(ROW, key=f"s/{i}", arrival=time.monotonic()))
    print(i, flush=True)
    time.sleep(0.002)
"""


def test_kill_loses_at_most_the_last_second(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
    ) as writer:
        while int(writer.stdout.readline()) < 800:
            pass
        killed = time.monotonic()
        os.kill(writer.pid, signal.SIGKILL)
    (path,) = tmp_path.glob("*.ledger")
    found = rows(path, "requests")
    assert [row["key"] for row in found] == [f"s/{i}" for i in range(len(found))]
    assert killed - found[-1]["arrival"] < 1


def test_old_files_are_rotated_and_deleted(tmp_path):
    now = [time.time()]
    old = tmp_path / "smollm2-20200101T000000Z-1-abcdef.ledger"
    unfinished = old.with_suffix(".new")  # left by a killed process
    other = tmp_path / "smollm2-large-20200101T000000Z-1-abcdef.ledger"
    in_use = tmp_path / "smollm2-20200101T000000Z-2-abcdef.ledger"
    for path in (old, unfinished, other, in_use):
        path.touch()
        os.utime(path, (0, 0))
    in_use.with_name(f"{in_use.name}-wal").touch()
    ledger = make_ledger(tmp_path, rotate_hours=1.0, clock=lambda: now[0])
    assert not old.exists()
    assert not unfinished.exists()
    assert other.exists()  # belongs to another model
    assert in_use.exists()  # its last rows are still in the -wal file
    in_use.unlink()
    first = ledger.path
    ledger.add(ROW)
    ledger.add(TOTALS)
    now[0] += 3601
    until(lambda: ledger.path != first)
    ledger.add(replace(ROW, key="s/1"))
    ledger.close()
    assert [row["key"] for row in rows(first, "requests")] == ["s/0"]
    assert [row["key"] for row in rows(ledger.path, "requests")] == ["s/1"]
    assert rows(first, "totals") == rows(ledger.path, "totals")  # copied to the new file
    assert len(list(tmp_path.glob("smollm2-2*.ledger"))) == 2


def test_old_file_is_kept_while_no_new_one_can_be_created(tmp_path, caplog, monkeypatch):
    now = [time.time()]
    ledger = make_ledger(tmp_path, rotate_hours=1.0, clock=lambda: now[0])
    first = ledger.path
    monkeypatch.setattr("tritium.backend.accounts.ledger._RETRY_SECONDS", 5)
    with monkeypatch.context() as broken:
        broken.setattr("tritium.backend.accounts.ledger._statements", lambda: ["CREATE TABLE no"])
        now[0] += 3601
        until(lambda: "no new file can be created" in caplog.text)
        ledger.add(ROW)
        until(lambda: len(rows(first, "requests")) == 1)
    assert [path.name for path in tmp_path.glob("*.*") if "-" not in path.suffix] == [first.name]
    now[0] += 6
    until(lambda: ledger.path != first)
    ledger.add(replace(ROW, key="s/1"))
    ledger.close()
    assert [row["key"] for row in rows(ledger.path, "requests")] == ["s/1"]


def test_rows_wait_while_the_file_is_locked(tmp_path, caplog):
    ledger = make_ledger(tmp_path)
    with sqlite3.connect(ledger.path, isolation_level=None) as blocker:
        blocker.execute("BEGIN IMMEDIATE")
        ledger.add(ROW)
        until(lambda: "can't be written, rows are kept" in caplog.text)
        blocker.execute("ROLLBACK")
    blocker.close()
    until(lambda: len(rows(ledger.path, "requests")) == 1)
    ledger.close()


@pytest.mark.parametrize("removed", ["folder", "file"])
def test_a_file_that_is_removed_while_in_use_is_written_again(tmp_path, caplog, removed):
    directory = tmp_path / "ledger"
    ledger = make_ledger(directory)
    ledger.add(ROW)
    until(lambda: len(rows(ledger.path, "requests")) == 1)
    shutil.rmtree(directory) if removed == "folder" else ledger.path.unlink()
    until(lambda: ledger.path.exists())  # without any new row
    ledger.add(replace(ROW, key="s/1"))
    until(lambda: len(rows(ledger.path, "requests")) == 2)
    ledger.add(replace(ROW, key="s/2"))
    ledger.close()
    assert [row["key"] for row in rows(ledger.path, "requests")] == ["s/0", "s/1", "s/2"]
    assert caplog.text.count("was removed while in use") == 1


def test_rows_wait_until_a_removed_folder_can_be_made_again(tmp_path, caplog):
    directory = tmp_path / "ledger"
    ledger = make_ledger(directory)
    ledger.add(ROW)
    until(lambda: len(rows(ledger.path, "requests")) == 1)
    shutil.rmtree(directory)
    directory.touch()  # a file in its place
    ledger.add(replace(ROW, key="s/1"))
    until(lambda: "can't be written, rows are kept" in caplog.text)
    directory.unlink()
    until(lambda: "all of it is written again" in caplog.text)
    assert caplog.text.count("can't be written") == 1
    ledger.close()
    assert [row["key"] for row in rows(ledger.path, "requests")] == ["s/0", "s/1"]


def test_a_restore_that_fails_loses_nothing(tmp_path, caplog, monkeypatch):
    """Neither by itself, nor because a rotation falls due meanwhile."""
    now = [time.time()]
    ledger = make_ledger(tmp_path, rotate_hours=1.0, clock=lambda: now[0])
    path = ledger.path
    ledger.add(ROW)
    until(lambda: len(rows(path, "requests")) == 1)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "rename", fail)
        path.unlink()
        ledger.add(replace(ROW, key="s/1"))
        until(lambda: "No space left" in caplog.text)
        now[0] += 3601
        time.sleep(1.2)  # two more attempts
        assert not path.exists()
    until(path.exists)
    ledger.close()
    found = {row["key"] for file in tmp_path.glob("*.ledger") for row in rows(file, "requests")}
    assert found == {"s/0", "s/1"}


def test_a_clock_that_jumps_deletes_nothing(tmp_path):
    now = [time.time()]
    earlier = tmp_path / "smollm2-20200101T000000Z-1-abcdef.ledger"
    earlier.touch()
    os.utime(earlier, (now[0] - 3000, now[0] - 3000))
    ledger = make_ledger(tmp_path, rotate_hours=1.0, clock=lambda: now[0])
    first = ledger.path
    now[0] += 100 * 86400
    until(lambda: ledger.path != first)
    ledger.close()
    assert earlier.exists()
    assert first.exists()
    ledger = make_ledger(tmp_path, clock=lambda: now[0])  # started while the clock is wrong
    ledger.close()
    assert earlier.exists()


def test_directory_that_can_not_be_created(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        make_ledger(tmp_path / "file" / "ledger")


def test_rows_hold_plain_values():
    assert all(isinstance(value, int | float | str) for value in astuple(ROW))
