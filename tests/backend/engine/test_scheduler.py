"""The scheduler on literal batches: (request id, new tokens). Blocks of 4 tokens."""

from unittest.mock import ANY

import pytest

from tests.helpers import make_config, make_sequence
from tritium.backend.config import RepetitionDetection, SpeculativeConfig
from tritium.backend.engine.block_manager import BlockManager
from tritium.backend.engine.repetition import ends_in_loop
from tritium.backend.engine.request import (
    Deadline,
    FinishReason,
    Milestone,
    RequestClass,
    SampledToken,
)
from tritium.backend.engine.scheduler import Scheduler
from tritium.backend.engine.sequence import ScheduledSequence, SequenceStatus

CONTENT = 7  # the token that each step samples by default


def make_scheduler(num_blocks=100, prefix_cache=False, clock=lambda: 1.0, **changes) -> Scheduler:
    config = make_config(**{"reserve_blocks_per_seq": 0, **changes})
    manager = BlockManager(num_blocks, config.block_size, prefix_cache)
    return Scheduler(config, manager, clock)


def add(scheduler, *sequences):
    for sequence in sequences:
        scheduler.add(sequence)


def step(scheduler, token_id=CONTENT):
    """One step: ([(request id, new tokens)], outputs)."""
    batch = scheduler.schedule()
    planned = [(s.sequence.request_id, s.num_new_tokens) for s in batch]
    sampled = [SampledToken(token_id, None)] * sum(s.num_samples for s in batch)
    scheduler.advance(batch)
    outputs = scheduler.update(batch, sampled)
    scheduler.check_integrity()
    return planned, outputs


def plans(scheduler, num_steps):
    return [step(scheduler)[0] for _ in range(num_steps)]


def ids(sequences):
    return [sequence.request_id for sequence in sequences]


# -- the token budget --


def test_a_long_prompt_is_computed_in_chunks_then_decoded():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, make_sequence(range(10)))
    assert plans(scheduler, 5) == [[(0, 4)], [(0, 4)], [(0, 2)], [(0, 1)], [(0, 1)]]


def test_only_the_chunk_that_reaches_the_last_token_yields_one():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, make_sequence(range(6)))
    assert step(scheduler) == ([(0, 4)], [])
    planned, [output] = step(scheduler)
    assert planned == [(0, 2)]
    assert (output.request_id, output.tokens) == (0, [SampledToken(CONTENT, None)])
    assert output.finish_reason is None


def test_prefill_fills_what_the_decodes_leave_of_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=5)
    add(scheduler, make_sequence(range(2), request_id=0), make_sequence(range(2), request_id=1))
    assert plans(scheduler, 1) == [[(0, 2), (1, 2)]]
    add(scheduler, make_sequence(range(9), request_id=2), make_sequence(range(9), request_id=3))
    assert plans(scheduler, 5) == [
        [(0, 1), (1, 1), (2, 3)],
        [(0, 1), (1, 1), (2, 3)],
        [(0, 1), (1, 1), (2, 3)],
        [(0, 1), (1, 1), (2, 1), (3, 2)],
        [(0, 1), (1, 1), (2, 1), (3, 2)],
    ]


def test_a_started_prompt_is_scheduled_before_a_waiting_one():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, make_sequence(range(6), request_id=0), make_sequence(range(6), request_id=1))
    assert plans(scheduler, 3) == [[(0, 4)], [(0, 2), (1, 2)], [(0, 1), (1, 3)]]


def test_decodes_come_first_in_the_batch():
    scheduler = make_scheduler()
    add(
        scheduler,
        make_sequence(range(5), request_id=0),
        make_sequence(range(1), request_id=1),
        make_sequence(range(3), request_id=2),
        make_sequence(range(1), request_id=3),
    )
    assert plans(scheduler, 1) == [[(1, 1), (3, 1), (0, 5), (2, 3)]]


def test_each_token_goes_to_its_own_sequence():
    scheduler = make_scheduler()
    add(scheduler, make_sequence(range(5), request_id=0), make_sequence(range(1), request_id=1))
    batch = scheduler.schedule()
    scheduler.advance(batch)
    outputs = scheduler.update(batch, [SampledToken(10, None), SampledToken(20, None)])
    assert {o.request_id: o.tokens[0].token_id for o in outputs} == {1: 10, 0: 20}
    assert [s.token_ids[-1] for s in scheduler.running] == [20, 10]


def test_the_budget_has_a_token_for_each_running_sequence():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(4\).*max_num_seqs \(5\)"):
        make_scheduler(max_num_seqs=5, max_num_batched_tokens=4)


# -- admission --


def test_no_more_than_max_num_seqs_run():
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, *(make_sequence([1, 2], request_id=i) for i in range(3)))
    assert plans(scheduler, 2) == [[(0, 2), (1, 2)], [(0, 1), (1, 1)]]
    assert ids(scheduler.waiting) == [2]


def test_the_slot_of_a_finished_sequence_is_filled_in_the_next_step():
    scheduler = make_scheduler(max_num_seqs=2)
    add(
        scheduler,
        make_sequence([1, 2], max_tokens=1, request_id=0),
        make_sequence([1, 2], request_id=1),
        make_sequence([1, 2, 3], request_id=2),
    )
    assert plans(scheduler, 2) == [[(0, 2), (1, 2)], [(1, 1), (2, 3)]]


def test_first_come_first_served():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, *(make_sequence([1], max_tokens=1, request_id=i) for i in (5, 3, 9)))
    assert plans(scheduler, 3) == [[(5, 1)], [(3, 1)], [(9, 1)]]


