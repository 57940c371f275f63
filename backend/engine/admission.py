"""Admission control: whether a request may join the queue. Pure bookkeeping.

Each class has its own limits, so that many offline requests leave interactive ones their slots.
Not thread-safe: the engine calls it under its lock. Times are seconds of one clock.
"""

from dataclasses import dataclass

from tritium.backend.config import EngineConfig
from tritium.backend.engine.request import EngineRequest, RequestClass
from tritium.backend.errors import RefusalReason, Unavailable

_NUM_REMEMBERED = 16  # admissions over which the queue's speed is averaged


@dataclass(slots=True)
class _Load:
    """The requests of one class."""

    num_slots: int = 0  # taken by requests that run, wait, or are being tokenised
    num_waiting: int = 0
    num_waiting_tokens: int = 0


class AdmissionControl:
    """Counts slots of requests, and measures how fast the queue moves.

    Args:
        config: `max_num_seqs`, and the limits of each class: `max_queue_size`, `max_queue_tokens`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._loads = {request_class: _Load() for request_class in RequestClass}
        self._requests: dict[int, EngineRequest] = {}  # submitted and not ended, by id
        self._waiting: dict[int, EngineRequest] = {}  # submitted and never admitted, by id
        self._interval = 0.0  # average seconds between two admissions while requests wait
        self._last_time = 0.0  # of the last admission, or when a request joined the empty queue

    @property
    def num_slots(self) -> int:
        """Slots that are taken."""
        return sum(load.num_slots for load in self._loads.values())

    def reserve(
        self, num_slots: int, request_class: RequestClass, patience: float, now: float
    ) -> None:
        """Take slots for a request, before it is tokenised.

        Args:
            patience: Seconds; a request that leaves the queue later is of no use.

        Raises:
            Unavailable: a limit is reached; the message starts with the reason and names the limit.
        """
        config = self._config
        load = self._loads[request_class]
        name = request_class.name.lower()
        if load.num_slots + num_slots > config.max_num_seqs + config.max_queue_size:
            raise Unavailable(
                f"{load.num_slots} {name} requests are running or waiting (max_num_seqs "
                f"{config.max_num_seqs} + max_queue_size {config.max_queue_size}); "
                f"{self._hint(now)}",
                RefusalReason.QUEUE_FULL,
            )
        if load.num_waiting_tokens >= config.max_queue_tokens:
            raise Unavailable(
                f"{load.num_waiting_tokens} prompt tokens of {name} requests are waiting "
                f"(max_queue_tokens {config.max_queue_tokens}); {self._hint(now)}",
                RefusalReason.QUEUE_TOKENS,
            )
        wait = self._wait(request_class, now)
        if wait > patience:
            raise Unavailable(
                f"the request would wait for about {wait:.1f} s, and is not to wait longer than "
                f"{patience:g} s (deadline_ms, max_queue_delay_ms); {self._hint(now)}",
                RefusalReason.DEADLINE_UNMEETABLE,
            )
        load.num_slots += num_slots

    def release(self, num_slots: int, request_class: RequestClass) -> None:
        """Give back reserved slots for which no request was submitted."""
        self._loads[request_class].num_slots -= num_slots

    def submitted(self, request: EngineRequest, now: float) -> None:
        """A request waits in its reserved slot."""
        if not self._waiting:
            self._last_time = now
        self._requests[request.request_id] = self._waiting[request.request_id] = request
        self._loads[request.request_class].num_waiting += 1
        self._loads[request.request_class].num_waiting_tokens += len(request.prompt_token_ids)

    def admitted(self, request_ids: list[int], now: float) -> None:
        """Requests have left the queue. Those admitted again, after a preemption, do not count."""
        new = [request_id for request_id in request_ids if request_id in self._waiting]
        if new:
            self._interval = self._interval_after(len(new), now)
            self._last_time = now
        for request_id in new:
            self._leave(request_id)

    def ended(self, request_id: int) -> None:
        """A submitted request has ended, whether it was admitted or not."""
        self._leave(request_id)
        self._loads[self._requests.pop(request_id).request_class].num_slots -= 1

    def check_integrity(self) -> None:
        """Assert that the sums are those of the requests."""
        for request_class, load in self._loads.items():
            waiting = [r for r in self._waiting.values() if r.request_class is request_class]
            assert load.num_waiting == len(waiting)
            assert load.num_waiting_tokens == sum(len(r.prompt_token_ids) for r in waiting)
            submitted = [r for r in self._requests.values() if r.request_class is request_class]
            assert load.num_slots >= len(submitted)
        assert self._waiting.keys() <= self._requests.keys()

    def _leave(self, request_id: int) -> None:
        request = self._waiting.pop(request_id, None)
        if request:
            self._loads[request.request_class].num_waiting -= 1
            self._loads[request.request_class].num_waiting_tokens -= len(request.prompt_token_ids)

    def _interval_after(self, num_admitted: int, now: float) -> float:
        """The moving average of `_interval`, if `num_admitted` requests were admitted now."""
        weight = num_admitted / (num_admitted + _NUM_REMEMBERED)
        latest = (now - self._last_time) / num_admitted
        return self._interval + weight * (latest - self._interval)

    def _wait(self, request_class: RequestClass, now: float) -> float:
        """Seconds that a new request of a class would wait at the queue's current speed."""
        ahead = [load for other, load in self._loads.items() if other <= request_class]
        num_ahead = sum(load.num_waiting for load in ahead)
        # A queue that has stood still for longer than usual is slower than it was.
        return num_ahead * max(self._interval, self._interval_after(1, now)) if num_ahead else 0.0

    def _hint(self, now: float) -> str:
        wait = self._wait(max(RequestClass), now)
        return f"try again in about {wait:.1f} s" if wait >= 0.05 else "try again later"
