"""Which sequences run in the next step, and with how many tokens each. Pure bookkeeping."""

import logging
import time
from collections.abc import Callable
from itertools import count, islice, zip_longest

from tritium.backend.config import EngineConfig
from tritium.backend.engine.admitter import Admitter
from tritium.backend.engine.block_manager import BlockManager
from tritium.backend.engine.deadlines import Deadlines
from tritium.backend.engine.drafts import Drafts
from tritium.backend.engine.request import EngineOutput, FinishReason, RequestClass, SampledToken
from tritium.backend.engine.sequence import ScheduledSequence, Sequence, SequenceStatus
from tritium.backend.errors import is_fatal

logger = logging.getLogger("tritium")

# After a step found no memory, this many steps run before the next ones may be twice as large.
_STEPS_UNTIL_GROWTH = 100


class Scheduler:
    """Continuous batching under one token budget.

    Args:
        config: Limits.
        block_manager: Allocates the KV cache's blocks.
        clock: Seconds; `Deadline.time` is by this clock.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_manager: BlockManager,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.token_budget = config.max_num_batched_tokens  # less for a while after OutOfMemory
        self.admitter = Admitter(config, block_manager, clock)
        self.waiting = self.admitter.waiting
        self.running = self.admitter.running
        self.drafts = Drafts(config.speculative_config, block_manager)
        self.deadlines = Deadlines()
        self._clock = clock
        self._sequences: dict[int, Sequence] = {}  # all unfinished ones, by request id
        self._arrival_indices = count()
        self._steps_until_growth = 0
        self._num_steps = 0
        self.num_prompt_tokens = 0  # of all prompts that were computed; once for several answers
        self.num_output_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. A fork joins the queue when its leader's prompt has been computed."""
        self._sequences[sequence.request_id] = sequence
        sequence.arrival_index = next(self._arrival_indices)
        self.deadlines.add(sequence)
        self.drafts.add_proposer(sequence)
        fork_of = sequence.request.fork_of
        leader = None if fork_of is None else self._sequences.get(fork_of)
        sequence.leader = leader
        if leader and leader.num_computed_tokens < leader.num_prompt_tokens:
            leader.forks.append(sequence)
        else:
            self.admitter.enqueue(sequence)

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def unfinished(self) -> list[Sequence]:
        return list(self._sequences.values())

    def expire(self) -> list[EngineOutput]:
        """End sequences that have missed a deadline, before a step is spent on them."""
        outputs = []
        for sequence, deadline in self.deadlines.missed(self._clock(), self._sequences):
            outputs += self.end(sequence.request_id, FinishReason.EXPIRED, deadline.error)
        return outputs

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the next step's sequences and give them blocks.

        Returns:
            The batch; sequences with one new token come first, as attention requires.
        """
        # There is no prefill phase and no decode phase. Each sequence has `num_tokens` and
        # `num_computed_tokens`, and a step lets the second catch up with the first. That covers
        # prompts, decoding, chunked prompts, cached prefixes, preempted sequences and drafts.
        #
        # The token budget goes to one class after the other; within a class first to running
        # sequences, then to waiting ones. Each sequence leaves one token for every running
        # sequence behind it, so a long prompt can't stall the others: it is computed in chunks of
        # what the budget leaves. In general only the last running sequence of a class has more than
        # one token to compute, since a sequence that does not get all of its tokens has used up the
        # budget, and none is admitted behind it; a failed step that was run apart may leave more.
        #
        # After a step found no memory, the budget may be smaller than the running batch. Then those
        # take turns that have waited longest for a step.
        #
        # A running sequence that lacks a block preempts the latest one of the lowest class, in the
        # end itself. Drafts get what is then left of the budget and of the free blocks.
        batch: list[ScheduledSequence] = []
        budget = self.token_budget
        admitter, running = self.admitter, self.running
        num_preemptions = admitter.num_preemptions
        admitter.start_step()
        left_out = self._left_out()

        i = 0
        for request_class in RequestClass:
            while i < len(running) and running[i].rank is request_class:
                sequence = running[i]
                i += 1
                behind = len(running) - i
                num_new = min(sequence.num_tokens_to_compute, budget, max(budget - behind, 1))
                if not num_new or sequence in left_out:
                    continue
                while not self.block_manager.allocate(sequence, num_new):
                    victim = admitter.victims()[0]
                    admitter.preempt(victim)
                    if victim is sequence:
                        i -= 1
                        break
                else:
                    batch.append(ScheduledSequence.of(sequence, num_new))
                    budget -= num_new

            if admitter.num_preemptions > num_preemptions:
                continue  # there are no blocks to spare
            behind = sum(1 for s in islice(running, i, None) if s.num_tokens_to_compute)
            while budget > behind and (admitted := admitter.admit(request_class)):
                i += 1
                num_new = min(admitted.num_tokens_to_compute, budget - behind)
                allocated = self.block_manager.allocate(admitted, num_new)
                assert allocated, "a sequence was admitted without blocks for it"
                batch.append(ScheduledSequence.of(admitted, num_new))
                budget -= num_new

        if admitter.num_preemptions == num_preemptions:
            self.drafts.add_to(batch, budget, len(running))
        batch.sort(key=lambda scheduled: scheduled.num_new_tokens > 1)
        return batch

    def advance(self, batch: list[ScheduledSequence]) -> None:
        """Note that a step has been launched: from now on its tokens count as computed, and each
        sequence that samples has one more token, which is pending."""
        for sequence, _, end, samples, _ in batch:
            sequence.num_computed_tokens = end
            sequence.num_pending_tokens += samples
            sequence.last_step = self._num_steps
        self._num_steps += 1
        if self.token_budget < self.max_num_batched_tokens:
            self._steps_until_growth -= 1
            if not self._steps_until_growth:
                self._set_budget(min(2 * self.token_budget, self.max_num_batched_tokens))

    def withdraw(self, batch: list[ScheduledSequence]) -> None:
        """Undo `advance()` for a step whose tokens can't be read; then it can be launched again."""
        for sequence, start, _, samples, _ in batch:
            if sequence.status is not SequenceStatus.FINISHED:
                sequence.num_pending_tokens -= samples
            if sequence.status is SequenceStatus.RUNNING:  # else it has lost its blocks
                sequence.num_computed_tokens = min(sequence.num_computed_tokens, start)

    def retreat(self, batch: list[ScheduledSequence]) -> bool:
        """Undo a scheduled step that found no memory; the next ones are half as large.

        They grow again later. False if the step can't be smaller; then nothing is changed.
        """
        num_tokens = sum(scheduled.num_new_tokens for scheduled in batch)
        if num_tokens == 1:
            return False
        self._set_budget(num_tokens // 2)
        for scheduled in batch:
            self.block_manager.trim(scheduled.sequence, scheduled.start)
        self.admitter.undo_admissions()
        return True

    def update(
        self, batch: list[ScheduledSequence], sampled: list[SampledToken]
    ) -> list[EngineOutput]:
        """Process the result of a step; `sampled` has `num_samples` tokens of each sequence.

        A sequence that was preempted meanwhile keeps its tokens; one that has ended is skipped.
        """
        outputs = []
        in_order = iter(sampled)
        for scheduled in batch:
            sequence = scheduled.sequence
            tokens = list(islice(in_order, scheduled.num_samples))
            if sequence.status is SequenceStatus.FINISHED:
                continue
            sequence.num_pending_tokens -= scheduled.samples
            try:
                outputs += self._add(scheduled, tokens)
            except BaseException as error:
                if is_fatal(error):
                    raise
                logger.exception("a sampled token could not be added to its sequence")
                message = f"the engine failed on a token: {str(error) or repr(error):.300}"
                outputs += self.end(sequence.request_id, FinishReason.ERROR, message)
        return outputs

    def end(self, request_id: int, reason: FinishReason, error: str = "") -> list[EngineOutput]:
        """End a sequence, waiting or running; [] if it has ended already or is unknown."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return []
        self._finish(sequence)
        return [_output(sequence, [], reason, error)]

    def waits_for(self, batch: list[ScheduledSequence]) -> bool:
        """Whether the next step can be scheduled only when the tokens of this one are known."""
        return any(
            s.sequence.request.needs_history
            or s.draft_token_ids
            or self.drafts.may_follow(s.sequence, len(self.running))
            for s in batch
        )

    def check_integrity(self) -> None:
        """Assert that queues, states and blocks agree; true between steps."""
        self.admitter.check_integrity()
        assert all(s.num_computed_tokens < s.num_tokens for s in self.running)
        queued = [*self.running, *self.waiting]
        queued += [fork for s in queued for fork in s.forks]
        unfinished = {s.request_id: s for s in queued}
        assert len(unfinished) == len(queued)
        assert unfinished == self._sequences
        self.block_manager.check_integrity(self._sequences.values())

    def _add(self, scheduled: ScheduledSequence, tokens: list[SampledToken]) -> list[EngineOutput]:
        """Add a step's tokens to their sequence, which may end."""
        sequence = scheduled.sequence
        taken, reason = _append_sampled(scheduled, tokens)
        self._note_computed(scheduled, num_dropped=len(tokens) - len(taken))
        if not taken:
            return []
        self.num_output_tokens += len(taken)
        is_first = len(sequence.token_ids) - len(taken) == sequence.num_prompt_tokens
        if is_first and sequence.request.fork_of is None:
            self.num_prompt_tokens += sequence.num_prompt_tokens
        self._release_forks(sequence)
        if reason is FinishReason.INVALID and sequence.grammar:
            return self.end(sequence.request_id, reason, sequence.grammar.error)
        if reason:
            self._finish(sequence)
        return [_output(sequence, taken, reason)]

    def _note_computed(self, scheduled: ScheduledSequence, num_dropped: int) -> None:
        """Publish the blocks that a step has computed, and forget those of rejected drafts.

        Args:
            num_dropped: Sampled tokens that were not appended to the sequence::

                |<-------------- end --------------->|
                |<----- computed ----->|<- dropped ->|
        """
        sequence = scheduled.sequence
        num_computed = scheduled.end - num_dropped
        if sequence.status is SequenceStatus.RUNNING:
            self.block_manager.cache_full_blocks(sequence, num_computed)
        self.drafts.take_back(scheduled, num_dropped, num_computed)

    def _left_out(self) -> set[Sequence]:
        """The running sequences that get no token in this step, though they have some to compute:
        the budget is smaller than their number, and others have waited longer."""
        if self.token_budget >= len(self.running):
            return set()
        ready = [s for s in self.running if s.num_tokens_to_compute]
        return set(sorted(ready, key=lambda s: s.last_step)[self.token_budget :])

    def _set_budget(self, num_tokens: int) -> None:
        self.token_budget = num_tokens
        self._steps_until_growth = _STEPS_UNTIL_GROWTH

    def _release_forks(self, sequence: Sequence) -> None:
        for fork in sequence.forks:
            self.admitter.enqueue(fork)
        sequence.forks.clear()

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


def _append_sampled(
    scheduled: ScheduledSequence, sampled: list[SampledToken]
) -> tuple[list[SampledToken], FinishReason | None]:
    """Append sampled tokens to their sequence, up to the first one that ends the answer or differs
    from the draft: the tokens behind that one were sampled for another text.

    So each token is what would have been sampled without a draft, from the same logits and the
    same random number. Nothing is sampled again, unlike with drafts that are distributions
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
        usage=sequence.usage,
    )