def test_a_sequence_that_fits_bypasses_one_that_does_not():
    scheduler = make_scheduler(num_blocks=4)
    add(
        scheduler,
        make_sequence(range(5), max_tokens=2, request_id=0),  # 2 blocks
        make_sequence(range(12), request_id=1),  # 3 blocks
        make_sequence(range(1), request_id=2),
    )
    assert plans(scheduler, 3) == [[(2, 1), (0, 5)], [(0, 1), (2, 1)], [(2, 1), (1, 12)]]


def test_a_sequence_is_bypassed_at_most_max_bypasses_times():
    scheduler = make_scheduler(num_blocks=4, max_bypasses=2)
    large = make_sequence(range(16), max_tokens=1, request_id=1)  # all 4 blocks
    add(scheduler, make_sequence(range(5), max_tokens=5, request_id=0), large)
    add(scheduler, *(make_sequence([1], max_tokens=1, request_id=i) for i in range(2, 6)))
    assert plans(scheduler, 2) == [[(2, 1), (3, 1), (0, 5)], [(0, 1)]]
    assert large.num_bypasses == 2
    assert plans(scheduler, 5) == [[(0, 1)], [(0, 1)], [(0, 1)], [(1, 16)], [(4, 1), (5, 1)]]


def test_without_bypasses_all_wait_for_the_head_of_the_queue():
    scheduler = make_scheduler(num_blocks=4, max_bypasses=0)
    add(
        scheduler,
        make_sequence(range(5), max_tokens=2, request_id=0),  # 2 blocks
        make_sequence(range(12), request_id=1),  # 3 blocks
        make_sequence(range(1), request_id=2),
    )
    assert plans(scheduler, 3) == [[(0, 5)], [(0, 1)], [(2, 1), (1, 12)]]


def test_admission_leaves_blocks_for_running_sequences():
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=32, reserve_blocks_per_seq=1)
    add(scheduler, *(make_sequence(range(8), max_tokens=9, request_id=i) for i in range(3)))
    assert plans(scheduler, 1) == [[(0, 8), (1, 8)]]  # the third needs 2 of 2 free blocks
    scheduler.end(1, FinishReason.CANCELLED)
    assert plans(scheduler, 1) == [[(0, 1), (2, 8)]]  # of 3 free blocks it takes 2, and 1 is left


def test_a_sequence_that_runs_alone_needs_no_reserve():
    scheduler = make_scheduler(num_blocks=4, reserve_blocks_per_seq=3)
    add(scheduler, *(make_sequence(range(16), max_tokens=1, request_id=i) for i in range(2)))
    assert plans(scheduler, 2) == [[(0, 16)], [(1, 16)]]


def test_a_prompt_is_admitted_only_if_all_of_it_fits():
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=8)
    add(scheduler, make_sequence(range(5), request_id=0), make_sequence(range(12), request_id=1))
    assert plans(scheduler, 2) == [[(0, 5)], [(0, 1)]]  # 2 blocks are free, enough only for a chunk


# -- preemption --


def preempting(prefix_cache=False):
    """The first sequence's ninth token needs a fifth block of four: it preempts the second one."""
    scheduler = make_scheduler(num_blocks=4, prefix_cache=prefix_cache, max_bypasses=0)
    first = make_sequence(range(8), max_tokens=4, request_id=0)
    second = make_sequence(range(20, 28), max_tokens=4, request_id=1)
    third = make_sequence([9], max_tokens=4, request_id=2)
    add(scheduler, first, second)
    assert plans(scheduler, 1) == [[(0, 8), (1, 8)]]
    add(scheduler, third)
    return scheduler, first, second


def test_the_latest_running_sequence_is_the_victim():
    scheduler, first, second = preempting()
    assert plans(scheduler, 1) == [[(0, 1)]]
    assert first.block_table == [0, 1, 2]
    assert (second.block_table, second.num_computed_tokens) == ([], 0)
    assert second.status is SequenceStatus.WAITING
    assert (second.usage.num_preemptions, scheduler.admitter.num_preemptions) == (1, 1)


def test_the_victim_waits_at_the_head_and_no_sequence_is_admitted_in_that_step():
    scheduler, _, _ = preempting()
    assert plans(scheduler, 1) == [[(0, 1)]]  # though the third would fit
    assert ids(scheduler.waiting) == [1, 2]


def test_the_victim_is_recomputed_with_its_sampled_tokens():
    scheduler, _, second = preempting()
    assert plans(scheduler, 5) == [
        [(0, 1)],
        [(0, 1)],
        [(0, 1)],
        [(2, 1), (1, 9)],  # the first one has ended
        [(1, 1), (2, 1)],
    ]
    assert second.token_ids == [*range(20, 28), CONTENT, CONTENT, CONTENT]


def test_a_preempted_sequence_gets_each_token_once():
    scheduler, _, _ = preempting()
    tokens = {0: 1, 1: 1, 2: 0}
    reasons = []
    while scheduler.has_unfinished():
        for output in step(scheduler)[1]:
            tokens[output.request_id] += len(output.tokens)
            reasons += [output.finish_reason] if output.finish_reason else []
    assert tokens == {0: 4, 1: 4, 2: 4}
    assert reasons == [FinishReason.LENGTH] * 3


def test_a_preempted_sequence_hits_its_own_cached_prefix():
    scheduler, first, second = preempting(prefix_cache=True)
    assert plans(scheduler, 1) == [[(0, 1)]]
    assert first.block_table == [0, 1, 3]  # the tail of the victim's two blocks
    assert plans(scheduler, 3) == [[(0, 1)], [(0, 1)], [(2, 1), (1, 5)]]
    assert second.block_table == [2, 3, 1]
    assert second.num_computed_tokens == 9
    assert second.num_cached_tokens == 0  # it found no block when it was first admitted


