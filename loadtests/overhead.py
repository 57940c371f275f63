"""The cost of billing: one server with and without it, in turns of 4 steps.

Both turns run in the same process, since two processes are never equally fast: in every other turn
the model's ledger and metrics receive nothing. The speed of a turn is its work, by the weights of
the bill, divided by its time. The machine's speed drifts, so only neighbouring turns are compared,
and the median of many pairs is given with its confidence interval.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tritium.backend.engine.usage import BusyTime, StepShares
from tritium.backend.host.serve import TritonServer
from tritium.loadtests.model_folder import serve_with
from tritium.loadtests.statistics import median_interval

WANTED = 0.99
_STEPS = 4  # steps per turn

# Replaces a model folder's model.py.
_MODEL_PY = """
from tritium.backend.accounts import ledger, metrics
from tritium.backend.engine import usage
from tritium.loadtests.overhead import turning

turning({path!r}, usage, ledger, metrics)

from tritium.backend.triton_model import TritonPythonModel
"""


class Turn(NamedTuple):
    is_billed: bool
    num_sequences: int  # summed over the turn's steps
    work: int
    ns: int


def turning(path: str, usage: Any, ledger: Any, metrics: Any) -> None:
    """In the server: replace classes of these modules, so that they take turns and record them."""
    is_billed = True

    class Turning(BusyTime):
        steps: list[tuple[int, int, int]] = []  # noqa: RUF012 -- the class has one instance
        count = 0

        def end_step(self, shares: StepShares) -> int:
            nonlocal is_billed
            duration = super().end_step(shares)
            self.steps.append((len(shares.payers), sum(shares.weights), duration))
            if len(self.steps) == _STEPS:
                turn = Turn(is_billed, *map(sum, zip(*self.steps, strict=True)))
                with Path(path).open("a") as file:
                    file.write(json.dumps(turn) + "\n")
                self.steps.clear()
                self.count += 1
                is_billed = self.count % 4 in (0, 3)  # with, without, without, with
            return duration

    def only_in_turn(cls: type, *names: str) -> type:
        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *arguments: method(*arguments) if is_billed else None

        return type(cls.__name__, (cls,), {name: wrap(getattr(cls, name)) for name in names})

    usage.BusyTime = Turning
    ledger.Ledger = only_in_turn(ledger.Ledger, "add")
    metrics.Metrics = only_in_turn(metrics.Metrics, "request_finished", "count_totals", "update")


@contextmanager
def serve_in_turns(directory: Path, log: Any) -> Iterator[tuple[TritonServer, Path]]:
    """A server that takes turns, and the file with the recorded turns."""
    path = directory / "turns"
    parameters = {
        "ledger_path": directory / "ledger",
        "REPORT_CUSTOM_METRICS": "true",
        "prefix_cache": "off",  # prompts are repeated and must be computed again
    }
    with serve_with(parameters, log, _MODEL_PY.format(path=str(path))) as server:
        yield server, path


def read_turns(path: Path) -> list[Turn]:
    return [Turn(*json.loads(line)) for line in path.read_text().splitlines()]


def verdict(turns: Sequence[Turn]) -> str:
    """The ratio of speeds with and without billing, as one line of text."""
    pairs = list(zip(turns[::2], turns[1::2], strict=False))
    ratios = []
    for pair in pairs:
        without, billed = sorted(pair, key=lambda turn: turn.is_billed)
        ratios.append(billed.work / billed.ns / (without.work / without.ns))
    median, low, high = median_interval(ratios)
    met = "" if median >= WANTED else "  MISSED"
    return (
        f"speed with ledger and metrics / without, {len(ratios)} pairs of turns: {median:.3f} "
        f"(95 % interval: {low:.3f} to {high:.3f}; wanted >= {WANTED}){met}"
    )
