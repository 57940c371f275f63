"""Which sequences wait, and in which order they are admitted. Pure bookkeeping."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from tritium.backend.engine.sequence import Sequence


class WaitingQueue:
    """Sequences in the order of class, priority, arrival; promoted ones come first."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []
        # In the order in which they joined the queue; without promoted ones.
        self._joined: OrderedDict[Sequence, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def __getitem__(self, index: int) -> Sequence:
        return self._queue[index]

    def add(self, sequence: Sequence) -> None:
        insort(self._queue, sequence, key=_order)
        if not sequence.is_promoted:
            self._joined[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence of the queue."""
        index = bisect_left(self._queue, _order(sequence), key=_order)
        assert self._queue[index] is sequence
        del self._queue[index]
        self._joined.pop(sequence, None)

    def longest(self) -> Sequence | None:
        """The sequence that has waited longest, promoted ones excepted."""
        return next(iter(self._joined), None)

    def promote(self, sequence: Sequence) -> None:
        """Move a sequence of the queue before all that are not promoted."""
        self.remove(sequence)
        sequence.is_promoted = True
        self.add(sequence)

    def check_integrity(self) -> None:
        assert self._queue == sorted(self._queue, key=_order)
        joined = {sequence for sequence in self._queue if not sequence.is_promoted}
        assert set(self._joined) == joined
        times = [sequence.queued_time for sequence in self._joined]
        assert times == sorted(times)


def _order(sequence: Sequence) -> tuple[int, int, int]:
    """The sort key, unique per sequence."""
    if sequence.is_promoted:
        return -1, 0, sequence.arrival_index
    return sequence.request.request_class, sequence.request.priority, sequence.arrival_index