def test_the_last_sequence_preempts_itself():
    scheduler = make_scheduler(num_blocks=4)
    first, second = make_sequence(range(7), request_id=0), make_sequence(range(8), request_id=1)
    add(scheduler, first, second)
    assert plans(scheduler, 2) == [[(0, 7), (1, 8)], [(0, 1)]]
    assert (ids(scheduler.running), ids(scheduler.waiting)) == ([0], [1])
    assert (first.usage.num_preemptions, second.usage.num_preemptions) == (0, 1)


def test_a_half_computed_prompt_is_preempted_for_a_decode():
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=8)
    first, second = make_sequence(range(7), request_id=0), make_sequence(range(8), request_id=1)
    add(scheduler, first)
    assert plans(scheduler, 1) == [[(0, 7)]]
    add(scheduler, second)
    assert plans(scheduler, 1) == [[(0, 1), (1, 7)]]
    assert plans(scheduler, 1) == [[(0, 1)]]  # its ninth token
    assert (second.num_computed_tokens, second.usage.num_preemptions) == (0, 1)


# -- promises --


def capped(max_preemptions):
    """Two sequences of 8 tokens in 4 blocks; each will need 3."""
    scheduler = make_scheduler(num_blocks=4, max_preemptions=max_preemptions)
    first = make_sequence(range(8), max_tokens=4, request_id=0)
    second = make_sequence(range(20, 28), max_tokens=4, request_id=1)
    add(scheduler, first, second)
    return scheduler, first, second


def test_at_the_cap_a_sequence_waits_until_all_blocks_it_can_need_are_free():
    scheduler, _, second = capped(max_preemptions=1)
    assert plans(scheduler, 2) == [[(0, 8), (1, 8)], [(0, 1)]]
    assert second.usage.num_preemptions == 1
    scheduler.end(0, FinishReason.CANCELLED)
    third = make_sequence(range(40, 44), max_tokens=5, request_id=2)
    add(scheduler, third)
    assert plans(scheduler, 1) == [[(1, 9), (2, 4)]]
    assert (second.num_promised_blocks, len(second.block_table)) == (3, 3)
    assert plans(scheduler, 1) == [[(1, 1)]]  # the third, which came later, is preempted
    assert (third.usage.num_preemptions, second.usage.num_preemptions) == (1, 1)


def test_promised_blocks_go_to_no_other_sequence():
    scheduler, first, second = capped(max_preemptions=0)  # each sequence needs a promise
    assert plans(scheduler, 1) == [[(0, 8)]]
    manager = scheduler.block_manager
    assert (manager.num_free_blocks, manager.num_available_blocks) == (2, 1)
    assert plans(scheduler, 4) == [[(0, 1)], [(0, 1)], [(0, 1)], [(1, 8)]]
    assert (first.usage.num_preemptions, second.usage.num_preemptions) == (0, 0)
    assert (manager.num_promises, manager.num_promised_blocks) == (1, 1)


def test_a_sequence_without_a_promise_is_preempted_though_it_came_first():
    scheduler, first, second = capped(max_preemptions=1)
    second.usage.num_preemptions = 1
    scheduler.end(1, FinishReason.CANCELLED)
    late = make_sequence(range(20, 24), max_tokens=5, request_id=3)  # 2 blocks
    late.usage.num_preemptions = 1
    add(scheduler, late)
    assert plans(scheduler, 1) == [[(0, 8), (3, 4)]]
    assert plans(scheduler, 1) == [[(3, 1)]]  # the first lacks the block that is promised
    assert (first.usage.num_preemptions, late.usage.num_preemptions) == (1, 1)


def test_no_draft_uses_a_promised_block():
    for max_tokens, num_draft_tokens in ((3, 4), (7, 0)):  # 3 or 4 of 7 blocks are promised
        scheduler, _ = start_loop(num_blocks=7, max_preemptions=1)
        other = make_sequence(range(7), max_tokens=max_tokens, request_id=1)
        other.usage.num_preemptions = 1
        add(scheduler, other)
        batch = scheduler.schedule()
        assert [s.num_new_tokens for s in batch] == [1 + num_draft_tokens, 7]
        assert len(other.block_table) == 2


# -- classes --

OFFLINE = {"request_class": RequestClass.OFFLINE}


def test_order_is_by_class_then_priority_then_arrival():
    scheduler = make_scheduler(max_num_seqs=1)
    for request_id, fields in enumerate(
        [
            dict(**OFFLINE, priority=-9),
            dict(**OFFLINE, priority=-10),
            dict(priority=3),
            {},
            dict(priority=3),
        ]
    ):
        add(scheduler, make_sequence([1], 1, request_id, **fields))
    assert plans(scheduler, 5) == [[(i, 1)] for i in (3, 2, 4, 1, 0)]


def test_an_interactive_prompt_goes_before_a_started_offline_one():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, make_sequence(range(20), request_id=0, **OFFLINE))
    add(scheduler, make_sequence(range(2), request_id=1, **OFFLINE))
    assert plans(scheduler, 1) == [[(0, 8)]]
    add(scheduler, make_sequence(range(18), request_id=2))
    assert plans(scheduler, 4) == [
        [(0, 1), (2, 7)],  # the sequence behind gets a token per step
        [(0, 1), (2, 7)],
        [(2, 4), (0, 4)],
        [(2, 1), (1, 1), (0, 6)],
    ]


