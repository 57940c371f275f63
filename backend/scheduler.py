"""Which sequences run in the next step, and with how many tokens each. Pure bookkeeping."""

import time
from bisect import insort
from itertools import count, islice, zip_longest
from typing import NamedTuple

from backend.block_manager import BlockManager
from backend.sequence import (
    EngineOutput,
    Figures,
    FinishReason,
    SampledToken,
    Sequence,
    SequenceStatus,
)
from backend.speculative import NgramProposer, SpeculativeConfig


class ScheduledSequence(NamedTuple):
    """A sequence's part of a step, fixed when the step is scheduled."""

    sequence: Sequence
    start: int  # the step computes tokens [start, end)
    end: int
    samples: bool  # whether that reaches the sequence's last token, and so yields the next one
    draft_token_ids: tuple[int, ...] = ()  # the last of them, behind the sequence's own

    @property
    def num_new_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_samples(self) -> int:
        """Tokens that the step yields: the one behind the sequence's last, and behind each
        draft token the one that would follow, were it right."""
        return 1 + len(self.draft_token_ids) if self.samples else 0

    def with_draft(self, draft_token_ids: list[int]) -> "ScheduledSequence":
        end = self.end + len(draft_token_ids)
        return self._replace(end=end, draft_token_ids=tuple(draft_token_ids))

    @classmethod
    def of(cls, sequence: Sequence, num_new_tokens: int) -> "ScheduledSequence":
        """The next tokens of a sequence."""
        start = sequence.num_computed_tokens
        end = start + num_new_tokens
        return cls(sequence, start, end, end == sequence.num_tokens)


