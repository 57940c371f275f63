"""Which sequences run in the next step, and with how many tokens each. Pure bookkeeping."""

import time
from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import count, islice, takewhile, zip_longest
from typing import NamedTuple

from tritium.backend.config import SpeculativeConfig
from tritium.backend.engine.block_manager import BlockManager
from tritium.backend.engine.deadlines import Deadlines
from tritium.backend.engine.drafts import Drafts
from tritium.backend.engine.request import (
    EngineOutput,
    Figures,
    FinishReason,
    RequestClass,
    SampledToken,
)
from tritium.backend.engine.sequence import ScheduledSequence, Sequence, SequenceStatus
from tritium.backend.engine.waiting_queue import WaitingQueue

# So many steps after one found no memory, the next ones may be twice as large.
_STEPS_UNTIL_GROWTH = 100


class Policy(NamedTuple):
    """Who goes first, and who gives way how often."""

    max_preemptions: int = 3  # of one sequence; then it runs only with all its blocks promised
    reserve_blocks_per_seq: int = 0  # that admission leaves free for each that runs
    max_bypasses: int = 16  # of one that lacks blocks, by later ones that don't
    ageing_seconds: float = 30.0  # after which who waits may be promoted


class Scheduler:
    """Continuous batching under one token budget, without phases.

    Each sequence has `num_tokens` and `num_computed_tokens`, and a step lets the second catch up
    with the first. Classes come one after the other, in each those that run before those that
    wait; but each leaves a token of the budget for everyone who runs behind it. So a long prompt
    can't stall the others: it is computed in chunks of what the budget leaves.

    Only the last one of a class that runs can have more than one token to compute: whoever does not
    get all of its tokens has used up the budget, and nobody is admitted behind it. What is left of
    the budget and of the free blocks then may go to draft tokens.

    Who lacks a block takes it from the latest one of the lowest class; who waits takes only from
    lower classes. Nobody is held up for ever:

    - A sequence is preempted at most `max_preemptions` times; then it runs only with all the blocks
      promised that it can need.
    - Whoever has waited for `ageing_seconds` is promoted to the front of the first class, the one
      that has waited longest first, as long as at most an eighth of the places is for such ones.
    - One that does not fit is bypassed at most `max_bypasses` times; then the others wait with it.

    Args:
        block_manager: Gives and takes the KV cache's blocks.
        max_num_seqs: Sequences that run at once.
        max_num_batched_tokens: Tokens that a step computes, at least `max_num_seqs`.
        speculative: How drafts are made; None: there are none.
        policy: The bounds above; None: the defaults.
        clock: Seconds; `Deadline.time` is by it.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        speculative: SpeculativeConfig | None = None,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.token_budget = max_num_batched_tokens  # less for a while where memory was short
        self.policy = policy or Policy()
        self.drafts = Drafts(speculative, block_manager)
        self.deadlines = Deadlines()
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # by class, then admission
        self.newly_admitted: list[Sequence] = []  # for the first time, in the last step
        self.num_preemptions = 0
        self._sequences: dict[int, Sequence] = {}  # all unfinished ones
        self._arrivals = count()
        self._admissions = count()
        self._num_skipped = 0  # at the head of the queue, as they don't fit into this step
        self._clock = clock
        self._steps_until_growth = 0
        self._admitted: list[Sequence] = []  # with the last step that was scheduled
        self._prefilling: list[Sequence] = []  # run, and have blocks of a prompt to publish

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; one that forks another waits until that one's prompt is computed."""
        self._sequences[sequence.request_id] = sequence
        sequence.arrival = next(self._arrivals)
        self.deadlines.add(sequence)
        self.drafts.add_proposer(sequence)
        fork_of = sequence.request.fork_of
        leader = None if fork_of is None else self._sequences.get(fork_of)
        sequence.leader = leader
        if leader and leader.num_computed_tokens < leader.num_prompt_tokens:
            leader.forks.append(sequence)
        else:
            self._enqueue(sequence)

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def expire(self) -> list[EngineOutput]:
        """End those that have missed a deadline, before a step is spent on them."""
        outputs = []
        for sequence, deadline in self.deadlines.missed(self._clock(), self._sequences):
            outputs += self.end(sequence.request_id, FinishReason.EXPIRED, deadline.error)
        return outputs

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the next step's sequences and give them the blocks they need.

        Those with one new token stand first, as attention wants them.
        """
        batch: list[ScheduledSequence] = []
        budget = self.token_budget
        self.newly_admitted.clear()
        self._num_skipped = 0
        self._promote()
        self._admitted.clear()
        self._prefilling = [s for s in self._prefilling if self._has_to_publish(s)]

        i = 0
        num_preemptions = self.num_preemptions
        for request_class in RequestClass:
            # Whoever lacks a block takes it from the latest one running, in the end from itself.
            while i < len(self.running) and self.running[i].rank is request_class:
                sequence = self.running[i]
                i += 1
                behind = len(self.running) - i
                num_new = min(sequence.num_tokens_to_compute, budget, max(budget - behind, 1))
                if not num_new:
                    continue
                while not self.block_manager.allocate(sequence, num_new):
                    victim = self._victims()[0]
                    self._preempt(victim)
                    if victim is sequence:
                        i -= 1
                        break
                else:
                    batch.append(ScheduledSequence.of(sequence, num_new))
                    budget -= num_new

            if self.num_preemptions > num_preemptions:
                continue  # there are no blocks to spare
            while budget > len(self.running) - i and (admitted := self._admit(request_class)):
                i += 1
                num_new = min(admitted.num_tokens_to_compute, budget - (len(self.running) - i))
                allocated = self.block_manager.allocate(admitted, num_new)
                assert allocated, "_admit() promised more blocks than there are"
                batch.append(ScheduledSequence.of(admitted, num_new))
                budget -= num_new

        if self.num_preemptions == num_preemptions:
            self.drafts.add_to(batch, budget, len(self.running))
        batch.sort(key=lambda scheduled: scheduled.num_new_tokens > 1)  # decodes first
        return batch

    def advance(self, batch: list[ScheduledSequence]) -> None:
        """Note that a step has been launched: its tokens count as computed from here on, and the
        next one of each sequence that samples is there, though nobody knows it yet."""
        for sequence, _, end, samples, _ in batch:
            sequence.num_computed_tokens = end
            sequence.num_pending_tokens += samples
        if self.token_budget < self.max_num_batched_tokens:
            self._steps_until_growth -= 1
            if not self._steps_until_growth:
                self._set_budget(min(2 * self.token_budget, self.max_num_batched_tokens))

    def retreat(self, batch: list[ScheduledSequence]) -> bool:
        """Undo a step that was scheduled and found no memory; those to come are half as large.

        They grow again step by step. False where it can't be smaller, and nothing is changed.
        """
        num_tokens = sum(scheduled.num_new_tokens for scheduled in batch)
        if num_tokens == 1:
            return False
        self._set_budget(num_tokens // 2)
        for scheduled in batch:
            self.block_manager.trim(scheduled.sequence, scheduled.start)
        for sequence in self._admitted:
            if sequence.status is SequenceStatus.RUNNING:
                self.running.remove(sequence)
                self.block_manager.free(sequence)
                sequence.status = SequenceStatus.WAITING
                self._enqueue(sequence)
        return True

    def update(
        self, batch: list[ScheduledSequence], sampled: list[SampledToken]
    ) -> list[EngineOutput]:
        """Take in what a step has computed; `sampled` has the `num_samples` tokens of each.

        Meanwhile a sequence may have been preempted, which leaves it the token, or have ended.
        """
        outputs = []
        in_order = iter(sampled)
        for scheduled in batch:
            sequence = scheduled.sequence
            tokens = list(islice(in_order, scheduled.num_samples))
            if sequence.status is SequenceStatus.FINISHED:
                continue
            sequence.num_pending_tokens -= scheduled.samples
            taken, reason = _take(scheduled, tokens)
            self._note_computed(scheduled, num_dropped=len(tokens) - len(taken))
            if not taken:
                continue
            self._release_forks(sequence)
            if reason is FinishReason.INVALID and sequence.grammar:
                outputs += self.end(sequence.request_id, reason, sequence.grammar.error)
                continue
            if reason:
                self._finish(sequence)
            outputs.append(_output(sequence, taken, reason))
        return outputs

    def end(self, request_id: int, reason: FinishReason, error: str = "") -> list[EngineOutput]:
        """End a sequence, waiting or running; [] when it is not there (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return []
        self._finish(sequence)
        return [_output(sequence, [], reason, error)]

    def waits_for(self, batch: list[ScheduledSequence]) -> bool:
        """Whether the next step needs to know the tokens that this one yields."""
        return any(
            s.sequence.request.needs_history
            or s.draft_token_ids
            or self.drafts.may_follow(s.sequence, len(self.running))
            for s in batch
        )

    def unfinished(self) -> list[Sequence]:
        return list(self._sequences.values())

    def unfinished_ids(self) -> list[int]:
        return list(self._sequences)

    def check_integrity(self) -> None:
        """Assert that queues, states and blocks agree; true between steps."""
        assert len(self.running) <= self.max_num_seqs
        assert all(s.status is SequenceStatus.RUNNING for s in self.running)
        assert all(s.status is SequenceStatus.WAITING for s in self.waiting)
        assert all(not s.block_table and not s.num_computed_tokens for s in self.waiting)
        assert all(s.num_computed_tokens < s.num_tokens for s in self.running)
        assert self.running == sorted(self.running, key=_running_order)
        for request_class in RequestClass:
            running = [s for s in self.running if s.rank is request_class]
            assert all(s.num_tokens - s.num_computed_tokens <= 1 for s in running[:-1])
        assert all(bool(s.num_promised_blocks) is self._is_protected(s) for s in self.running)
        assert all(
            s.num_preemptions <= self.policy.max_preemptions for s in self._sequences.values()
        )
        assert all(s.num_bypasses <= self.policy.max_bypasses for s in self.waiting)
        self.waiting.check_integrity()
        queued = [*self.running, *self.waiting]
        queued += [fork for s in queued for fork in s.forks]
        unfinished = {s.request_id: s for s in queued}
        assert len(unfinished) == len(queued)
        assert unfinished == self._sequences
        self.block_manager.check_integrity(self._sequences.values())

    def _admit(self, request_class: RequestClass) -> Sequence | None:
        """Let the first one of a class that fits run. None: there is none, or it may not go before
        those that don't fit."""
        victims = self._victims(below=request_class)
        if len(self.running) >= self.max_num_seqs and not victims:
            return None
        bypassed = islice(self.waiting, self._num_skipped)
        if any(s.num_bypasses >= self.policy.max_bypasses for s in bypassed):
            return None
        while self._num_skipped < len(self.waiting):
            sequence = self.waiting[self._num_skipped]
            if sequence.rank is not request_class:
                return None
            computed = self._computed_blocks(sequence)
            if not self._is_computed_soon(sequence, len(computed)) and self._make_room(
                sequence, computed, victims
            ):
                for skipped in islice(self.waiting, self._num_skipped):
                    skipped.num_bypasses += 1
                self._start(sequence, computed)
                return sequence
            if max(self._num_skipped, sequence.num_bypasses) >= self.policy.max_bypasses:
                return None
            self._num_skipped += 1
        return None

    def _is_computed_soon(self, sequence: Sequence, index: int) -> bool:
        """Whether one that runs and does not give way to this one computes the block that is the
        first one missing here. Then it is better to wait for it than to compute it twice."""
        manager = self.block_manager
        if not manager.reuses(sequence) or sequence.request.num_prompt_logprobs is not None:
            return False
        if index >= (sequence.num_tokens - 1) // manager.block_size:
            return False
        return any(
            self._has_to_publish(other)
            and other.rank <= sequence.rank
            and other.num_published_blocks <= index < manager.num_prompt_blocks(other)
            and manager.shares_block(sequence, other, index)
            for other in self._prefilling
        )

    def _has_to_publish(self, sequence: Sequence) -> bool:
        manager = self.block_manager
        return (
            sequence.status is SequenceStatus.RUNNING
            and manager.reuses(sequence)
            and sequence.num_published_blocks < manager.num_prompt_blocks(sequence)
        )

    def _make_room(self, sequence: Sequence, computed: list[int], victims: list[Sequence]) -> bool:
        """Whether a waiting sequence can run, at the expense of the victims if need be."""
        if not self._fits(sequence, computed, without=victims):
            return False
        for victim in victims:
            if self._fits(sequence, computed):
                break
            self._preempt(victim)
        return self._fits(sequence, computed)

    def _fits(self, sequence: Sequence, computed: list[int], without: Seq[Sequence] = ()) -> bool:
        """Whether there is a place and blocks for a waiting sequence, were some not running."""
        manager, request = self.block_manager, sequence.request
        num_running = len(self.running) - len(without)
        num_growing = num_running - manager.num_promises
        reserve = num_growing * self.policy.reserve_blocks_per_seq
        wanted = request.max_kv_tokens if self._is_protected(sequence) else sequence.num_tokens
        free = manager.num_available_blocks + manager.num_exclusive_blocks(without)
        missing = manager.num_missing_blocks(computed, wanted)
        return num_running < self.max_num_seqs and missing + reserve <= free

    def _start(self, sequence: Sequence, computed: list[int]) -> None:
        self.waiting.remove(sequence)
        self.block_manager.touch(sequence, computed)
        if self._is_protected(sequence):
            self.block_manager.promise(sequence, sequence.request.max_kv_tokens)
        if not sequence.scheduled_time:
            sequence.scheduled_time = self._clock()
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.newly_admitted.append(sequence)
        sequence.status = SequenceStatus.RUNNING
        sequence.admission = next(self._admissions)
        sequence.num_bypasses = 0
        insort(self.running, sequence, key=_running_order)
        self._admitted.append(sequence)
        self._prefilling.append(sequence)

    def _is_protected(self, sequence: Sequence) -> bool:
        """Whether it was preempted so often that it runs only with all its blocks promised."""
        return sequence.num_preemptions >= self.policy.max_preemptions

    def _promote(self) -> None:
        """Let who has waited longest go first, if that is long and it leaves enough to others."""
        longest = self.waiting.longest()
        if not longest or self._clock() - longest.queued_time < self.policy.ageing_seconds:
            return
        promoted = takewhile(lambda s: s.is_promoted, self.waiting)
        num_promoted = sum(1 for _ in promoted) + sum(s.is_promoted for s in self.running)
        if num_promoted < max(self.max_num_seqs // 8, 1):
            self.waiting.promote(longest)

    def _note_computed(self, scheduled: ScheduledSequence, num_dropped: int) -> None:
        """Publish what a step has computed, and forget what it has of drafts that were wrong.

        Args:
            num_dropped: Of the tokens that it yielded, the last ones::

                |<-------------- end --------------->|
                |<----- computed ----->|<- dropped ->|
        """
        sequence = scheduled.sequence
        num_computed = scheduled.end - num_dropped
        if sequence.status is SequenceStatus.RUNNING:
            self.block_manager.cache_full_blocks(sequence, num_computed)
        self.drafts.take_back(scheduled, num_dropped, num_computed)

    def _computed_blocks(self, sequence: Sequence) -> list[int]:
        """What a sequence can start with: of its leader, where that is more than others left."""
        if sequence.request.num_prompt_logprobs is not None:
            return []  # they come from computing the prompt
        computed = self.block_manager.get_computed_blocks(sequence)
        leader = sequence.leader
        if leader and leader.status is SequenceStatus.RUNNING:
            # The last prompt token is left to compute, since its logits are wanted.
            num_shared = min(leader.num_computed_tokens, sequence.num_prompt_tokens - 1)
            num_blocks = num_shared // self.block_manager.block_size
            if num_blocks > len(computed):
                return leader.block_table[:num_blocks]
        return computed

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.queued_time = self._clock()
        self.waiting.add(sequence)

    def _set_budget(self, num_tokens: int) -> None:
        self.token_budget = num_tokens
        self._steps_until_growth = _STEPS_UNTIL_GROWTH

    def _release_forks(self, sequence: Sequence) -> None:
        for fork in sequence.forks:
            self._enqueue(fork)
        sequence.forks.clear()

    def _victims(self, below: int = -1) -> list[Sequence]:
        """Who may be preempted, the latest of the lowest class first, down to a class."""
        lower = takewhile(lambda s: s.rank > below, reversed(self.running))
        return [s for s in lower if not self._is_protected(s)]

    def _preempt(self, victim: Sequence) -> None:
        """Send a running sequence back to its place in the queue, to be recomputed."""
        self.running.remove(victim)
        victim.num_lost_tokens = max(victim.num_lost_tokens, victim.num_computed_tokens)
        self.block_manager.free(victim)
        victim.status = SequenceStatus.WAITING
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(victim)

    def _finish(self, sequence: Sequence) -> None:
        leader = sequence.leader
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif leader and sequence in leader.forks:
            leader.forks.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release_forks(sequence)
        self.block_manager.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.request_id]


def _running_order(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank, sequence.admission


def _take(
    scheduled: ScheduledSequence, sampled: list[SampledToken]
) -> tuple[list[SampledToken], FinishReason | None]:
    """Append what was sampled to its sequence, up to the first token that ends the answer or is
    not the draft's: what the step computed behind that one followed on another.

    So each token is what would have been sampled without a draft, from the same logits and the
    same random number; nothing has to be sampled again, as for drafts that are distributions
    (Leviathan et al., 2023).

    Returns:
        The tokens that were appended, and why the answer ends.
    """
    sequence = scheduled.sequence
    taken: list[SampledToken] = []
    for token, draft in zip_longest(sampled, scheduled.draft_token_ids):
        taken.append(token)
        sequence.token_ids.append(token.token_id)
        if sequence.grammar and not sequence.grammar.accept(token.token_id):
            return taken, FinishReason.INVALID
        reason = sequence.finish_reason()
        if reason or token.token_id != draft:
            return taken, reason
    return taken, None


def _output(
    sequence: Sequence, tokens: list[SampledToken], reason: FinishReason | None, error: str = ""
) -> EngineOutput:
    return EngineOutput(
        request_id=sequence.request_id,
        tokens=tokens,
        finish_reason=reason,
        is_whole=(
            reason is FinishReason.STOP
            and sequence.token_ids[-1] not in sequence.request.stop_token_ids
        ),
        error=error,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        scheduled_time=sequence.scheduled_time,
        prompt_logprobs=sequence.prompt_logprobs,
        figures=sequence.figures if reason else Figures(),
    )