def test_a_waiting_interactive_sequence_preempts_an_offline_one():
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=2)
    offline = [make_sequence(range(5), request_id=i, **OFFLINE) for i in (0, 1)]
    add(scheduler, *offline)
    assert plans(scheduler, 1) == [[(0, 5), (1, 5)]]
    add(scheduler, make_sequence([1, 2], 1, request_id=2))  # lacks a slot
    assert plans(scheduler, 1) == [[(0, 1), (2, 2)]]  # the victim is not admitted again
    assert [s.usage.num_preemptions for s in offline] == [0, 1]
    assert plans(scheduler, 1) == [[(0, 1), (1, 6)]]
    add(scheduler, make_sequence(range(8), 1, request_id=3))  # lacks blocks
    assert plans(scheduler, 1) == [[(0, 1), (3, 8)]]
    assert [s.usage.num_preemptions for s in offline] == [0, 2]


def test_no_sequence_is_preempted_if_the_waiting_one_would_still_not_fit():
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, make_sequence(range(6), 20, request_id=0))
    add(scheduler, make_sequence(range(6), request_id=1, **OFFLINE))
    assert plans(scheduler, 1) == [[(0, 6), (1, 6)]]
    add(scheduler, make_sequence(range(12), request_id=2))
    assert plans(scheduler, 1) == [[(0, 1), (1, 1)]]


def test_no_sequence_is_preempted_in_vain_for_blocks_that_it_shares():
    """The waiting one needs 11 blocks and finds 4. Without the victim 10 are free, among them the
    4 found ones, so that only 6 others are left for the 7 that it lacks."""
    scheduler = make_scheduler(num_blocks=12, prefix_cache=True, max_num_batched_tokens=64)
    add(scheduler, make_sequence(range(100, 107), request_id=0))
    add(scheduler, make_sequence(range(23), request_id=1, **OFFLINE))
    assert plans(scheduler, 1) == [[(0, 7), (1, 23)]]
    add(scheduler, make_sequence([*range(16), *range(50, 77)], request_id=2))
    assert plans(scheduler, 1) == [[(0, 1), (1, 1)]]


def test_the_victim_is_the_latest_of_the_lowest_class():
    scheduler = make_scheduler(num_blocks=8)
    add(scheduler, make_sequence(range(8), request_id=0, **OFFLINE))
    add(scheduler, make_sequence(range(7), request_id=1, **OFFLINE))
    assert plans(scheduler, 1) == [[(0, 8), (1, 7)]]
    add(scheduler, make_sequence(range(7), 20, request_id=2))
    add(scheduler, make_sequence(range(7), 20, request_id=3))
    assert plans(scheduler, 1) == [[(0, 1), (2, 7), (3, 7)]]  # the first needs a third block
    assert (ids(scheduler.running), ids(scheduler.waiting)) == ([2, 3, 0], [1])
    assert plans(scheduler, 2) == [[(2, 1), (3, 1), (0, 1)], [(2, 1), (3, 1)]]
    assert (ids(scheduler.running), ids(scheduler.waiting)) == ([2, 3], [0, 1])


def test_an_offline_sequence_never_preempts_an_interactive_one():
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, make_sequence(range(8), 5, request_id=0, **OFFLINE))
    assert plans(scheduler, 1) == [[(0, 8)]]
    interactive = make_sequence(range(6), 3, request_id=1)
    add(scheduler, interactive)
    assert plans(scheduler, 1) == [[(1, 6)]]  # the offline one's ninth token lacks a block
    assert interactive.usage.num_preemptions == 0


def test_a_sequence_that_has_waited_long_is_promoted():
    now = [0.0]
    scheduler = make_scheduler(max_num_seqs=1, ageing_seconds=5, clock=lambda: now[0])
    add(scheduler, *(make_sequence([1], 1, request_id=i, **OFFLINE) for i in range(2)))
    order = []
    for request_id in range(2, 12):
        add(scheduler, make_sequence([1], 1, request_id=request_id))
        add(scheduler, make_sequence([1], 1, request_id=100 + request_id))
        order += [request_id for request_id, _ in step(scheduler)[0]]
        now[0] += 1
    # After five seconds all waiting sequences are due for promotion; the offline ones came first.
    assert order == [2, 102, 3, 103, 4, 0, 1, 104, 5, 105]


def test_promoted_sequences_take_at_most_an_eighth_of_the_slots():
    now = [0.0]
    scheduler = make_scheduler(max_num_seqs=16, ageing_seconds=5, clock=lambda: now[0])
    add(scheduler, *(make_sequence([1], 50, request_id=i) for i in range(16)))
    step(scheduler)
    add(scheduler, *(make_sequence([1], 50, request_id=i, **OFFLINE) for i in range(16, 20)))
    now[0] = 6
    plans(scheduler, 4)
    assert [s.is_promoted for s in scheduler.waiting] == [True, True, False, False]
    scheduler.end(16, FinishReason.CANCELLED)
    step(scheduler)
    assert [s.is_promoted for s in scheduler.waiting] == [True, True, False]


# -- deadlines --


