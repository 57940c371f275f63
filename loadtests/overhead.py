"""What the bill costs: one server with and without it, in turns of a few seconds.

It is the same process for both, since two are never equally fast: ledger and metrics of its model
are told nothing while a file says so. A machine's speed drifts, so only the two turns of a pair are
compared, and the median of many pairs is given with what it is known by.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from backend.serve import TritonServer
from loadtests.model_folder import serve_with
from loadtests.results import Result
from loadtests.statistics import median_interval

WANTED = 0.99

# In place of a model folder's model.py.
_MODEL_PY = """
import backend.ledger
import backend.metrics
from loadtests.overhead import switched

OFF = {off!r}
backend.ledger.Ledger = switched(backend.ledger.Ledger, OFF, "add")
backend.metrics.Metrics = switched(
    backend.metrics.Metrics, OFF, "request_finished", "count_totals", "update"
)

from backend.triton_model import TritonPythonModel
"""


def switched(cls: type, off: str, *methods: str) -> type:
    """In the server: a class whose methods do nothing while the file `off` is there."""

    def wrap(method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if not Path(off).exists():
                method(*arguments)

        return call

    return type(cls.__name__, (cls,), {name: wrap(getattr(cls, name)) for name in methods})


class Billed(NamedTuple):
    """A server of the project's model that has all that a bill can have."""

    server: TritonServer
    ledger: Path  # its directory
    off: Path  # while this file is there, nothing is billed


@contextmanager
def serve_billed(directory: Path, log: Any) -> Iterator[Billed]:
    ledger, off = directory / "ledger", directory / "off"
    parameters = {
        "ledger_path": ledger,
        "REPORT_CUSTOM_METRICS": "true",
        "prefix_cache": "off",  # the same prompts come again, and are to be computed again
    }
    with serve_with(parameters, log, _MODEL_PY.format(off=str(off))) as server:
        yield Billed(server, ledger, off)


def pairs(billed: Billed, run: Callable[[], Result], count: int) -> Iterator[Result]:
    """Turns with and without the bill, in the order ABBA, so that drift favours neither."""
    for i in range(count):
        for way in ("bill", "no bill") if i % 2 else ("no bill", "bill"):
            billed.off.touch() if way == "no bill" else billed.off.unlink(missing_ok=True)
            yield replace(run(), way=way, workload="bill", round=i)
    billed.off.unlink(missing_ok=True)


def verdict(results: Sequence[Result]) -> str:
    """Tokens/s with the bill over those without it, in one line."""
    speeds = {
        way: [r.tokens_per_second for r in results if (r.workload, r.way) == ("bill", way)]
        for way in ("bill", "no bill")
    }
    ratios = [a / b for a, b in zip(speeds["bill"], speeds["no bill"], strict=True)]
    median, low, high = median_interval(ratios)
    met = "" if median >= WANTED else "  MISSED"
    return (
        f"with ledger and metrics / without, {len(ratios)} pairs: {median:.3f} "
        f"(95 % sure: {low:.3f} to {high:.3f}; wanted >= {WANTED}){met}"
    )
