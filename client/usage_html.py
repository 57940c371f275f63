"""A bill as one self-contained HTML page: a table and charts."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import plotly.graph_objects as go
from jinja2 import Environment

from tritium.client.bill import GROUPS, NS_PER_HOUR, Report
from tritium.client.ledger import Ledger

_PAGE = Path(__file__).with_name("usage.html.jinja")
_NUM_BUCKETS = 60
_CONFIG = {"displayModeBar": False, "responsive": True}
_ENDED = "(arrival + total_ms / 1e3)"
_TOKENS = "prompt_tokens + output_tokens"
_NUM_LINES = 20  # shown in a chart
_STEPS = (1, 10, 60, 600, 3600, 6 * 3600, 86400)  # seconds per bucket

_TITLES = {
    "requests": ("requests", "%d"),
    "prompt_tokens": ("prompt tokens", "%d"),
    "cached_tokens": ("cached", "%d"),
    "output_tokens": ("output tokens", "%d"),
    "busy_ns": ("busy s", "%.3f"),
    "saved_ns": ("saved s", "%.3f"),
    "kv_block_seconds": ("KV block s", "%.1f"),
    "cost": ("cost", "%.6f"),
}


def to_html(report: Report, ledger: Ledger, price_per_hour: float) -> str:
    buckets = _Buckets(ledger)
    figures = [
        _stacked("Cost over time", buckets, _over_time(ledger, buckets, _cost(price_per_hour))),
        _stacked("Tokens over time", buckets, _over_time(ledger, buckets, _TOKENS)),
        _stacked("Busy and idle, seconds", buckets, _busy_and_idle(ledger, buckets)),
        _bars("Saved by reuse, seconds", report, "saved_ns"),
        _bars("Recomputed after preemption, seconds", report, "recompute_ns"),
    ]
    charts = [
        figure.to_html(full_html=False, include_plotlyjs=i == 0, config=_CONFIG)
        for i, figure in enumerate(figures)
    ]
    page = Environment(autoescape=True).from_string(_PAGE.read_text(encoding="utf-8"))
    return page.render(
        report=report,
        span=buckets.span,
        titles=[title for title, _ in _TITLES.values()],
        columns=[(column, form) for column, (_, form) in _TITLES.items()],
        charts=charts,
    )


class _Buckets:
    """Divides the ledger's time into about 60 buckets of a round length."""

    def __init__(self, ledger: Ledger) -> None:
        ends = [
            moment
            for what, table in ((_ENDED, "requests"), ("time", "totals"))
            for row in ledger.select(f"min({what}), max({what})", table)
            for moment in row
            if moment is not None
        ]
        first, last = min(ends, default=0.0), max(ends, default=0.0)
        self.seconds = next((s for s in _STEPS if last - first <= s * _NUM_BUCKETS), _STEPS[-1])
        self.first = int(first // self.seconds)
        self.count = int(last // self.seconds) - self.first + 1
        self.span = f"{_time(first):%Y-%m-%d %H:%M:%S} to {_time(last):%Y-%m-%d %H:%M:%S} UTC"
        self.times = [_time((self.first + i) * self.seconds) for i in range(self.count)]

    def sums(self, values: Iterable[tuple[str, float, float]]) -> dict[str, list[float]]:
        """Sums of (name, seconds since 1970, value) by name and bucket."""
        found: dict[str, list[float]] = defaultdict(lambda: [0.0] * self.count)
        for name, moment, value in values:
            found[name][int(moment // self.seconds) - self.first] += value
        return dict(sorted(found.items()))


def _time(moment: float) -> datetime:
    return datetime.fromtimestamp(moment, UTC)


def _cost(price_per_hour: float) -> str:
    return f"(prefill_ns + decode_ns) * {price_per_hour / NS_PER_HOUR!r}"


def _over_time(ledger: Ledger, buckets: _Buckets, value: str) -> dict[str, list[float]]:
    """Sums of an SQL expression by business line; small lines are shown together."""
    line = GROUPS["business_line"]
    bucket = f"CAST({_ENDED} / {buckets.seconds} AS INTEGER)"
    rows = ledger.select(
        f"{line}, {bucket} * {buckets.seconds}, sum({value})",
        "requests",
        f"GROUP BY {line}, {bucket}",
    )
    sums = buckets.sums(map(tuple, rows))
    small = sorted(sums, key=lambda name: -sum(sums[name]))[_NUM_LINES:]
    if small:
        parts = [sums.pop(name) for name in small]
        sums["(others)"] = [sum(values) for values in zip(*parts, strict=True)]
    return sums


def _busy_and_idle(ledger: Ledger, buckets: _Buckets) -> dict[str, list[float]]:
    def values() -> Iterator[tuple[str, float, float]]:
        for _, of_server in ledger.by_server():
            for before, after in pairwise(of_server.select("*", "totals", "ORDER BY sequence")):
                for name in ("busy", "idle"):
                    seconds = (after[f"{name}_ns"] - before[f"{name}_ns"]) / 1e9
                    yield name, after["time"], seconds

    return buckets.sums(values())


def _stacked(title: str, buckets: _Buckets, sums: dict[str, list[float]]) -> go.Figure:
    bars = [go.Bar(name=name, x=buckets.times, y=values) for name, values in sums.items()]
    return _layout(go.Figure(bars), title).update_layout(barmode="stack")


def _bars(title: str, report: Report, column: str) -> go.Figure:
    lines = [line for line in report.lines if line.requests][:_NUM_LINES]
    names = [" / ".join(line.name) for line in lines]
    return _layout(go.Figure(go.Bar(x=names, y=[getattr(x, column) / 1e9 for x in lines])), title)


def _layout(figure: go.Figure, title: str) -> go.Figure:
    return figure.update_layout(
        title=title, height=340, margin=dict(l=50, r=20, t=50, b=40), template="plotly_white"
    )
