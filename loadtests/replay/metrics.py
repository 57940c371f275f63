"""Reads the server's /metrics while a replay runs, and its ledger before and after."""

import re
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from tritium.client.ledger import Ledger
from tritium.loadtests.replay.run import TOKENS, Sample

_INTERVAL = 0.5  # seconds


def read_metrics(url: str, model: str) -> dict[str, float]:
    """Values of Tritium's metrics of a model, by name without prefix, summed over labels.

    Raises:
        OSError: the server does not answer.
    """
    values: dict[str, float] = {}
    with urllib.request.urlopen(url, timeout=5) as response:
        for line in response.read().decode().splitlines():
            match = re.fullmatch(r"tritium:(\w+)\{(.*)\} (\S+)", line)
            if match and f'model="{model}"' in match[2]:
                values[match[1]] = values.get(match[1], 0.0) + float(match[3])
    return values


def read_ledger(path: Path) -> dict[str, float]:
    """Token sums of a ledger, under the counters' names with the prefix `ledger_`.

    Like the counters, they exclude requests that were refused or ended before their first token.

    Raises:
        LedgerError: the ledger can't be read.
    """
    rows = list(Ledger.read([path]).select(", ".join(TOKENS), "requests", "AND output_tokens > 0"))
    return {f"ledger_{kind}": sum(row[kind] for row in rows) for kind in TOKENS}


class Scraper:
    """Takes samples on its own thread between `start` and `stop`.

    Args:
        url: The server's /metrics.
        model: Name of the model in the metrics.
        ledger: Directory of the server's ledger, read for the first and the last sample, or None.
    """

    def __init__(self, url: str, model: str, ledger: Path | None) -> None:
        self._url = url
        self._model = model
        self._ledger = ledger
        self._stopping = threading.Event()
        self._taken: list[tuple[float, dict[str, float]]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Take the first sample and continue; raises the errors of `read_ledger`."""
        self._take(with_ledger=True)
        self._thread.start()

    def stop(self, start: float) -> list[Sample]:
        """Take a last sample, after everything has been counted.

        Args:
            start: time.perf_counter() from which the samples' times count.
        """
        self._stopping.set()
        self._thread.join()
        time.sleep(1)  # the server publishes its counters a few times per second
        self._take(with_ledger=True)
        return [Sample(round(moment - start, 3), values) for moment, values in self._taken]

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL):
            self._take()

    def _take(self, with_ledger: bool = False) -> None:
        values: dict[str, float] = {}
        with suppress(OSError):  # no metrics, or a busy server: a gap in the plot
            values |= read_metrics(self._url, self._model)
        if with_ledger and self._ledger:
            values |= read_ledger(self._ledger)
        if values:
            self._taken.append((time.perf_counter(), values))
