"""What each of the engine's ideas gained on a trace, as `make gains` measured it: a table."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from tritium.loadtests.results import Ratio

COLUMNS = (
    *("way", "running at once", "tokens of KV cache held", "output tokens/s"),
    *("times the way above", "times the first way"),
)


class WayGain(msgspec.Struct, frozen=True):
    """One way to run the requests."""

    name: str
    running: int  # at once, at most
    kv_tokens: int  # for which KV cache was held at the peak, used or not
    tokens_per_second: float  # median of the rounds
    over_before: Ratio  # in tokens/s, within each round
    over_first: Ratio

    @property
    def cells(self) -> list[str]:
        """By COLUMNS."""
        return [
            self.name,
            f"{self.running}",
            f"{self.kv_tokens:,}",
            f"{self.tokens_per_second:.1f}",
            *(
                f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
                for ratio in (self.over_before, self.over_first)
            ),
        ]


class Gains(msgspec.Struct, frozen=True):
    """Of some requests of a trace."""

    title: str
    ways: Sequence[WayGain]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)))


def load_gains(path: Path) -> Gains:
    """Read gains that were saved.

    Raises:
        OSError, msgspec.DecodeError: they are not there.
    """
    return msgspec.json.decode(path.read_bytes(), type=Gains)


def gains_table(gains: Gains) -> Table:
    table = Table(title=gains.title)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for way in gains.ways:
        table.add_row(*way.cells)
    return table