def test_a_sequence_that_misses_a_deadline_ends_with_its_error():
    now = [1.0]
    scheduler = make_scheduler(max_num_seqs=1, clock=lambda: now[0])
    deadlines = (Deadline(2.0, Milestone.ADMISSION, "late"), Deadline(9.0, Milestone.END, "over"))
    runs, waits, token = (
        make_sequence([1], request_id=0, deadlines=deadlines),
        make_sequence([1], request_id=1, deadlines=deadlines),
        make_sequence(
            range(40), request_id=2, deadlines=(Deadline(8.0, Milestone.FIRST_TOKEN, "slow"),)
        ),
    )
    add(scheduler, runs, waits)
    step(scheduler)
    assert scheduler.expire() == []
    now[0] = 2.0
    [output] = scheduler.expire()
    assert (output.request_id, output.finish_reason, output.error) == (1, "expired", "late")
    assert output.scheduled_time == 0
    add(scheduler, token)
    now[0] = 8.0
    [output] = scheduler.expire()
    assert (output.request_id, output.error) == (2, "slow")
    now[0] = 9.0
    [output] = scheduler.expire()
    assert (output.request_id, output.error) == (0, "over")
    assert not scheduler.has_unfinished()
    scheduler.check_integrity()


# -- prefix reuse --


def test_a_cached_prefix_is_not_computed_again():
    scheduler = make_scheduler(prefix_cache=True)
    add(scheduler, make_sequence(range(10), max_tokens=1, request_id=0))
    step(scheduler)
    add(scheduler, make_sequence(range(10), max_tokens=2, request_id=1))
    planned, [output] = step(scheduler)
    assert planned == [(1, 2)]
    assert output.num_cached_tokens == 8


def common_beginnings(**changes) -> Scheduler:
    """Three prompts with two common blocks, and an unrelated one."""
    scheduler = make_scheduler(prefix_cache=True, max_num_batched_tokens=64, **changes)
    prompts = [[*range(8), 10, 11], [*range(8), 20, 21], [*range(8), 30, 31], [40, 41]]
    add(scheduler, *(make_sequence(prompt, request_id=i) for i, prompt in enumerate(prompts)))
    return scheduler


def test_only_sequences_that_lack_a_block_being_computed_wait_for_it():
    assert plans(common_beginnings(), 3) == [
        [(0, 10), (3, 2)],
        [(0, 1), (3, 1), (1, 2), (2, 2)],
        [(0, 1), (3, 1), (1, 1), (2, 1)],
    ]


def test_a_sequence_that_waits_for_a_block_is_bypassed_at_most_max_bypasses_times():
    scheduler = make_scheduler(prefix_cache=True, max_num_batched_tokens=64, max_bypasses=1)
    prompts = [[*range(8), 10], [*range(8), 20], [30], [40]]
    add(scheduler, *(make_sequence(prompt, request_id=i) for i, prompt in enumerate(prompts)))
    assert plans(scheduler, 1) == [[(2, 1), (0, 9)]]
    assert ids(scheduler.waiting) == [1, 3]


def test_a_step_without_memory_sends_back_only_the_sequences_it_admitted():
    scheduler = make_scheduler()
    add(scheduler, make_sequence(range(6), request_id=0))
    assert plans(scheduler, 1) == [[(0, 6)]]
    add(scheduler, make_sequence(range(10), request_id=1))
    assert scheduler.retreat(scheduler.schedule())  # a step of 1 + 10 tokens
    assert (ids(scheduler.running), ids(scheduler.waiting)) == ([0], [1])
    assert plans(scheduler, 1) == [[(0, 1), (1, 4)]]


def test_running_sequences_take_turns_if_the_budget_is_smaller_than_their_number():
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=16)
    offline = {"request_class": RequestClass.OFFLINE}
    add(scheduler, *(make_sequence([1], request_id=i, **offline) for i in range(6)))
    add(scheduler, make_sequence([1], request_id=6), make_sequence([1], request_id=7))
    assert plans(scheduler, 1) == [[(i, 1) for i in (6, 7, 0, 1, 2, 3, 4, 5)]]
    assert scheduler.retreat(scheduler.schedule())
    assert plans(scheduler, 4) == 2 * [
        [(6, 1), (7, 1), (0, 1), (1, 1)],
        [(2, 1), (3, 1), (4, 1), (5, 1)],
    ]


def test_a_sequence_that_is_sent_back_before_its_first_step_keeps_its_deadlines():
    now = [1.0]
    scheduler = make_scheduler(clock=lambda: now[0])
    add(
        scheduler, make_sequence(range(10), deadlines=(Deadline(2.0, Milestone.ADMISSION, "late"),))
    )
    assert scheduler.retreat(scheduler.schedule())
    now[0] = 2.0
    [output] = scheduler.expire()
    assert (output.finish_reason, output.error, output.scheduled_time) == ("expired", "late", 0)


def test_a_waiting_sequence_computes_the_block_itself_if_the_other_one_ends():
    scheduler = common_beginnings()
    scheduler.schedule()
    scheduler.end(0, FinishReason.CANCELLED)
    assert plans(scheduler, 1) == [[(3, 2), (1, 10)]]


def test_an_interactive_sequence_does_not_wait_for_a_block_of_an_offline_one():
    scheduler = make_scheduler(prefix_cache=True, max_num_batched_tokens=8)
    offline = make_sequence(range(16), request_id=0, request_class=RequestClass.OFFLINE)
    add(scheduler, offline)
    assert plans(scheduler, 1) == [[(0, 8)]]
    add(scheduler, make_sequence(range(16), request_id=1))
    # It starts with the two published blocks and computes the others itself.
    assert plans(scheduler, 1) == [[(0, 1), (1, 7)]]


@pytest.mark.parametrize("other", [{"cache_salt": b"other"}, {"num_prompt_logprobs": 0}])
def test_a_sequence_that_may_not_use_a_block_does_not_wait_for_it(other):
    scheduler = make_scheduler(prefix_cache=True, max_num_batched_tokens=64)
    add(scheduler, make_sequence(range(10), request_id=0))
    add(scheduler, make_sequence(range(10), request_id=1, **other))
    assert plans(scheduler, 1) == [[(0, 10), (1, 10)]]


