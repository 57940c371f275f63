"""Reads the server's /metrics while a replay runs."""

import re
import threading
import time
import urllib.request

from loadtests.replay.run import Sample

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


class Scraper:
    """Takes samples on a thread of its own, between `start` and `stop`."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model
        self._stopping = threading.Event()
        self._taken: list[tuple[float, dict[str, float]]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Take the first sample, and go on."""
        self._take()
        self._thread.start()

    def stop(self, start: float) -> list[Sample]:
        """End with a last sample, of what has been counted when it is all over.

        Args:
            start: By time.perf_counter; the samples' times count from there.
        """
        self._stopping.set()
        self._thread.join()
        time.sleep(1)  # the server shows what it counted a few times a second
        self._take()
        return [Sample(round(moment - start, 3), values) for moment, values in self._taken]

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL):
            self._take()

    def _take(self) -> None:
        try:
            values = read_metrics(self._url, self._model)
        except OSError:
            return  # a server without metrics, or too busy: a gap in the line
        self._taken.append((time.perf_counter(), values))
