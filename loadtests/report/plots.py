"""The plots of a report, each for one run or several."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.subplots import make_subplots

from tritium.loadtests.replay.run import Run
from tritium.loadtests.report.gains import Gains

_COLORS = qualitative.Plotly
_WINDOW = 10  # seconds


def timeline(runs: Sequence[Run]) -> go.Figure:
    """Arrivals and the server's gauges over time."""
    titles = ("requests sent per second", "running", "waiting", "KV blocks in use")
    figure = make_subplots(rows=4, cols=1, shared_xaxes=True, subplot_titles=titles)
    for run, color in zip(runs, _cycle(len(runs)), strict=True):
        seconds = Counter(int(record.sent) for record in run.records)
        times = range(max(seconds, default=0) + 1)
        arrivals = [seconds[time] for time in times]
        _line(figure, 1, run.name, times, arrivals, color, legend=True)
        at = [sample.time for sample in run.samples]
        for row, gauge in ((2, "requests_running"), (3, "requests_waiting")):
            values = [sample.values.get(gauge) for sample in run.samples]
            _line(figure, row, run.name, at, values, color)
        shares = [
            sample.values.get("kv_blocks_used", 0) / (sample.values.get("kv_blocks") or 1)
            for sample in run.samples
        ]
        _line(figure, 4, run.name, at, shares, color)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(tickformat=".0%", row=4, col=1)
    figure.update_xaxes(title="s", row=4, col=1)
    return figure.update_layout(title="Over time", height=800)


def latencies(runs: Sequence[Run]) -> go.Figure:
    """Cumulative distributions of TTFT and TPOT."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=("TTFT, ms", "TPOT, ms"))
    for run, color in zip(runs, _cycle(len(runs)), strict=True):
        answered = [r for r in run.records if r.outcome == "completed" and r.first]
        ttft = [record.ttft * 1000 for record in answered]
        tpot = [record.tpot * 1000 for record in answered if record.tpot is not None]
        for column, values, bound in ((1, ttft, run.slo.ttft), (2, tpot, run.slo.tpot)):
            _steps(figure, column, run.name, values, color, legend=column == 1)
            if bound:
                figure.add_vline(bound * 1000, line_dash="dash", col=column, row=1)
    figure.update_xaxes(type="log")
    return figure.update_layout(title="Distributions", height=400)


def goodput(runs: Sequence[Run]) -> go.Figure:
    """Requests within the SLO against requests sent, per run and per 10 s."""
    figure = go.Figure()
    for run, color in zip(runs, _cycle(len(runs)), strict=True):
        sent = Counter(int(record.sent // _WINDOW) for record in run.records)
        good = Counter(int(r.sent // _WINDOW) for r in run.records if run.slo.is_met(r))
        figure.add_scatter(
            x=[sent[window] / _WINDOW for window in sent],
            y=[good[window] / _WINDOW for window in sent],
            mode="markers",
            marker_color=color,
            opacity=0.5,
            name=f"{run.name}, each {_WINDOW} s",
        )
    means = []
    for run in runs:
        last = max((record.sent for record in run.records), default=0) or 1
        good_ones = sum(run.slo.is_met(record) for record in run.records)
        means.append((len(run.records) / last, good_ones / last))
    means.sort()
    figure.add_scatter(
        x=[x for x, _ in means], y=[y for _, y in means], mode="lines+markers", name="whole runs"
    )
    return figure.update_layout(
        title="Goodput against rate",
        xaxis_title="requests/s sent",
        yaxis_title="requests/s within the SLO",
        height=400,
    )


def lengths(runs: Sequence[Run]) -> go.Figure:
    """Planned lengths against counted lengths."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=("prompts, tokens", "answers, tokens"))
    for run, color in zip(runs, _cycle(len(runs)), strict=True):
        completed = [record for record in run.records if record.outcome == "completed"]
        for column, planned, counted in (
            (1, [r.input_length for r in run.records], [r.num_input_tokens for r in completed]),
            (2, [r.output_length for r in run.records], [r.num_output_tokens for r in completed]),
        ):
            _steps(figure, column, f"{run.name}, source", planned, "#999", legend=column == 1)
            _steps(figure, column, run.name, counted, color, legend=column == 1)
    figure.update_xaxes(type="log")
    return figure.update_layout(title="Lengths", height=400)


def gains(found: Gains) -> go.Figure:
    """Speed, running sequences and held KV tokens of each variant."""
    titles = ("output tokens/s", "running sequences", "tokens held in the KV cache")
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles)
    names = [variant.name for variant in found.variants]
    for column, values in (
        (1, [variant.tokens_per_second for variant in found.variants]),
        (2, [variant.running for variant in found.variants]),
        (3, [variant.kv_tokens for variant in found.variants]),
    ):
        figure.add_bar(x=names, y=values, marker_color=_COLORS[0], row=1, col=column)
    return figure.update_layout(title=found.title, showlegend=False, height=400)


def _cycle(number: int) -> list[str]:
    return [_COLORS[i % len(_COLORS)] for i in range(number)]


def _line(
    figure: go.Figure,
    row: int,
    name: str,
    x: Iterable[float],
    y: Sequence[float | None],
    color: str,
    legend: bool = False,
) -> None:
    figure.add_scatter(
        x=list(x),
        y=y,
        name=name,
        line={"color": color, "shape": "hv"},
        legendgroup=name,
        showlegend=legend,
        row=row,
        col=1,
    )


def _steps(
    figure: go.Figure, column: int, name: str, values: Sequence[float], color: str, legend: bool
) -> None:
    """The cumulative distribution of values."""
    figure.add_scatter(
        x=np.sort(values).tolist(),
        y=(np.arange(1, len(values) + 1) / max(len(values), 1)).tolist(),
        name=name,
        line={"color": color, "shape": "hv"},
        legendgroup=name,
        showlegend=legend,
        row=1,
        col=column,
    )
