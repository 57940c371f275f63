"""Admission control: slots, waiting tokens, how fast the queue moves. With a fake clock."""

import math

import pytest

from tests.helpers import make_config, make_request
from tritium.backend.engine.admission import AdmissionControl
from tritium.backend.engine.request import RequestClass
from tritium.backend.errors import RefusalReason, Unavailable

INTERACTIVE, OFFLINE = RequestClass


def make_admission(max_num_seqs=2, max_queue_size=2, max_queue_tokens=10_000) -> AdmissionControl:
    return AdmissionControl(
        make_config(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs,
            max_queue_size=max_queue_size,
            max_queue_tokens=max_queue_tokens,
        )
    )


def take(admission, *request_ids, now=0.0, num_tokens=10, request_class=INTERACTIVE):
    """Reserve slots and submit requests."""
    for request_id in request_ids:
        admission.reserve(1, request_class, math.inf, now)
        request = make_request(range(num_tokens), 1, request_id, request_class=request_class)
        admission.submitted(request, now)
    admission.check_integrity()


def refusal(admission, now=0.0, request_class=INTERACTIVE, patience=math.inf, num_slots=1):
    """The (reason, message) of a refused request, None if it is not refused."""
    num_taken = admission.num_slots
    try:
        admission.reserve(num_slots, request_class, patience, now)
    except Unavailable as error:
        assert admission.num_slots == num_taken
        return error.reason, str(error)
    admission.release(num_slots, request_class)
    return None


def test_requests_beyond_the_slots_are_refused():
    admission = make_admission()
    take(admission, 0, 1, 2)
    assert refusal(admission) is None
    assert refusal(admission, num_slots=2) == (
        RefusalReason.QUEUE_FULL,
        "queue_full: 3 interactive requests are running or waiting (max_num_seqs 2 + "
        "max_queue_size 2); try again later",
    )
    admission.admitted([0], 1.0)  # runs, and still has its slot
    assert refusal(admission, num_slots=2)
    admission.ended(0)
    admission.ended(2)  # never ran
    admission.check_integrity()
    assert refusal(admission, num_slots=3) is None
    assert admission.num_slots == 1


def test_a_full_queue_of_one_class_leaves_the_other_its_slots():
    admission = make_admission()
    take(admission, 0, 1, 2, 3, request_class=OFFLINE)
    reason, message = refusal(admission, request_class=OFFLINE)
    assert (reason, "4 offline requests" in message) == (RefusalReason.QUEUE_FULL, True)
    assert refusal(admission, num_slots=4) is None


def test_prompt_tokens_count_while_they_wait():
    admission = make_admission(max_queue_size=9, max_queue_tokens=40)
    take(admission, 0, 1, num_tokens=19)
    assert refusal(admission) is None  # one more may join
    take(admission, 2, num_tokens=5)
    assert refusal(admission) == (
        RefusalReason.QUEUE_TOKENS,
        "queue_tokens: 43 prompt tokens of interactive requests are waiting (max_queue_tokens 40); "
        "try again later",
    )
    assert refusal(admission, request_class=OFFLINE) is None
    admission.admitted([1], 1.0)
    assert refusal(admission) is None
    admission.ended(1)
    admission.check_integrity()


def test_request_that_would_wait_too_long_is_refused():
    admission = make_admission(max_queue_size=99)
    take(admission, *range(60))
    for i in range(50):
        admission.admitted([i], now=i + 1)  # one per second
    assert refusal(admission, now=50, patience=10.0) is None
    reason, message = refusal(admission, now=50, patience=9.0)
    assert reason is RefusalReason.DEADLINE_UNMEETABLE
    assert message == (
        "deadline_unmeetable: the request would wait for about 9.5 s, and is not to wait longer "
        "than 9 s (deadline_ms, max_queue_delay_ms); try again in about 9.5 s"
    )


def test_interactive_requests_do_not_wait_for_offline_ones():
    admission = make_admission(max_queue_size=99)
    take(admission, *range(60), request_class=OFFLINE)
    for i in range(50):
        admission.admitted([i], now=i + 1)
    assert refusal(admission, now=50, patience=1.0) is None
    assert refusal(admission, now=50, patience=1.0, request_class=OFFLINE)


def test_a_queue_that_stands_still_is_slower_than_it_was():
    admission = make_admission(max_queue_size=99)
    take(admission, *range(20))
    admission.admitted(list(range(10)), now=0.1)
    assert refusal(admission, now=0.2, patience=1.0) is None
    assert refusal(admission, now=30, patience=1.0)


def test_idle_time_is_not_waiting():
    admission = make_admission(max_queue_size=99)
    take(admission, *range(20))
    for i in range(20):
        admission.admitted([i], now=0.1 * i)
    take(admission, *range(20, 30), now=1000.0)
    assert refusal(admission, now=1000.0, patience=2.0) is None


@pytest.mark.parametrize(("num_waiting", "seconds"), [(2, "1.9"), (20, "19.0")])
def test_the_hint_is_how_long_the_queue_takes(num_waiting, seconds):
    admission = make_admission(max_num_seqs=50, max_queue_size=num_waiting)
    take(admission, *range(50 + num_waiting), num_tokens=1)
    for i in range(50):
        admission.admitted([i], now=i + 1)
    reason, message = refusal(admission, now=50)
    assert reason is RefusalReason.QUEUE_FULL
    assert message.endswith(f"; try again in about {seconds} s")