class Scheduler:
    """Continuous batching under one token budget, without phases.

    Each sequence has `num_tokens` and `num_computed_tokens`, and a step lets the second catch up
    with the first. Running sequences come first, so a long prompt can't stall them: it is computed
    in chunks of what the budget leaves. Then waiting sequences fill the places that are free.

    Only the last running sequence can have more than one token to compute: whoever does not get
    all of its tokens has used up the budget, and nobody is admitted behind it. What is left of the
    budget and of the free blocks then may go to draft tokens.

    Args:
        block_manager: Gives and takes the KV cache's blocks.
        max_num_seqs: Sequences that run at once.
        max_num_batched_tokens: Tokens that a step computes, at least `max_num_seqs`.
        speculative: How drafts are made; None: there are none.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.speculative = speculative
        self.waiting: list[Sequence] = []  # by priority, then arrival
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_draft_tokens = 0  # that were verified
        self.num_accepted_tokens = 0  # of them
        self._sequences: dict[int, Sequence] = {}  # all unfinished ones
        self._arrivals = count()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; one that forks another waits until that one's prompt is computed."""
        self._sequences[sequence.request_id] = sequence
        sequence.arrival = next(self._arrivals)
        request = sequence.request
        if self.speculative and request.speculative and not request.needs_history:
            sequence.proposer = NgramProposer(self.speculative)
        fork_of = sequence.request.fork_of
        leader = None if fork_of is None else self._sequences.get(fork_of)
        sequence.leader = leader
        if leader and leader.num_computed_tokens < leader.num_prompt_tokens:
            leader.forks.append(sequence)
        else:
            self._enqueue(sequence)

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the next step's sequences and give them the blocks they need.

        Those with one new token stand first, as attention wants them.
        """
        batch: list[ScheduledSequence] = []
        budget = self.max_num_batched_tokens

        # Whoever lacks a block takes it from the latest one running, in the end from itself.
        num_preemptions = self.num_preemptions
        i = 0
        while i < len(self.running) and budget:
            sequence = self.running[i]
            i += 1
            num_new = min(sequence.num_tokens_to_compute, budget)
            if not num_new:
                continue
            while not self.block_manager.allocate(sequence, num_new):
                victim = self._preempt_last()
                if victim is sequence:
                    break
            else:
                batch.append(ScheduledSequence.of(sequence, num_new))
                budget -= num_new

        if self.num_preemptions == num_preemptions:  # else there are no blocks to spare
            self._admit(batch, budget)
            if self.speculative:
                self._add_drafts(batch)
        batch.sort(key=lambda scheduled: scheduled.num_new_tokens > 1)  # decodes first
        return batch

    def advance(self, batch: list[ScheduledSequence]) -> None:
        """Note that a step has been launched: its tokens count as computed from here on, and the
        next one of each sequence that samples is there, though nobody knows it yet."""
        for sequence, _, end, samples, _ in batch:
            sequence.num_computed_tokens = end
            sequence.num_pending_tokens += samples

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
            s.sequence.request.needs_history or s.draft_token_ids or self._may_draft(s.sequence)
            for s in batch
        )

    def unfinished(self) -> list[Sequence]:
        return list(self._sequences.values())

    def unfinished_ids(self) -> list[int]:
        return list(self._sequences)

    def ids_in_step(self) -> list[int]:
        """Whom a failing step takes with it: running, or preempted with a token it had pending."""
        return [
            request_id
            for request_id, sequence in self._sequences.items()
            if sequence.status is SequenceStatus.RUNNING or sequence.num_pending_tokens
        ]

    def check_integrity(self) -> None:
        """Assert that queues, states and blocks agree; true between steps."""
        assert len(self.running) <= self.max_num_seqs
        assert all(s.status is SequenceStatus.RUNNING for s in self.running)
        assert all(s.status is SequenceStatus.WAITING for s in self.waiting)
        assert all(not s.block_table and not s.num_computed_tokens for s in self.waiting)
        assert all(s.num_computed_tokens < s.num_tokens for s in self.running)
        behind = [s.num_tokens - s.num_computed_tokens > 1 for s in self.running]
        assert not any(behind[:-1])
        assert self.waiting == sorted(self.waiting, key=_queue_order)
        queued = [*self.running, *self.waiting]
        queued += [fork for s in queued for fork in s.forks]
        unfinished = {s.request_id: s for s in queued}
        assert len(unfinished) == len(queued)
        assert unfinished == self._sequences
        self.block_manager.check_integrity(self._sequences.values())

    def _admit(self, batch: list[ScheduledSequence], budget: int) -> None:
        """Fill free places from the head of the queue."""
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            computed = self._computed_blocks(sequence)
            if not self.block_manager.can_admit(sequence, computed):
                break
            del self.waiting[0]
            self.block_manager.touch(sequence, computed)
            num_new = min(sequence.num_tokens_to_compute, budget)
            allocated = self.block_manager.allocate(sequence, num_new)
            assert allocated, "can_admit() promised more blocks than there are"
            if not sequence.scheduled_time:
                sequence.scheduled_time = time.perf_counter()
                sequence.num_cached_tokens = sequence.num_computed_tokens
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            batch.append(ScheduledSequence.of(sequence, num_new))
            budget -= num_new

    def _add_drafts(self, batch: list[ScheduledSequence]) -> None:
        """Let sequences compute what may follow, too, with budget and blocks that are left over.

        Prompts need no drafts, and where steps overlap one can't follow on an unknown token.
        """
        budget = self.max_num_batched_tokens - sum(s.num_new_tokens for s in batch)
        for i, scheduled in enumerate(batch):
            sequence, request = scheduled.sequence, scheduled.sequence.request
            if scheduled.num_new_tokens > 1 or sequence.num_pending_tokens:
                continue
            if not sequence.proposer or not self._may_draft(sequence):
                continue
            # Behind the draft comes one token more, of which nothing is computed.
            limit = min(budget, request.max_tokens - sequence.num_output_tokens - 1)
            draft = sequence.proposer.propose(sequence.token_ids, limit)
            if draft and self.block_manager.allocate(sequence, 1 + len(draft)):
                batch[i] = scheduled.with_draft(draft)
                budget -= len(draft)

    def _may_draft(self, sequence: Sequence) -> bool:
        """Whether the next step may try a draft of the sequence, as far as is known now."""
        return bool(
            self.speculative
            and len(self.running) <= self.speculative.disable_by_batch_size
            and sequence.proposer
            and not sequence.proposer.is_paused(sequence.num_tokens)
            and sequence.num_output_tokens >= sequence.request.min_tokens
        )

    def _note_computed(self, scheduled: ScheduledSequence, num_dropped: int) -> None:
        """Publish what a step has computed, and forget what it has of drafts that were wrong.

        Args:
            num_dropped: Of the tokens that it yielded, the last ones::

                |<-------------- end --------------->|
                |<----- computed ----->|<- dropped ->|
        """
        sequence, _, end, _, draft_token_ids = scheduled
        num_computed = end - num_dropped
        if sequence.status is SequenceStatus.RUNNING:
            self.block_manager.cache_full_blocks(sequence, num_computed)
        if not draft_token_ids or not sequence.proposer:
            return
        num_accepted = len(draft_token_ids) - num_dropped
        self.num_draft_tokens += len(draft_token_ids)
        self.num_accepted_tokens += num_accepted
        sequence.proposer.observe(sequence.num_tokens, num_accepted)
        sequence.num_computed_tokens = num_computed
        self.block_manager.trim(sequence, num_computed)

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
        insort(self.waiting, sequence, key=_queue_order)

    def _release_forks(self, sequence: Sequence) -> None:
        for fork in sequence.forks:
            self._enqueue(fork)
        sequence.forks.clear()

    def _preempt_last(self) -> Sequence:
        """Send the latest running sequence back to its place in the queue, to be recomputed."""
        victim = self.running.pop()
        victim.num_lost_tokens = max(victim.num_lost_tokens, victim.num_computed_tokens)
        self.block_manager.free(victim)
        victim.status = SequenceStatus.WAITING
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(victim)
        return victim

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


def _queue_order(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.arrival


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
        scheduled_time=sequence.scheduled_time,
        prompt_logprobs=sequence.prompt_logprobs,
        figures=sequence.figures if reason else Figures(),
    )
