"""The order of waiting sequences."""

from tests.helpers import make_sequence
from tritium.backend.engine.request import RequestClass
from tritium.backend.engine.waiting_queue import WaitingQueue

OFFLINE = {"request_class": RequestClass.OFFLINE}


def make_queue(*all_fields) -> WaitingQueue:
    queue = WaitingQueue()
    for i, fields in enumerate(all_fields):
        sequence = make_sequence(request_id=i, **fields)
        sequence.arrival_index = i
        sequence.queued_time = float(i)
        queue.add(sequence)
        queue.check_integrity()
    return queue


def ids(queue):
    return [sequence.request_id for sequence in queue]


def test_class_then_priority_then_arrival():
    queue = make_queue(OFFLINE, dict(priority=1), {}, {}, dict(**OFFLINE, priority=-5))
    assert ids(queue) == [2, 3, 1, 4, 0]
    assert (len(queue), queue[0].request_id) == (5, 2)


def test_sequence_that_comes_back_gets_its_old_slot():
    queue = make_queue({}, {}, {})
    sequence = queue[1]
    queue.remove(sequence)
    assert ids(queue) == [0, 2]
    sequence.queued_time = 9.0
    queue.add(sequence)
    queue.check_integrity()
    assert ids(queue) == [0, 1, 2]
    queue.remove(queue[0])
    assert queue.longest().request_id == 2  # sequence 1 has waited only since it came back


def test_promoted_sequences_go_first():
    queue = make_queue(OFFLINE, OFFLINE, dict(priority=-9))
    for expected in ([0, 2, 1], [0, 1, 2], [0, 1, 2]):
        queue.promote(queue.longest())
        queue.check_integrity()
        assert ids(queue) == expected
    assert queue.longest() is None
    queue.remove(queue[1])
    assert ids(queue) == [0, 2]
