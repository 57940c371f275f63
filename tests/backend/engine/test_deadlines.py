"""Deadlines, with a fake clock."""

from tests.helpers import make_sequence
from tritium.backend.engine.deadlines import Deadlines
from tritium.backend.engine.request import Deadline, Milestone


def missed(deadlines, now, sequences):
    found = []
    for sequence, deadline in deadlines.missed(now, sequences):
        found.append((sequence.request_id, deadline.error))
        del sequences[sequence.request_id]
    return found


def make_deadlines(*all_deadlines):
    deadlines, sequences = Deadlines(), {}
    for i, some in enumerate(all_deadlines):
        sequences[i] = make_sequence(request_id=i, deadlines=some)
        deadlines.add(sequences[i])
    return deadlines, sequences


def test_deadlines_are_missed_in_the_order_of_their_times():
    deadlines, sequences = make_deadlines(
        (Deadline(3.0, Milestone.END, "c"),),
        (Deadline(1.0, Milestone.END, "a"), Deadline(2.0, Milestone.END, "never said")),
        (Deadline(2.0, Milestone.ADMISSION, "b"),),
        (),
    )
    assert missed(deadlines, 0.9, sequences) == []
    assert missed(deadlines, 3.0, sequences) == [(1, "a"), (2, "b"), (0, "c")]
    assert missed(deadlines, 99.0, sequences) == []
    assert list(sequences) == [3]


def test_two_deadlines_at_the_same_time_are_one_miss():
    same = (Deadline(1.0, Milestone.END, "end"), Deadline(1.0, Milestone.ADMISSION, "adm"))
    deadlines, sequences = make_deadlines(same)
    assert missed(deadlines, 1.0, sequences) == [(0, "adm")]


def test_a_milestone_that_was_reached_is_not_missed():
    deadlines, sequences = make_deadlines(
        (Deadline(1.0, Milestone.ADMISSION, "waits"), Deadline(2.0, Milestone.FIRST_TOKEN, "slow")),
        (Deadline(1.0, Milestone.ADMISSION, "waits"), Deadline(2.0, Milestone.FIRST_TOKEN, "slow")),
    )
    for sequence in sequences.values():
        sequence.scheduled_time = 0.5
    sequences[0].num_pending_tokens = 1  # not sampled yet
    sequences[1].token_ids.append(7)
    assert missed(deadlines, 1.0, sequences) == []
    assert missed(deadlines, 2.0, sequences) == [(0, "slow")]


def test_deadlines_of_ended_sequences_do_not_pile_up():
    deadlines, sequences = make_deadlines()
    for i in range(1000):
        sequence = make_sequence(request_id=i, deadlines=(Deadline(1e9, Milestone.END, ""),))
        deadlines.add(sequence)
        assert missed(deadlines, 0.0, sequences) == []
        assert len(deadlines._heap) <= 64
    sequences[1000] = make_sequence(
        request_id=1000, deadlines=(Deadline(5.0, Milestone.END, "kept"),)
    )
    deadlines.add(sequences[1000])
    for i in range(2000, 2200):
        deadlines.add(make_sequence(request_id=i, deadlines=(Deadline(1e9, Milestone.END, ""),)))
    assert missed(deadlines, 0.0, sequences) == []
    assert missed(deadlines, 5.0, sequences) == [(1000, "kept")]
