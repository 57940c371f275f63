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
    """Values of Tritium's metrics of a model, by name without its prefix; labels summed up.

    Raises:
        OSError: nobody answers.
    """
    values: dict[str, float] = {}
    with urllib.request.urlopen(url, timeout=5) as response:
        for line in response.read().decode().splitlines():
            match = re.fullmatch(r"tritium:(\w+)\{(.*)\} (\S+)", line)
            if match and f'model="{model}"' in match[2]:
                values[match[1]] = values.get(match[1], 0.0) + float(match[3])
    return values


def read_ledger(path: Path) -> dict[str, float]:
    """Tokens of requests in a ledger, by the counters' names with `ledger_` before them.

    As the counters do, it leaves out those that were refused or left before their first token.

    Raises:
        LedgerError: it can't be read.
    """
    rows = list(Ledger.read([path]).select(", ".join(TOKENS), "requests", "AND output_tokens > 0"))
    return {f"ledger_{kind}": sum(row[kind] for row in rows) for kind in TOKENS}


class Scraper:
    """Takes samples on a thread of its own, between `start` and `stop`.

    Args:
        url: The server's /metrics.
        model: Its name there.
        ledger: Directory of the server's ledger, for the first and the last sample; None: none.
    """

    def __init__(self, url: str, model: str, ledger: Path | None) -> None:
        self._url = url
        self._model = model
        self._ledger = ledger
        self._stopping = threading.Event()
        self._taken: list[tuple[float, dict[str, float]]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Take the first sample, and go on; raises what `read_ledger` does."""
        self._take(with_ledger=True)
        self._thread.start()

    def stop(self, start: float) -> list[Sample]:
        """End with a last sample, of what has been counted when it is all over.

        Args:
            start: By time.perf_counter; the samples' times count from there.
        """
        self._stopping.set()
        self._thread.join()
        time.sleep(1)  # the server shows and writes what it counted a few times a second
        self._take(with_ledger=True)
        return [Sample(round(moment - start, 3), values) for moment, values in self._taken]

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL):
            self._take()

    def _take(self, with_ledger: bool = False) -> None:
        values: dict[str, float] = {}
        with suppress(OSError):  # a server without metrics, or too busy: a gap in the line
            values |= read_metrics(self._url, self._model)
        if with_ledger and self._ledger:
            values |= read_ledger(self._ledger)
        if values:
            self._taken.append((time.perf_counter(), values))
