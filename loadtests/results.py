"""Results of a benchmark: cells, their table, and ratios between them. Knows nothing of engines.

A cell is one variant (an engine, a server, a peer) with one workload at one concurrency. Each cell
is measured once per round, the variants in turns, because the speed of a shared machine drifts.
Ratios are taken within a round.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tritium.loadtests.statistics import percentile


@dataclass(slots=True)
class Result:
    """One round of a cell. Times in seconds."""

    variant: str
    concurrency: int
    workload: str = "uniform"
    round: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)  # (e2e - ttft) / (tokens - 1)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def cell(self) -> tuple[str, str, int]:
        return self.workload, self.variant, self.concurrency

    def add(self, start: float, first: float, end: float, num_tokens: int) -> None:
        """Count one request by the times of its start, first and last token."""
        self.num_tokens += num_tokens
        self.ttft.append(first - start)
        if num_tokens > 1:
            self.tpot.append((end - first) / (num_tokens - 1))


class Goal(NamedTuple):
    """A ratio between two cells, and its target.

    A ratio of tokens/s should be at least `wanted`, a ratio of times at most.
    """

    name: str
    cell: tuple[str, str, int]  # workload, variant, concurrency
    other: tuple[str, str, int]
    wanted: float
    measure: str = "tokens/s"  # or the median of TTFT or TPOT


class Ratio(NamedTuple):
    """The median of the rounds, with minimum and maximum."""

    median: float
    low: float
    high: float


def save(path: Path, results: Iterable[Result]) -> None:
    path.write_text(json.dumps([asdict(result) for result in results]))


def load(path: Path) -> list[Result]:
    return [Result(**fields) for fields in json.loads(path.read_text())]


def rounds(results: Sequence[Result], cell: tuple[str, str, int]) -> dict[int, Result]:
    """The rounds of a cell by number."""
    return {result.round: result for result in results if result.cell == cell}


def ratio(results: Sequence[Result], goal: Goal) -> Ratio | None:
    """Compare two cells in each round that has both; None if there is no such round."""
    ours, others = rounds(results, goal.cell), rounds(results, goal.other)
    values = [
        _value(result, goal.measure) / _value(others[number], goal.measure)
        for number, result in ours.items()
        if number in others
    ]
    return Ratio(statistics.median(values), min(values), max(values)) if values else None


def goal_line(goal: Goal, reached: Ratio) -> str:
    bound, met = (
        (">=", reached.median >= goal.wanted)
        if goal.measure == "tokens/s"
        else ("<=", reached.median <= goal.wanted)
    )
    spread = f"{reached.low:.2f} to {reached.high:.2f}"
    verdict = "" if met else "  MISSED"
    return f"{goal.name}: {reached.median:.2f} ({spread}; wanted {bound} {goal.wanted}){verdict}"


def table(results: Sequence[Result]) -> Table:
    """A row per cell: tokens/s as median and extremes of the rounds, times pooled."""
    table = Table(title="Output tokens/s; TTFT and TPOT in ms")
    for name in ("workload", "variant", "concurrency", "tokens/s", "spread"):
        table.add_column(name, justify="right")
    for name in ("TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95"):
        table.add_column(name, justify="right")
    for cell in dict.fromkeys(result.cell for result in results):
        measured = list(rounds(results, cell).values())
        speeds = [result.tokens_per_second for result in measured]
        pooled = (
            [time for result in measured for time in result.ttft],
            [time for result in measured for time in result.tpot],
        )
        table.add_row(
            *(str(part) for part in cell),
            f"{statistics.median(speeds):.1f}",
            f"{min(speeds):.0f} to {max(speeds):.0f}",
            *(f"{percentile(times, share) * 1000:.1f}" for times in pooled for share in (50, 95)),
        )
    return table


def report(console: Console, results: Sequence[Result], goals: Iterable[Goal]) -> None:
    """Print the table and the goals whose cells were measured."""
    console.print(table(results))
    for goal in goals:
        if reached := ratio(results, goal):
            console.print(goal_line(goal, reached), highlight=False)


def _value(result: Result, measure: str) -> float:
    if measure == "tokens/s":
        return result.tokens_per_second
    return statistics.median(result.ttft if measure == "TTFT" else result.tpot)
