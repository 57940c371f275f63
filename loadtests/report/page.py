"""The files of a report: a self-contained HTML page, JSON, and CSV with a row per request."""

import csv
from collections.abc import Sequence
from pathlib import Path

import jinja2
import msgspec
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from rich.console import Console
from rich.table import Table

from tritium.loadtests.replay.run import Run
from tritium.loadtests.report import plots
from tritium.loadtests.report.gains import COLUMNS, Gains
from tritium.loadtests.report.summary import Check, Summary, summarize

_REQUEST_COLUMNS = (
    *("index", "outcome", "due", "sent", "lag", "ttft", "tpot", "e2e"),
    *("input_length", "num_input_tokens", "output_length", "num_output_tokens"),
    *("num_cached_tokens", "business_line", "request_class", "finish_reason", "error"),
)


def write_report(run: Run, folder: Path, gains: Gains | None = None) -> Summary:
    """Write `run.json`, `summary.json`, `requests.csv` and `report.html`."""
    run.save(folder)
    summary = summarize(run)
    (folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)))
    with (folder / "requests.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_REQUEST_COLUMNS)
        writer.writerows(
            [getattr(record, name) for name in _REQUEST_COLUMNS] for record in run.records
        )
    write_page([run], folder / "report.html", run.name, gains)
    return summary


def write_page(runs: Sequence[Run], path: Path, title: str, gains: Gains | None = None) -> None:
    """Write a page of one run or of several side by side, with the table of gains if given."""
    pairs = [(summarize(run), run) for run in runs]
    summaries = [summary for summary, _ in pairs]
    template = jinja2.Environment(autoescape=True).from_string(
        Path(__file__).with_name("page.html").read_text()
    )
    drawn = [
        draw(runs)
        for draw in (plots.timeline, plots.latencies, plots.goodput, plots.lengths)
        if runs
    ]
    if gains:
        drawn.append(plots.gains(gains))
    page = template.render(
        title=title,
        plotly=_safe(get_plotlyjs()),
        runs=pairs,
        figures=figures(summaries),
        latencies=[
            (label, summary.name, getattr(summary, name))
            for name, label in LATENCIES.items()
            for summary in summaries
        ],
        counted=any(summary.counts for summary in summaries),
        gains=gains,
        gain_columns=COLUMNS,
        plots=[_safe(plot.to_html(full_html=False, include_plotlyjs=False)) for plot in drawn],
    )
    path.write_text(page, encoding="utf-8")


LATENCIES = {
    "ttft": "TTFT",
    "tpot": "TPOT per request",
    "gaps": "time between responses",
    "e2e": "end to end",
    "lag": "schedule lag",
}


def figures(summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """The rows of a report's first table."""
    return [
        ("requests sent", [f"{s.sent}" for s in summaries]),
        (
            "completed, rejected, failed",
            [f"{s.completed}, {s.rejected}, {s.failed}" for s in summaries],
        ),
        ("with exact lengths", [f"{s.exact_lengths}" for s in summaries]),
        ("duration, s", [f"{s.duration:.1f}" for s in summaries]),
        ("requests/s sent", [f"{s.offered:.3f}" for s in summaries]),
        ("requests/s completed", [f"{s.throughput:.3f}" for s in summaries]),
        ("input tokens/s", [f"{s.input_tokens_per_second:.1f}" for s in summaries]),
        ("output tokens/s", [f"{s.output_tokens_per_second:.1f}" for s in summaries]),
        ("goodput, requests/s", [f"{s.goodput:.3f}" for s in summaries]),
        ("attainment of requests sent", [f"{s.attainment:.1%}" for s in summaries]),
        ("prompt tokens from the cache", [f"{s.cached_ratio:.1%}" for s in summaries]),
    ]


def print_summaries(console: Console, summaries: Sequence[Summary]) -> None:
    """Print the first table on a terminal."""
    table = Table()
    table.add_column("")
    for summary in summaries:
        table.add_column(summary.name, justify="right")
    for name, values in figures(summaries):
        table.add_row(name, *values)
    for name, label in LATENCIES.items():
        found = [getattr(summary, name) for summary in summaries]
        table.add_row(
            f"{label}: p50, p95, p99 ms (samples)",
            *(
                f"{d.p50:.1f}, {d.p95:.1f}, {d.p99:.1f} ({d.num})" if d.num else "none"
                for d in found
            ),
        )
    console.print(table)
    for summary in summaries:
        for reason in summary.invalid:
            console.print(f"{summary.name} is INVALID: {reason}", style="bold red")
        print_checks(console, summary.checks)
        for count in summary.counts:
            others = (("the server", count.server), ("its ledger", count.ledger))
            console.print(
                f"{count.name}: {count.here} by the client"
                + "".join(f", {value} by {name}" for name, value in others if value is not None),
                style="" if count.agrees else "bold red",
                highlight=False,
            )


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    for check in checks:
        console.print(
            f"{check.name}: {check.difference:.4f} (at most {check.bound}), "
            f"{check.planned} planned, {check.replayed} replayed",
            style="" if check.holds else "bold red",
            highlight=False,
        )


def _safe(text: str) -> Markup:
    return Markup(text)