def test_the_last_block_of_a_fully_cached_prompt_is_computed():
    scheduler = make_scheduler(prefix_cache=True)
    add(scheduler, make_sequence(range(8), max_tokens=1, request_id=0))
    step(scheduler)
    add(scheduler, make_sequence(range(8), request_id=1))
    planned, [output] = step(scheduler)
    assert planned == [(1, 4)]
    assert (output.num_cached_tokens, len(output.tokens)) == (4, 1)


def test_257_tokens_at_block_256():
    scheduler = make_scheduler(block_size=256, max_num_batched_tokens=512, prefix_cache=True)
    first = make_sequence(range(257), request_id=0)
    add(scheduler, first)
    assert plans(scheduler, 2) == [[(0, 257)], [(0, 1)]]
    assert first.block_table == [0, 1]
    second = make_sequence(range(257), request_id=1)
    add(scheduler, second)
    assert plans(scheduler, 1) == [[(0, 1), (1, 1)]]
    assert second.block_table == [0, 2]


def test_decoding_past_block_256_opens_a_block():
    scheduler = make_scheduler(block_size=256, max_num_batched_tokens=512, prefix_cache=True)
    sequence = make_sequence(range(255), request_id=0)
    add(scheduler, sequence)
    tables = []
    for _ in range(4):
        step(scheduler)
        tables.append(list(sequence.block_table))
    assert tables == [[0], [0], [0, 1], [0, 1]]


# -- endings --


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        (dict(max_tokens=1), [FinishReason.LENGTH]),
        (dict(max_tokens=3), [None, None, FinishReason.LENGTH]),
        (dict(max_tokens=3, stop_token_ids=frozenset({CONTENT})), [FinishReason.STOP]),
        (dict(max_tokens=1, stop_token_ids=frozenset({CONTENT})), [FinishReason.STOP]),
        (dict(max_tokens=2, stop_token_ids=frozenset({1, 2})), [None, FinishReason.LENGTH]),
    ],
)
def test_finish_reasons(fields, reasons):
    scheduler = make_scheduler()
    add(scheduler, make_sequence([1, 2], **fields))
    seen = [step(scheduler)[1][0].finish_reason for _ in reasons]
    assert seen == reasons
    assert not scheduler.has_unfinished()
    assert scheduler.block_manager.num_used_blocks == 0


def test_a_finished_sequence_is_not_scheduled_again():
    scheduler = make_scheduler()
    add(scheduler, make_sequence([1], max_tokens=1))
    assert plans(scheduler, 2) == [[(0, 1)], []]


def test_a_waiting_sequence_can_be_ended():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, *(make_sequence([1], request_id=i) for i in range(3)))
    step(scheduler)
    [output] = scheduler.end(1, FinishReason.CANCELLED)
    assert (output.request_id, output.tokens, output.finish_reason) == (1, [], "cancelled")
    assert output.scheduled_time == 0.0
    scheduler.check_integrity()
    assert ids(scheduler.waiting) == [2]


def test_a_running_sequence_can_be_ended():
    scheduler = make_scheduler()
    add(scheduler, *(make_sequence(range(9), request_id=i) for i in range(2)))
    step(scheduler)
    [output] = scheduler.end(0, FinishReason.ERROR, "it broke")
    assert (output.request_id, output.finish_reason, output.error) == (0, "error", "it broke")
    scheduler.check_integrity()
    assert ids(scheduler.unfinished()) == [1]
    assert plans(scheduler, 1) == [[(1, 2)]]


def test_ending_twice_or_an_unknown_sequence_does_nothing():
    scheduler = make_scheduler()
    add(scheduler, make_sequence([1]))
    assert len(scheduler.end(0, FinishReason.CANCELLED)) == 1
    assert scheduler.end(0, FinishReason.CANCELLED) == []
    assert scheduler.end(99, FinishReason.CANCELLED) == []


def test_the_time_of_the_first_admission_is_kept_through_preemption():
    scheduler, _, second = preempting()
    admitted = second.scheduled_time
    assert admitted > 0
    plans(scheduler, 4)
    assert second.usage.num_preemptions == 1
    assert second.status is SequenceStatus.RUNNING
    assert second.scheduled_time == admitted


# -- loops --


@pytest.mark.parametrize(
    ("tokens", "fields", "found"),
    [
        ([7, 7, 7], dict(max_pattern_size=1, min_count=3), True),
        ([7, 7], dict(max_pattern_size=1, min_count=3), False),
        ([7, 7, 7, 8], dict(max_pattern_size=1, min_count=3), False),
        ([1, 2, 1, 2], dict(max_pattern_size=2), True),
        ([2, 1, 2], dict(max_pattern_size=2), False),
        ([1, 2, 1, 2], dict(max_pattern_size=1), False),
        ([5, 5, 1, 2, 3, 1, 2, 3], dict(max_pattern_size=4), True),
        ([1, 2, 3, 1, 3, 3], dict(max_pattern_size=4, min_pattern_size=2), False),
        ([7, 7, 7, 7], dict(max_pattern_size=4, min_pattern_size=3), False),
        ([7] * 6, dict(max_pattern_size=4, min_pattern_size=3), True),
        ([7, 7, 7], dict(max_pattern_size=0), False),
    ],
)
def test_a_loop_ends_the_answer(tokens, fields, found):
    detection = RepetitionDetection(**fields)
    prompt = [7, 7, 7, 7, 7, 7]  # the prompt does not count
    assert ends_in_loop(prompt + tokens, len(prompt), detection) is found
    sequence = make_sequence(prompt, 50, repetition_detection=detection)
    sequence.token_ids += tokens
    assert sequence.finish_reason() == ("repetition" if found else None)


