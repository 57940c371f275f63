"""The table of `make gains`: what each idea of the engine gains on a trace."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from tritium.loadtests.results import Ratio

COLUMNS = (
    *("variant", "running sequences", "tokens held in the KV cache", "output tokens/s"),
    *("ratio to the previous row", "ratio to the first row"),
)


class VariantGain(msgspec.Struct, frozen=True):
    """The result of one variant."""

    name: str
    running: int  # most sequences at once
    kv_tokens: int  # tokens of KV reserved at the peak, used or not
    tokens_per_second: float  # median of the rounds
    over_before: Ratio  # ratio of tokens/s within each round
    over_first: Ratio

    @property
    def cells(self) -> list[str]:
        """The cells of a row, in the order of COLUMNS."""
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
    """The gains on some requests of a trace."""

    title: str
    variants: Sequence[VariantGain]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)))


def load_gains(path: Path) -> Gains:
    """Read saved gains.

    Raises:
        OSError, msgspec.DecodeError: the file is missing or damaged.
    """
    return msgspec.json.decode(path.read_bytes(), type=Gains)


def gains_table(gains: Gains) -> Table:
    table = Table(title=gains.title)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for variant in gains.variants:
        table.add_row(*variant.cells)
    return table
