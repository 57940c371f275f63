"""Which requests are taken in, and why others are refused. Pure bookkeeping.

Each class has limits of its own, so that a heap of offline requests leaves interactive ones their
places. Not safe for threads: the engine calls it under its lock. Times are seconds of one clock.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tritium.backend.engine.request import EngineRequest, RequestClass
from tritium.backend.errors import RefusalReason, Unavailable

_NUM_REMEMBERED = 16  # admissions that the queue's speed is measured by


@dataclass(slots=True)
class _Load:
    """What there is of one class."""

    num_places: int = 0  # taken: by who runs, waits, or is being tokenised
    num_waiting: int = 0
    num_waiting_tokens: int = 0


class _Entry(NamedTuple):
    request_class: RequestClass
    num_prompt_tokens: int


class Admission:
    """Places for requests, and how fast the queue moves.

    Args:
        max_num_seqs: Requests that run at once.
        max_queue_size: Requests of a class that may wait beyond those.
        max_queue_tokens: When so many prompt tokens of a class wait, no more requests may.
    """

    def __init__(self, max_num_seqs: int, max_queue_size: int, max_queue_tokens: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_queue_size = max_queue_size
        self._max_queue_tokens = max_queue_tokens
        self._loads = {request_class: _Load() for request_class in RequestClass}
        self._classes: dict[int, RequestClass] = {}  # of all submitted requests, by their ids
        self._waiting: dict[int, _Entry] = {}  # those of them that were never admitted
        self._interval = 0.0  # seconds between two admissions while somebody waits
        self._last_time = 0.0  # of an admission, or when the first one joined an empty queue

    @property
    def num_places(self) -> int:
        """Places that are taken."""
        return sum(load.num_places for load in self._loads.values())

    def reserve(
        self, num_places: int, request_class: RequestClass, patience: float, now: float
    ) -> None:
        """Take places for a request, before it is tokenised.

        Args:
            patience: Seconds after which it is no use to leave the queue.

        Raises:
            Unavailable: a limit is reached; the message starts with the reason and names the limit.
        """
        load = self._loads[request_class]
        name = request_class.name.lower()
        if load.num_places + num_places > self._max_num_seqs + self._max_queue_size:
            raise Unavailable(
                f"{load.num_places} {name} requests are running or waiting (max_num_seqs "
                f"{self._max_num_seqs} + max_queue_size {self._max_queue_size}); {self._hint(now)}",
                RefusalReason.QUEUE_FULL,
            )
        if load.num_waiting_tokens >= self._max_queue_tokens:
            raise Unavailable(
                f"{load.num_waiting_tokens} prompt tokens of {name} requests are waiting "
                f"(max_queue_tokens {self._max_queue_tokens}); {self._hint(now)}",
                RefusalReason.QUEUE_TOKENS,
            )
        wait = self._wait(request_class, now)
        if wait > patience:
            raise Unavailable(
                f"the request would wait for about {wait:.1f} s, and is not to wait longer than "
                f"{patience:g} s (deadline_ms, max_queue_delay_ms); {self._hint(now)}",
                RefusalReason.DEADLINE_UNMEETABLE,
            )
        load.num_places += num_places

    def release(self, num_places: int, request_class: RequestClass) -> None:
        """Give back reserved places that no request was submitted for."""
        self._loads[request_class].num_places -= num_places

    def submitted(self, request: EngineRequest, now: float) -> None:
        """A request waits on its reserved place."""
        if not self._waiting:
            self._last_time = now
        entry = _Entry(request.request_class, len(request.prompt_token_ids))
        self._classes[request.request_id] = entry.request_class
        self._waiting[request.request_id] = entry
        self._loads[entry.request_class].num_waiting += 1
        self._loads[entry.request_class].num_waiting_tokens += entry.num_prompt_tokens

    def admitted(self, request_ids: list[int], now: float) -> None:
        """These have left the queue, for the first time."""
        if request_ids:
            self._interval = self._interval_after(len(request_ids), now)
            self._last_time = now
        for request_id in request_ids:
            self._leave(request_id)

    def ended(self, request_id: int) -> None:
        """A submitted request is gone, whether it was admitted or not."""
        self._leave(request_id)
        self._loads[self._classes.pop(request_id)].num_places -= 1

    def check_integrity(self) -> None:
        """Assert that the sums are those of the requests that are there."""
        for request_class, load in self._loads.items():
            waiting = [e for e in self._waiting.values() if e.request_class is request_class]
            assert load.num_waiting == len(waiting)
            assert load.num_waiting_tokens == sum(e.num_prompt_tokens for e in waiting)
            assert load.num_places >= list(self._classes.values()).count(request_class)
        assert self._waiting.keys() <= self._classes.keys()

    def _leave(self, request_id: int) -> None:
        entry = self._waiting.pop(request_id, None)
        if entry:
            self._loads[entry.request_class].num_waiting -= 1
            self._loads[entry.request_class].num_waiting_tokens -= entry.num_prompt_tokens

    def _interval_after(self, num_admitted: int, now: float) -> float:
        """The moving average, were so many admitted now."""
        weight = num_admitted / (num_admitted + _NUM_REMEMBERED)
        latest = (now - self._last_time) / num_admitted
        return self._interval + weight * (latest - self._interval)

    def _wait(self, request_class: RequestClass, now: float) -> float:
        """Seconds that a new request of a class would wait, as the queue moves now."""
        ahead = [load for other, load in self._loads.items() if other <= request_class]
        num_ahead = sum(load.num_waiting for load in ahead)
        # A queue that has stood still for longer than usual is slower than it was.
        return num_ahead * max(self._interval, self._interval_after(1, now)) if num_ahead else 0.0

    def _hint(self, now: float) -> str:
        wait = self._wait(max(RequestClass), now)
        return f"try again in about {wait:.1f} s" if wait >= 0.05 else "try again later"
