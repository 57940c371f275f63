"""The `usage` command: formats of the report, the check, exports, errors of broken ledgers."""

import csv
import html.parser
import io
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import pyarrow.parquet
import pytest

from tests.backend.accounts.test_ledger import ROW, make_ledger
from tritium.backend.accounts.ledger import RequestRow, TotalsRow
from tritium.client.__main__ import main
from tritium.client.ledger import Ledger
from tritium.loadtests.harness import until

SECOND = 1_000_000_000


def rows_of(line: str, count: int, **changes) -> list[RequestRow]:
    return [
        replace(
            ROW,
            key=f"{line}/{i}",
            business_line=line,
            arrival=1_800_000_000.0 + i,
            prefill_ns=SECOND,
            decode_ns=2 * SECOND,
            saved_ns=SECOND // 2,
            recompute_ns=SECOND // 4,
            kv_block_seconds=1.5,
            **changes,
        )
        for i in range(count)
    ]


def totals(requests: int, idle: int = 0, **changes) -> TotalsRow:
    """The totals after `requests` requests of 3 s each, and 2 s of warm-up."""
    values = dict(
        time=1_800_000_000.0 + requests,
        busy_ns=(2 + 3 * requests) * SECOND,
        idle_ns=idle,
        open_ns=0,
        warmup_ns=2 * SECOND,
        preemption_ns=0,
        fault_ns=0,
        overrun_ns=0,
        kv_block_ns=requests * 3 * SECOND // 2,
        is_quiet=1,
    )
    return TotalsRow(**(values | changes))


def write(directory, *rows: RequestRow | TotalsRow):
    ledger = make_ledger(directory)
    for row in rows:
        ledger.add(row)
    ledger.close()
    return ledger.path


@pytest.fixture
def ledger(tmp_path):
    """A ledger of 6 requests of two lines, 20 s busy and 10 s idle."""
    return write(
        tmp_path / "ledger",
        totals(0),
        *rows_of("search", 2),
        totals(2),
        *rows_of("ads", 4, request_class="offline"),
        totals(6, idle=10 * SECOND),
    )


