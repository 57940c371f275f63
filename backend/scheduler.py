"""Which sequences run in the next step, and with how many tokens each. Pure bookkeeping."""

import time
from collections import deque
from typing import NamedTuple

from backend.block_manager import BlockManager
from backend.sequence import (
    EngineOutput,
    FinishReason,
    SampledToken,
    Sequence,
    SequenceStatus,
)


class ScheduledSequence(NamedTuple):
    sequence: Sequence
    num_new_tokens: int  # the step computes tokens [num_computed_tokens, + num_new_tokens)

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, and so yields the next one."""
        sequence = self.sequence
        return sequence.num_computed_tokens + self.num_new_tokens == sequence.num_tokens


class Scheduler:
    """Continuous batching under one token budget, without phases.

    Each sequence has `num_tokens` and `num_computed_tokens`, and a step lets the second catch up
    with the first. Running sequences come first, so a long prompt can't stall them: it is computed
    in chunks of what the budget leaves. Then waiting sequences fill the places that are free.

    Only the last running sequence can have more than one token to compute: whoever does not get
    all of its tokens has used up the budget, and nobody is admitted behind it.

    Args:
        block_manager: Gives and takes the KV cache's blocks.
        max_num_seqs: Sequences that run at once.
        max_num_batched_tokens: Tokens that a step computes, at least `max_num_seqs`.
    """

    def __init__(
        self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._sequences: dict[int, Sequence] = {}  # all unfinished ones

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the next step's sequences and give them the blocks they need.

        Those with one new token stand first, as attention wants them.
        """
        batch: list[ScheduledSequence] = []
        budget = self.max_num_batched_tokens

        # Whoever lacks a block takes it from the latest one running, in the end from itself.
        while len(batch) < len(self.running) and budget:
            sequence = self.running[len(batch)]
            num_new = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            while not self.block_manager.allocate(sequence, num_new):
                victim = self._preempt_last()
                if victim is sequence:
                    break
            else:
                batch.append(ScheduledSequence(sequence, num_new))
                budget -= num_new

        self._admit(batch, budget)  # where some were preempted, the first of them can't fit yet
        batch.sort(key=lambda scheduled: scheduled.num_new_tokens > 1)  # decodes first
        return batch

    def update(
        self, batch: list[ScheduledSequence], sampled: list[SampledToken]
    ) -> list[EngineOutput]:
        """Take in what a step has computed; `sampled` has a token for each that `samples`."""
        outputs = []
        tokens = iter(sampled)
        for scheduled in batch:
            sequence, num_new = scheduled
            samples = scheduled.samples
            sequence.num_computed_tokens += num_new
            self.block_manager.cache_full_blocks(sequence)
            if not samples:
                continue
            token = next(tokens)
            sequence.token_ids.append(token.token_id)
            reason = sequence.finish_reason()
            if reason:
                self._finish(sequence)
            outputs.append(_output(sequence, [token], reason))
        return outputs

    def end(self, request_id: int, reason: FinishReason, error: str = "") -> list[EngineOutput]:
        """End a sequence, waiting or running; [] when it is not there (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return []
        self._finish(sequence)
        return [_output(sequence, [], reason, error)]

    def unfinished_ids(self) -> list[int]:
        return list(self._sequences)

    def check_integrity(self) -> None:
        """Assert that queues, states and blocks agree; true between steps."""
        assert len(self.running) <= self.max_num_seqs
        assert all(s.status is SequenceStatus.RUNNING for s in self.running)
        assert all(s.status is SequenceStatus.WAITING for s in self.waiting)
        assert all(not s.block_table and not s.num_computed_tokens for s in self.waiting)
        assert all(s.num_computed_tokens < s.num_tokens for s in self.running)
        behind = [s.num_tokens - s.num_computed_tokens > 1 for s in self.running]
        assert not any(behind[:-1])
        unfinished = {s.request_id: s for s in (*self.running, *self.waiting)}
        assert len(unfinished) == len(self.running) + len(self.waiting)
        assert unfinished == self._sequences
        self.block_manager.check_integrity(self._sequences.values())

    def _admit(self, batch: list[ScheduledSequence], budget: int) -> None:
        """Fill free places from the head of the queue."""
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            computed = self.block_manager.get_computed_blocks(sequence)
            if not self.block_manager.can_admit(sequence, computed):
                break
            self.waiting.popleft()
            self.block_manager.touch(sequence, computed)
            num_new = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            allocated = self.block_manager.allocate(sequence, num_new)
            assert allocated, "can_admit() promised more blocks than there are"
            if not sequence.scheduled_time:
                sequence.scheduled_time = time.perf_counter()
                sequence.num_cached_tokens = sequence.num_computed_tokens
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            batch.append(ScheduledSequence(sequence, num_new))
            budget -= num_new

    def _preempt_last(self) -> Sequence:
        """Send the latest running sequence back to the head of the queue, to be recomputed."""
        victim = self.running.pop()
        self.block_manager.free(victim)
        victim.status = SequenceStatus.WAITING
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    def _finish(self, sequence: Sequence) -> None:
        queue = self.running if sequence.status is SequenceStatus.RUNNING else self.waiting
        queue.remove(sequence)
        self.block_manager.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.request_id]


def _output(
    sequence: Sequence, tokens: list[SampledToken], reason: FinishReason | None, error: str = ""
) -> EngineOutput:
    return EngineOutput(
        request_id=sequence.request_id,
        tokens=tokens,
        finish_reason=reason,
        error=error,
        num_cached_tokens=sequence.num_cached_tokens,
        scheduled_time=sequence.scheduled_time,
    )