# -- forks and priorities --


def test_a_fork_starts_with_the_blocks_of_its_leader_s_prompt():
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=8)
    leader = make_sequence(range(10), request_id=0)
    forks = [make_sequence(range(10), request_id=i, fork_of=0) for i in (1, 2)]
    add(scheduler, leader, *forks)
    assert plans(scheduler, 2) == [[(0, 8)], [(0, 2)]]
    assert plans(scheduler, 1) == [[(0, 1), (1, 2), (2, 2)]]
    tables = [s.block_table for s in (leader, *forks)]
    assert [table[:2] for table in tables] == [[0, 1]] * 3
    assert len({table[2] for table in tables}) == 3
    assert [s.num_cached_tokens for s in forks] == [8, 8]


def test_a_fork_of_an_ended_sequence_computes_its_prompt():
    scheduler = make_scheduler(block_size=4)
    add(scheduler, make_sequence(range(8), request_id=0))
    add(scheduler, make_sequence(range(8), request_id=1, fork_of=0))
    scheduler.end(0, FinishReason.CANCELLED)
    scheduler.check_integrity()
    assert plans(scheduler, 1) == [[(1, 8)]]


def test_the_smaller_priority_is_admitted_first():
    scheduler = make_scheduler(max_num_seqs=1)
    for request_id, priority in enumerate([0, 5, -1, 0]):
        sequence = make_sequence(range(3), 1, request_id=request_id, priority=priority)
        add(scheduler, sequence)
    assert plans(scheduler, 4) == [[(2, 3)], [(0, 3)], [(3, 3)], [(1, 3)]]


# -- drafts --

LOOP = (1, 2, 3, 1, 2, 3, 1, 2)  # continues with 3, 1, 2, ...
DRAFTS = SpeculativeConfig(num_speculative_tokens=9, prompt_lookup_min=2)


def lengthen_drafts(sequence, length=4):
    """By default the first draft has three tokens, and later ones grow only if it is accepted."""
    sequence.proposer._length = length


def speculate(scheduler, *token_ids):
    """One step of the only sequence, whose draft begins with these tokens.

    Returns:
        The number of computed tokens, and the output's tokens.
    """
    [scheduled] = batch = scheduler.schedule()
    assert scheduled.draft_token_ids[: len(token_ids)] == token_ids
    sampled = [*token_ids, *[CONTENT] * scheduled.num_samples][: scheduled.num_samples]
    scheduler.advance(batch)
    [output] = scheduler.update(batch, [SampledToken(token_id, None) for token_id in sampled])
    scheduler.check_integrity()
    return scheduled.num_new_tokens, [token.token_id for token in output.tokens]


def start_loop(max_tokens=50, prompt=LOOP, **options):
    """A scheduler and a sequence whose first output token is 3, as the loop predicts."""
    scheduler = make_scheduler(speculative_config=DRAFTS, **options)
    sequence = make_sequence(prompt, max_tokens, speculative=True)
    add(scheduler, sequence)
    lengthen_drafts(sequence)
    step(scheduler, 3)
    return scheduler, sequence


def test_a_draft_is_accepted_up_to_the_first_token_that_is_not_sampled():
    scheduler, sequence = start_loop()
    assert speculate(scheduler, 1, 2, 3, 1) == (5, [1, 2, 3, 1, CONTENT])
    assert sequence.num_computed_tokens == sequence.num_tokens - 1 == 13
    assert (scheduler.drafts.num_tokens, scheduler.drafts.num_accepted_tokens) == (4, 4)

    scheduler, sequence = start_loop()
    assert speculate(scheduler, 1, 2) == (5, [1, 2, CONTENT])
    assert sequence.token_ids == [*LOOP, 3, 1, 2, CONTENT]
    assert sequence.num_computed_tokens == sequence.num_tokens - 1 == 11
    assert (scheduler.drafts.num_tokens, scheduler.drafts.num_accepted_tokens) == (4, 2)

    scheduler, sequence = start_loop()
    assert speculate(scheduler) == (5, [CONTENT])
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (10, 9)


def test_tokens_after_the_end_of_the_answer_are_dropped():
    for fields, reason, kept in (
        (dict(stop_token_ids=frozenset([2])), FinishReason.STOP, [1, 2]),
        (
            dict(repetition_detection=RepetitionDetection(max_pattern_size=3, min_count=2)),
            FinishReason.REPETITION,
            [1, 2, 3, 1, 2],
        ),
    ):
        scheduler = make_scheduler(speculative_config=DRAFTS)
        sequence = make_sequence(LOOP, 50, speculative=True, **fields)
        add(scheduler, sequence)
        lengthen_drafts(sequence, 8)
        step(scheduler, 3)
        [scheduled] = batch = scheduler.schedule()
        scheduler.advance(batch)
        sampled = [SampledToken(t, None) for t in (*scheduled.draft_token_ids, CONTENT)]
        [output] = scheduler.update(batch, sampled)
        assert [token.token_id for token in output.tokens] == kept
        assert output.finish_reason == reason
        assert sequence.status is SequenceStatus.FINISHED
        assert scheduler.block_manager.num_used_blocks == 0