def run(capsys, *arguments) -> str:
    assert main(["usage", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def fails(capsys, *arguments) -> str:
    assert main(["usage", *map(str, arguments)]) == 1
    return capsys.readouterr().err


def lines_of(capsys, *arguments) -> dict[str, dict]:
    report = json.loads(run(capsys, "report", *arguments, "--format", "json"))
    assert sum(line["cost"] for line in report["lines"]) == pytest.approx(report["cost"])
    return {line["business_line"]: line for line in report["lines"]}


def test_basis_usage_has_lines_of_system_accounts(ledger, capsys):
    lines = lines_of(capsys, ledger, "--price", "3600/gpu-hour")
    assert {name: line["cost"] for name, line in lines.items()} == {
        "ads": 12.0,
        "search": 6.0,
        "_warmup": 2.0,
    }
    assert lines["ads"]["requests"] == 4
    assert lines["ads"]["output_tokens"] == 12
    assert lines["search"]["kv_block_seconds"] == 3.0


def test_basis_allocation_charges_all_time(ledger, capsys):
    lines = lines_of(capsys, ledger, "--price", "3600", "--basis", "allocation")
    costs = {name: line["cost"] for name, line in lines.items()}
    assert costs == pytest.approx({"ads": 20.0, "search": 10.0})


def test_report_grouped_by_two_columns(ledger, capsys):
    text = run(capsys, "report", ledger, "--by", "business_line,request_class", "--format", "csv")
    first, second, warmup = csv.DictReader(io.StringIO(text))
    assert (first["business_line"], first["request_class"]) == ("ads", "offline")
    assert (second["business_line"], second["request_class"]) == ("search", "interactive")
    assert warmup["busy_ns"] == str(2 * SECOND)


def test_table_has_sums(ledger, capsys):
    table = run(capsys, "report", ledger, "--price", "3600")
    assert re.search(r"search\W+2\W+14\W+0\W+6\W+6.000", table)
    assert re.search(r"sum\W+6\W+42\W+0\W+18\W+20.000", table)
    assert "busy 20.000 s, idle 10.000 s" in table


def test_window_has_rows_between_totals(ledger, capsys):
    lines = lines_of(capsys, ledger, "--since", "2027-01-15T08:00:03")
    assert set(lines) == {"ads"}
    lines = lines_of(capsys, ledger, "--until", "2027-01-15T08:00:03")
    assert set(lines) == {"search", "_warmup"}


def test_ledgers_are_merged_and_a_copy_adds_nothing(ledger, tmp_path, capsys):
    alone = lines_of(capsys, ledger)
    copy = shutil.copy(ledger, tmp_path / "copy.ledger")
    assert lines_of(capsys, ledger, copy) == alone
    more = [replace(row, key=f"other/{row.key}") for row in rows_of("ads", 1)]
    write(tmp_path / "other", totals(0), *more, totals(1))
    both = lines_of(capsys, ledger.parent, tmp_path / "other")
    assert both["ads"]["requests"] == 5
    assert both["_warmup"]["busy_ns"] == 4 * SECOND


def test_rotated_ledger(tmp_path, capsys):
    """Rotation between totals: each file adds up, both together do, and no row counts twice."""
    now = [1.0]
    ledger = make_ledger(tmp_path, rotate_hours=1.0, clock=lambda: now[0])
    first = ledger.path
    for row in (totals(0), *rows_of("search", 2), totals(2), *rows_of("ads", 2)):
        ledger.add(row)
    until(lambda: len(rows_in(first)) == 4)
    now[0] += 3601
    until(lambda: ledger.path != first)
    for row in (*rows_of("ads", 5)[2:], totals(7)):
        ledger.add(row)
    ledger.close()
    assert len(rows_in(ledger.path)) == 5  # 2 rows are in both files
    for paths, output in (
        ([first], ": 0 ns over 2 totals"),
        ([ledger.path], ": 0 ns over 2 totals"),
        ([tmp_path], ": 0 ns over 3 totals"),
    ):
        assert output in run(capsys, "check", *paths)
    lines = lines_of(capsys, tmp_path)
    assert {name: line["requests"] for name, line in lines.items()} == {
        "search": 2,
        "ads": 5,
        "_warmup": 0,
    }
    # An older copy of the second file adds nothing under any name.
    stale = shutil.copy(ledger.path, tmp_path / "a stale copy.ledger")
    with sqlite3.connect(stale) as database:
        database.execute("DELETE FROM requests WHERE sequence > 7")
        database.execute("DELETE FROM totals WHERE sequence > 7")
    database.close()
    assert lines_of(capsys, tmp_path) == lines


def test_rows_after_the_last_totals_are_billed_once(tmp_path, capsys):
    """Of the 6 s of two later rows, 3 were open at the last totals and 3 came after them."""
    path = write(tmp_path, totals(0), totals(1, open_ns=3 * SECOND), *rows_of("search", 2))
    lines = lines_of(capsys, path, "--price", "3600")
    assert {name: line["cost"] for name, line in lines.items()} == {"search": 6.0, "_warmup": 2.0}
    report = json.loads(run(capsys, "report", path, "--format", "json"))
    assert report["busy_ns"] == 8 * SECOND


def test_warm_up_is_billed_only_in_the_window_that_contains_it(tmp_path, capsys):
    path = write(tmp_path, totals(0), totals(0, time=1_800_000_100.0, idle_ns=100 * SECOND))
    assert "_warmup" in lines_of(capsys, path)
    assert lines_of(capsys, path, "--since", "2027-01-15T08:01:00") == {}


def enlarge(path, num_rows: int) -> None:
    """Add `num_rows` requests of 50 lines."""
    with sqlite3.connect(path) as database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(requests)")]
        values = dict(zip(columns, columns, strict=True)) | {
            "sequence": "10 + extra",
            "key": "extra",
            "business_line": "'line ' || extra % 50",
            "arrival": "arrival + extra % 3600",
        }
        database.execute(
            f"""INSERT INTO requests SELECT {", ".join(values.values())} FROM requests,
            (WITH RECURSIVE numbers(extra) AS (
                SELECT 0 UNION ALL SELECT extra + 1 FROM numbers LIMIT {num_rows}
            ) SELECT extra FROM numbers) WHERE sequence = 1"""
        )
    database.close()


@pytest.mark.slow
def test_large_ledger_takes_little_memory(tmp_path, capsys, monkeypatch):
    """All rows as dictionaries would take 15 MB."""
    path = write(tmp_path, totals(0), *rows_of("search", 1), totals(1))
    enlarge(path, 10_000)
    monkeypatch.setattr("tritium.client.usage._ROW_GROUP", 1000)
    rows, parquet = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    for command in (
        ["report", path, "--by", "business_line,outcome,day", "--format", "json"],
        ["check", path],
        ["export", path, "--output", rows],
        ["export", path, "--format", "parquet", "--output", parquet],
    ):
        tracemalloc.start()
        main(["usage", *map(str, command)])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 5e6, command
    assert len(rows.read_text().splitlines()) == 10_001
    assert pyarrow.parquet.ParquetFile(parquet).metadata.num_rows == 10_001


def test_check_proves_the_identity(ledger, capsys):
    output = run(capsys, "check", ledger)
    assert ": 0 ns over 3 totals" in output
    assert "the bill adds up" in output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE requests SET decode_ns = decode_ns + 1 WHERE sequence = 4", "system: 1 ns"),
        ("DELETE FROM requests WHERE sequence = 1", "system: 3000000000 ns"),
        ("UPDATE totals SET fault_ns = fault_ns + 7 WHERE sequence = 3", "system: 14 ns"),
        ("UPDATE requests SET kv_block_seconds = 2 WHERE sequence = 4", "off by 8.3e-02"),
    ],
)
def test_check_finds_changed_and_missing_rows(ledger, capsys, change, message):
    with sqlite3.connect(ledger) as database:
        database.execute(change)
    database.close()
    assert main(["usage", "check", str(ledger)]) == 1
    out = capsys.readouterr().out
    assert message in out
    assert "THE BILL DOES NOT ADD UP" in out


