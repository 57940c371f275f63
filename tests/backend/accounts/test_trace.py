"""Traffic capture: what is written, where, and what happens if the disk fails."""

import json
import threading

import pytest

from tritium.backend.accounts.trace import Captured, TraceWriter, hash_ids
from tritium.loadtests.traces.convert import convert
from tritium.loadtests.traces.format import read_trace


def captured(tokens, salt=b"", arrival=0.0, outputs=(3,), line=""):
    return Captured(arrival, tokens, list(outputs), salt, line, "interactive")


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_equal_ids_mean_equal_prefixes_under_one_salt_and_key():
    prompt = list(range(100, 140))

    def ids(tokens, salt=b"a", key=b"k"):
        return hash_ids(captured(tokens, salt), 16, key)

    assert len(ids(prompt)) == 3
    assert ids(prompt[:32]) == ids(prompt)[:2]
    assert ids([*prompt[:-1], 1])[:2] == ids(prompt)[:2]
    assert ids([*prompt[:-1], 1])[2] != ids(prompt)[2]
    changed = ids([1, *prompt[1:]])
    assert not set(changed) & set(ids(prompt))
    assert not set(ids(prompt, salt=b"b")) & set(ids(prompt))
    assert not set(ids(prompt, key=b"l")) & set(ids(prompt))
    assert max(ids(prompt)) < 2**53


def test_rows_have_the_arrival_time_and_no_text(tmp_path):
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path, 2**20, 16)
    writer.add(
        captured(list(range(40)), arrival=1_700_000_000.1234567, outputs=[5, 0, 1], line="search")
    )
    writer.close()
    rows = written(path)
    assert [row["output_length"] for row in rows] == [5, 1]  # one row per answer with tokens
    assert rows[0].keys() == {
        *("timestamp", "input_length", "output_length", "hash_ids", "hash_block_size"),
        *("business_line", "request_class"),
    }
    assert (rows[0]["input_length"], rows[0]["business_line"]) == (40, "search")
    assert rows[0]["timestamp"] == 1_700_000_000_123.457


def test_capture_converts_in_order_of_arrival(tmp_path):
    path, output = tmp_path / "trace.jsonl", tmp_path / "out"
    writer = TraceWriter(path, 2**20, 16)
    for arrival in (3.0, 1.0, 2.5):
        writer.add(captured([1, 2], arrival=arrival))
    writer.close()
    assert convert(path, output, "server") == (3, 0)
    times = [request.timestamp for request in read_trace(output)]
    assert times == pytest.approx([0, 1500, 2000], abs=0.01)


def test_oldest_files_are_deleted(tmp_path):
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path, 2**16, 16)
    for i in range(2000):
        writer.add(captured([i], arrival=float(i)))
    writer.close()
    files = list(tmp_path.iterdir())
    assert len(files) == 8
    assert sum(file.stat().st_size for file in files) <= 2**16
    rows = [row for file in files for row in written(file)]  # all lines are complete
    assert 300 < len(rows) < 2000
    assert max(row["timestamp"] for row in rows) - min(row["timestamp"] for row in rows) > 300_000


def test_second_writer_appends(tmp_path):
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        writer = TraceWriter(path, 2**20, 16)
        writer.add(captured([1]))
        writer.close()
    assert len(written(path)) == 2


def test_missing_folder(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        TraceWriter(tmp_path / "none" / "trace.jsonl", 2**20, 16)


def test_failing_or_stalled_disk_blocks_nothing(tmp_path, caplog):
    writer = TraceWriter(tmp_path / "trace.jsonl", 2**20, 16)
    hanging = threading.Event()

    def write(line):
        hanging.wait(10)
        raise OSError("disk full")

    writer._file.write = write
    for _ in range(10_100):
        writer.add(captured([1]))
    assert "requests are missing" in caplog.text
    hanging.set()
    writer.close()
    assert "nothing more is written: disk full" in caplog.text
    assert caplog.text.count("trace_path") == 2
