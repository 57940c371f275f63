"""Request deadlines: which milestone must be reached by when. Pure bookkeeping."""

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush

from tritium.backend.engine.request import Deadline, Milestone
from tritium.backend.engine.sequence import Sequence


class Deadlines:
    """The deadlines of all sequences, by time.

    Those of ended sequences are removed when due, or once they outnumber the live ones.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []  # (time, request id, deadline)

    def add(self, sequence: Sequence) -> None:
        for deadline in sequence.request.deadlines:
            heappush(self._heap, (deadline.time, sequence.request_id, deadline))

    def missed(
        self, now: float, unfinished: Mapping[int, Sequence]
    ) -> Iterator[tuple[Sequence, Deadline]]:
        """Sequences that have missed a deadline, with that deadline.

        Args:
            now: Seconds, by the clock of the deadlines.
            unfinished: By request id. The caller ends and removes each sequence it is given.
        """
        while self._heap and self._heap[0][0] <= now:
            _, request_id, deadline = heappop(self._heap)
            sequence = unfinished.get(request_id)
            if sequence and not _has_reached(sequence, deadline.milestone):
                yield sequence, deadline
        if len(self._heap) > 64 + 8 * len(unfinished):
            self._heap = [entry for entry in self._heap if entry[1] in unfinished]
            heapify(self._heap)


def _has_reached(sequence: Sequence, milestone: Milestone) -> bool:
    """Whether an unfinished sequence has reached a milestone; pending tokens do not count."""
    if milestone is Milestone.ADMISSION:
        return sequence.scheduled_time > 0
    if milestone is Milestone.FIRST_TOKEN:
        return len(sequence.token_ids) > sequence.num_prompt_tokens
    return False