def test_open_requests_are_part_of_the_identity(tmp_path, capsys):
    path = write(
        tmp_path,
        totals(0),
        totals(1, open_ns=3 * SECOND, is_quiet=0),
        *rows_of("search", 1),
        totals(1),
    )
    assert "the bill adds up" in run(capsys, "check", path)


def rows_in(path) -> list[dict]:
    return [dict(row) for row in Ledger.read([path]).select("*", "requests")]


def test_export(ledger, tmp_path, capsys):
    exported = [json.loads(line) for line in run(capsys, "export", ledger).splitlines()]
    assert exported == rows_in(ledger)
    assert len(exported) == 6


def test_parquet_has_the_same_rows(ledger, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tritium.client.usage._ROW_GROUP", 4)
    path = tmp_path / "rows.parquet"
    run(capsys, "export", ledger, "--format", "parquet", "--output", path)
    assert pyarrow.parquet.read_table(path).to_pylist() == rows_in(ledger)
    file = pyarrow.parquet.ParquetFile(path)
    assert file.num_row_groups == 2
    types = {field.name: str(field.type) for field in file.schema_arrow}
    assert (types["key"], types["decode_ns"], types["arrival"]) == ("string", "int64", "double")

    nothing = ("--until", "2020-01-01", "--format", "parquet", "--output", path)
    run(capsys, "export", ledger, *nothing)
    assert pyarrow.parquet.ParquetFile(path).schema_arrow == file.schema_arrow


def test_parquet_needs_output_and_pyarrow(ledger, tmp_path, capsys, monkeypatch):
    parquet = ("export", ledger, "--format", "parquet")
    assert "needs --output FILE" in fails(capsys, *parquet)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in fails(capsys, *parquet, "--output", tmp_path / "p")


def test_unwritable_output_is_an_error(ledger, tmp_path, capsys):
    path = tmp_path / "nowhere" / "rows"
    for arguments in (
        ("report", "--format", "html"),
        ("report",),
        ("export",),
        ("export", "--format", "parquet"),
    ):
        error = fails(capsys, arguments[0], ledger, *arguments[1:], "--output", path)
        assert f"--output {path}: can't be written" in error


def test_errors_name_broken_ledgers(tmp_path, ledger, capsys):
    missing, empty, text = (tmp_path / name for name in ("missing", "empty", "text.ledger"))
    empty.mkdir()
    text.write_text("this is no database, and long enough to be looked at by SQLite" * 20)
    assert f"{missing}: there is no such file" in fails(capsys, "report", missing)
    assert f"{empty}: there is no *.ledger" in fails(capsys, "check", empty)
    assert f"{text}: is not a ledger" in fails(capsys, "report", ledger, text)
    nothing = tmp_path / "nothing.ledger"
    nothing.touch()
    assert f"{nothing}: is not a ledger" in fails(capsys, "report", nothing)
    cut = tmp_path / "cut.ledger"
    cut.write_bytes(ledger.read_bytes()[:5000])
    assert f"{cut}: is not a ledger, or is damaged" in fails(capsys, "report", cut)
    with sqlite3.connect(ledger) as database:
        database.execute("UPDATE server SET schema_version = 99")
    database.close()
    assert "version 99 of the schema" in fails(capsys, "report", ledger)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--price", "cheap"], "expected a price such as 2.5/gpu-hour, got 'cheap'"),
        (["--by", "customer"], "'customer' is none of business_line"),
        (["--price=-1"], "expected a price such as 2.5/gpu-hour, got '-1'"),
        (["--price", "nan"], "expected a price such as 2.5/gpu-hour, got 'nan'"),
        (["--by", ""], "'' is none of business_line"),
        (["--by", "server,server"], "'server,server' names a column twice"),
        (["--since", "2026-13-01"], "expected a time such as"),
        (["--until", "0xm"], "expected a time such as"),
    ],
)
def test_errors_name_bad_options(ledger, capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["usage", "report", str(ledger), *arguments])
    assert message in capsys.readouterr().err


