"""The `usage` command: bills in all forms, the check, what a broken ledger says."""

import csv
import html.parser
import io
import json
import re
import shutil
import sqlite3
import subprocess
from dataclasses import replace

import pytest

from backend.ledger import RequestRow, TotalsRow
from client.__main__ import main
from client.ledger import Ledger
from tests.test_ledger import ROW, make_ledger

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
    """After so many requests of 3 s each, and 2 s of warm-up."""
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
    """6 requests of two lines, 20 s busy and 10 s idle."""
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


def test_by_usage_the_system_has_lines_of_its_own(ledger, capsys):
    lines = lines_of(capsys, ledger, "--price", "3600/gpu-hour")
    assert {name: line["cost"] for name, line in lines.items()} == {
        "ads": 12.0,
        "search": 6.0,
        "_warmup": 2.0,
    }
    assert lines["ads"]["requests"] == 4
    assert lines["ads"]["output_tokens"] == 12
    assert lines["search"]["kv_block_seconds"] == 3.0


def test_by_allocation_all_of_the_time_is_paid(ledger, capsys):
    lines = lines_of(capsys, ledger, "--price", "3600", "--basis", "allocation")
    costs = {name: line["cost"] for name, line in lines.items()}
    assert costs == pytest.approx({"ads": 20.0, "search": 10.0})


def test_grouped_by_two_columns(ledger, capsys):
    text = run(capsys, "report", ledger, "--by", "business_line,request_class", "--format", "csv")
    first, second, warmup = csv.DictReader(io.StringIO(text))
    assert (first["business_line"], first["request_class"]) == ("ads", "offline")
    assert (second["business_line"], second["request_class"]) == ("search", "interactive")
    assert warmup["busy_ns"] == str(2 * SECOND)


def test_the_table_has_the_sums(ledger, capsys):
    table = run(capsys, "report", ledger, "--price", "3600")
    assert re.search(r"search\W+2\W+14\W+0\W+6\W+6.000", table)
    assert re.search(r"sum\W+6\W+42\W+0\W+18\W+20.000", table)
    assert "busy 20.000 s, idle 10.000 s" in table


def test_a_window_has_what_lies_between_totals(ledger, capsys):
    lines = lines_of(capsys, ledger, "--since", "2027-01-15T08:00:03")
    assert set(lines) == {"ads"}
    lines = lines_of(capsys, ledger, "--until", "2027-01-15T08:00:03")
    assert set(lines) == {"search", "_warmup"}


def test_several_ledgers_are_one_and_a_copy_adds_nothing(ledger, tmp_path, capsys):
    alone = lines_of(capsys, ledger)
    copy = shutil.copy(ledger, tmp_path / "copy.ledger")
    assert lines_of(capsys, ledger, copy) == alone
    more = [replace(row, key=f"other/{row.key}") for row in rows_of("ads", 1)]
    write(tmp_path / "other", totals(0), *more, totals(1))
    both = lines_of(capsys, ledger.parent, tmp_path / "other")
    assert both["ads"]["requests"] == 5
    assert both["_warmup"]["busy_ns"] == 4 * SECOND


def test_the_check_proves_the_identity(ledger, capsys):
    told = run(capsys, "check", ledger)
    assert ": 0 ns over 3 totals" in told
    assert "the bill adds up" in told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("UPDATE requests SET decode_ns = decode_ns + 1 WHERE sequence = 4", "system: 1 ns"),
        ("DELETE FROM requests WHERE sequence = 1", "system: 3000000000 ns"),
        ("UPDATE totals SET fault_ns = fault_ns + 7 WHERE sequence = 3", "system: 14 ns"),
        ("UPDATE requests SET kv_block_seconds = 2 WHERE sequence = 4", "off by 8.3e-02"),
    ],
)
def test_the_check_finds_what_is_missing(ledger, capsys, change, told):
    with sqlite3.connect(ledger) as database:
        database.execute(change)
    database.close()
    assert main(["usage", "check", str(ledger)]) == 1
    out = capsys.readouterr().out
    assert told in out
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


def test_export(ledger, tmp_path, capsys):
    exported = [json.loads(line) for line in run(capsys, "export", ledger).splitlines()]
    assert exported == Ledger.read([ledger]).requests
    try:
        import pyarrow.parquet
    except ImportError:
        error = fails(capsys, "export", ledger, "--format", "parquet", "--output", tmp_path / "p")
        assert "pip install pyarrow" in error
    else:
        run(capsys, "export", ledger, "--format", "parquet", "--output", tmp_path / "p")
        assert pyarrow.parquet.read_table(tmp_path / "p").to_pylist() == exported


def test_broken_ledgers_are_named(tmp_path, ledger, capsys):
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
    ("arguments", "told"),
    [
        (["--price", "cheap"], "expected a price such as 2.5/gpu-hour, got 'cheap'"),
        (["--by", "customer"], "'customer' is none of business_line"),
        (["--since", "yesterday"], "expected a time such as"),
    ],
)
def test_bad_options_are_named(ledger, capsys, arguments, told):
    with pytest.raises(SystemExit):
        main(["usage", "report", str(ledger), *arguments])
    assert told in capsys.readouterr().err


# -- HTML --


class Cells(html.parser.HTMLParser):
    """The numbers of the table's body and foot, by column."""

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


def test_the_page_stands_alone_and_its_sums_are_right(page):
    text = page.read_text()
    assert not re.search(r'<(script|link|img)[^>]* (src|href)="http', text)
    assert "<script>alert(1)" not in text
    cells = Cells(text)
    assert cells.body["cost"] == [6.0, 3.0, 2.0]
    for column, values in cells.body.items():
        assert cells.foot[column] == pytest.approx(sum(values))


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium on PATH")
def test_a_browser_draws_all_charts(page, tmp_path):
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