@pytest.mark.parametrize("max_tokens", range(2, 8))
def test_no_draft_goes_beyond_max_tokens(max_tokens):
    scheduler, sequence = start_loop(max_tokens)
    [scheduled] = batch = scheduler.schedule()
    assert scheduled.num_samples == min(5, max_tokens - 1)
    assert scheduled.end <= sequence.request.max_kv_tokens
    scheduler.advance(batch)
    sampled = [SampledToken(t, None) for t in (*scheduled.draft_token_ids, CONTENT)]
    [output] = scheduler.update(batch, sampled)
    assert (output.finish_reason == FinishReason.LENGTH) == (max_tokens <= 6)


def test_a_rejected_draft_gives_its_blocks_back():
    scheduler, sequence = start_loop(prompt=[1, 2, *LOOP[2:]])
    assert len(sequence.block_table) == 2
    batch = scheduler.schedule()
    assert len(sequence.block_table) == 4  # for 13 tokens
    scheduler.advance(batch)
    scheduler.update(batch, [SampledToken(CONTENT, None)] * 5)
    assert len(sequence.block_table) == 3
    assert scheduler.block_manager.num_used_blocks == 3


def test_there_is_no_draft_without_a_free_block():
    scheduler, sequence = start_loop(num_blocks=4)  # the draft would take all of them
    other = make_sequence(range(2), request_id=1)
    add(scheduler, other)
    assert step(scheduler, CONTENT) == ([(0, 1), (1, 2)], [ANY, ANY])
    assert (len(sequence.block_table), len(other.block_table)) == (3, 1)
    assert scheduler.admitter.num_preemptions == scheduler.drafts.num_tokens == 0


def test_no_block_with_rejected_tokens_is_published():
    scheduler, sequence = start_loop(prefix_cache=True)
    manager = scheduler.block_manager
    assert manager.num_cached_blocks == 2
    speculate(scheduler, 1, 2)  # 11 of 13 tokens are right
    assert manager.num_cached_blocks == sequence.num_published_blocks == 2
    speculate(scheduler)
    assert manager.num_cached_blocks == sequence.num_published_blocks == 3
    again = make_sequence([*LOOP, 3, 1, 2, CONTENT, 9], request_id=1)
    assert manager.get_computed_blocks(again) == sequence.block_table[:3]


def test_drafts_use_the_budget_that_prompts_leave():
    for num_prompt_tokens, planned in (
        (9, [(0, 5), (1, 9)]),
        (13, [(0, 3), (1, 13)]),
        (15, [(0, 1), (1, 15)]),
        (20, [(0, 1), (1, 15)]),
    ):
        scheduler, _ = start_loop(max_num_batched_tokens=16)
        add(scheduler, make_sequence(range(num_prompt_tokens), request_id=1))
        assert step(scheduler)[0] == planned


def test_drafts_of_several_sequences_share_the_rest_of_the_budget():
    scheduler = make_scheduler(speculative_config=DRAFTS, max_num_batched_tokens=10)
    for request_id in range(2):
        sequence = make_sequence([3, 1, 2, 3, 1], 50, request_id, speculative=True)
        add(scheduler, sequence)
        lengthen_drafts(sequence, 6)
    assert step(scheduler, 2)[0] == [(0, 5), (1, 5)]
    assert step(scheduler)[0] == [(0, 7), (1, 3)]


def test_a_chunk_of_one_token_has_no_draft():
    scheduler = make_scheduler(speculative_config=DRAFTS)
    sequence = make_sequence(LOOP, 50, speculative=True)
    add(scheduler, sequence)
    batch = [ScheduledSequence.of(sequence, 1)]
    scheduler.drafts.add_to(batch, 9, num_running=1)
    assert batch == [ScheduledSequence.of(sequence, 1)]


class AnyText:
    """A grammar that accepts every token, and its state."""

    is_complete = False

    def start(self):
        return self

    def accept(self, token_id):
        return True


@pytest.mark.parametrize(
    "fields",
    [
        {"speculative": False},
        {"grammar": AnyText()},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"bad_words": ((5, 6),)},
        {"min_tokens": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_request_whose_sampling_depends_on_its_history_has_no_drafts(fields):
    scheduler = make_scheduler(speculative_config=DRAFTS)
    add(scheduler, make_sequence(LOOP, 50, **{"speculative": True, **fields}))
    assert [step(scheduler, token_id)[0] for token_id in (3, 1, 2)] == [
        [(0, 8)],
        [(0, 1)],
        [(0, 1)],
    ]
    [scheduled] = scheduler.schedule()
    assert bool(scheduled.draft_token_ids) is ("min_tokens" in fields)


def test_a_large_batch_has_no_drafts():
    config = SpeculativeConfig(
        num_speculative_tokens=2, prompt_lookup_min=2, disable_by_batch_size=2
    )
    scheduler = make_scheduler(speculative_config=config)
    for request_id, max_tokens in enumerate((9, 9, 3)):
        add(scheduler, make_sequence([3, 1, 2], max_tokens, request_id, speculative=True))
    assert [step(scheduler, token_id)[0] for token_id in (3, 1, 2)] == [
        [(0, 3), (1, 3), (2, 3)],
        *[[(0, 1), (1, 1), (2, 1)]] * 2,
    ]
    assert step(scheduler, 3)[0] == [(0, 3), (1, 3)]


def test_the_next_step_waits_for_tokens_that_a_draft_may_follow():
    scheduler, sequence = start_loop()
    assert scheduler.waits_for(scheduler.schedule())
    sequence.proposer.observe(sequence.num_tokens, 0)  # a pause
    batch = [ScheduledSequence.of(sequence, 1)]
    scheduler.advance(batch)
    assert sequence.num_tokens == 10
    assert scheduler.waits_for(batch)  # the pause ends with this step
    sequence.proposer.observe(sequence.num_tokens, 0)
    assert not scheduler.waits_for(batch)