def test_window_that_ends_before_it_begins_is_an_error(ledger, capsys):
    error = fails(capsys, "report", ledger, "--since", "2027-01-02", "--until", "2027-01-01")
    assert "--since is later than --until" in error


@pytest.mark.parametrize("form", ["table", "csv", "json", "html"])
def test_empty_window_gives_an_empty_bill(ledger, capsys, form):
    output = run(capsys, "report", ledger, "--until", "2020-01-01", "--format", form)
    assert output
    if form == "json":
        assert json.loads(output)["lines"] == []


def test_names_are_not_interpreted_as_markup(tmp_path, capsys):
    name = "[/red] \x1b[31m"
    path = write(tmp_path, totals(0), *rows_of(name, 1), totals(1))
    table = run(capsys, "report", path)
    assert "[/red] \\x1b[31m" in table
    assert "\x1b" not in table


# -- HTML --


class Cells(html.parser.HTMLParser):
    """The numbers in the body and the foot of the table, by column."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.body: dict[str, list[float]] = {}
        self.foot: dict[str, float] = {}
        self._part = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag in ("tbody", "tfoot"):
            self._part = tag
        cell = dict(attributes)
        if "data-column" in cell:
            value = float(cell["data-value"])
            if self._part == "tbody":
                self.body.setdefault(cell["data-column"], []).append(value)
            else:
                self.foot[cell["data-column"]] = value


@pytest.fixture
def page(tmp_path):
    hostile = rows_of("<script>alert(1)</script>", 1)
    path = write(tmp_path, totals(0), *rows_of("search", 2), *hostile, totals(3, idle=SECOND))
    page = tmp_path / "usage.html"
    arguments = ["--price", "3600", "--format", "html", "--output", str(page)]
    assert main(["usage", "report", str(path), *arguments]) == 0
    return page


def test_page_is_self_contained_and_its_sums_are_right(page):
    text = page.read_text()
    assert not re.search(r'<(script|link|img)[^>]* (src|href)="http', text)
    assert "<script>alert(1)" not in text
    cells = Cells(text)
    assert cells.body["cost"] == [6.0, 3.0, 2.0]
    for column, values in cells.body.items():
        assert cells.foot[column] == pytest.approx(sum(values))


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium on PATH")
def test_browser_draws_all_charts(page, tmp_path):
    browser = subprocess.run(
        [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=10000",
            "--dump-dom",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "CONSOLE" not in browser.stderr
    assert browser.stdout.count('class="main-svg"') >= 5
    for title in ("Cost over time", "Tokens over time", "Busy and idle", "Saved", "preemption"):
        assert re.search(rf'class="gtitle"[^>]*>[^<]*{title}', browser.stdout), title
    assert "alert(1)</script>" not in browser.stdout
