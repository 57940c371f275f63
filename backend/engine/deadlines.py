"""When requests have to have got somewhere. Pure bookkeeping."""

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from tritium.backend.engine.request import Deadline, Milestone
from tritium.backend.engine.sequence import Sequence


class _Entry(NamedTuple):
    time: float
    request_id: int
    deadline: Deadline


class Deadlines:
    """The deadlines of all sequences, the next one at hand.

    Those of sequences that have ended are dropped when their time comes, or when they are the most.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        for deadline in sequence.request.deadlines:
            heappush(self._heap, _Entry(deadline.time, sequence.request_id, deadline))

    def missed(
        self, now: float, unfinished: Mapping[int, Sequence]
    ) -> Iterator[tuple[Sequence, Deadline]]:
        """Sequences that have not got where they should be by now, and the deadline.

        Args:
            now: time.perf_counter()
            unfinished: By request id. One that is given out is to be ended, and taken out.
        """
        while self._heap and self._heap[0].time <= now:
            _, request_id, deadline = heappop(self._heap)
            sequence = unfinished.get(request_id)
            if sequence and not _has_reached(sequence, deadline.milestone):
                yield sequence, deadline
        if len(self._heap) > 64 + 8 * len(unfinished):
            self._heap = [entry for entry in self._heap if entry.request_id in unfinished]
            heapify(self._heap)


def _has_reached(sequence: Sequence, milestone: Milestone) -> bool:
    """What an unfinished sequence has got to; pending tokens are not there yet."""
    if milestone is Milestone.ADMISSION:
        return sequence.scheduled_time > 0
    if milestone is Milestone.FIRST_TOKEN:
        return len(sequence.token_ids) > sequence.num_prompt_tokens
    return False
