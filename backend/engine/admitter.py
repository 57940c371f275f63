"""Which waiting sequences may be admitted into the running batch now. Pure bookkeeping."""

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import count, islice, takewhile

from tritium.backend.config import EngineConfig
from tritium.backend.engine.block_manager import BlockManager
from tritium.backend.engine.request import RequestClass
from tritium.backend.engine.sequence import Sequence, SequenceStatus
from tritium.backend.engine.waiting_queue import WaitingQueue


class Admitter:
    """Moves sequences from the waiting queue into the running batch and back.

    A waiting sequence is admitted when there are blocks for all of its known tokens. It may preempt
    running sequences of lower classes only. No sequence waits for ever:

    - A sequence is preempted at most `max_preemptions` times. Then it is protected: it runs only
      with all the blocks promised that it can need.
    - A sequence that has waited for `ageing_seconds` is promoted to the front of the first class,
      the longest wait first, while promoted sequences take at most an eighth of the slots.
    - A sequence that does not fit is bypassed at most `max_bypasses` times. Then all sequences
      after it wait with it.

    Args:
        config: The bounds above, `max_num_seqs` and `reserve_blocks_per_seq`.
        block_manager: Says which blocks are free.
        clock: Seconds.
    """

    def __init__(
        self, config: EngineConfig, block_manager: BlockManager, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._block_manager = block_manager
        self._clock = clock
        self._admission_indices = count()
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # by class, then by admission
        self.num_preemptions = 0

        # -- of the step that is being scheduled --
        self.admitted: list[Sequence] = []
        self._num_skipped = 0  # sequences at the head of the queue that do not fit
        self._prefilling: list[Sequence] = []  # running, with prompt blocks left to publish

    def start_step(self) -> None:
        self.admitted.clear()
        self._num_skipped = 0
        self._prefilling = [s for s in self._prefilling if self._has_to_publish(s)]
        self._promote()

    def enqueue(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        sequence.queued_time = self._clock()
        self.waiting.add(sequence)

    def admit(self, request_class: RequestClass) -> Sequence | None:
        """Move the first sequence of a class that fits into the running batch.

        Returns:
            The sequence; None if none fits, or none may bypass those that don't.
        """
        max_bypasses = self._config.max_bypasses
        victims = self.victims(below=request_class)
        if len(self.running) >= self._config.max_num_seqs and not victims:
            return None
        if any(s.num_bypasses >= max_bypasses for s in islice(self.waiting, self._num_skipped)):
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
            if max(self._num_skipped, sequence.num_bypasses) >= max_bypasses:
                return None
            self._num_skipped += 1
        return None

    def victims(self, below: int = -1) -> list[Sequence]:
        """Running sequences that may be preempted, the latest of the lowest class first.

        Args:
            below: Only classes after this one.
        """
        lower = takewhile(lambda s: s.rank > below, reversed(self.running))
        return [s for s in lower if not self._is_protected(s)]

    def preempt(self, victim: Sequence) -> None:
        """Send a running sequence back to its slot in the queue, to be recomputed later."""
        victim.num_lost_tokens = max(victim.num_lost_tokens, victim.num_computed_tokens)
        victim.usage.num_preemptions += 1
        self.num_preemptions += 1
        self._send_back(victim)

    def undo_admissions(self) -> None:
        """Send back the sequences of which nothing was computed since they were admitted. Those of
        which nothing ever was have not left the queue, as far as their deadlines know."""
        block_size = self._block_manager.block_size
        for sequence in self.running.copy():
            if sequence.num_computed_tokens == sequence.num_found_blocks * block_size:
                if not sequence.num_lost_tokens:
                    sequence.scheduled_time, sequence.num_cached_tokens = 0.0, 0
                self._send_back(sequence)

    def check_integrity(self) -> None:
        """Assert that queue, batch, states and bounds agree; true between steps."""
        assert len(self.running) <= self._config.max_num_seqs
        assert self.running == sorted(self.running, key=_running_order)
        assert all(s.status is SequenceStatus.RUNNING for s in self.running)
        assert all(bool(s.num_promised_blocks) is self._is_protected(s) for s in self.running)
        assert all(s.status is SequenceStatus.WAITING for s in self.waiting)
        assert all(not s.block_table and not s.num_computed_tokens for s in self.waiting)
        assert all(s.num_bypasses <= self._config.max_bypasses for s in self.waiting)
        for sequence in (*self.running, *self.waiting):
            assert sequence.usage.num_preemptions <= self._config.max_preemptions
        self.waiting.check_integrity()

    def _is_protected(self, sequence: Sequence) -> bool:
        """Whether it was preempted so often that it runs only with all its blocks promised."""
        return sequence.usage.num_preemptions >= self._config.max_preemptions

    def _computed_blocks(self, sequence: Sequence) -> list[int]:
        """The blocks that a sequence can start with: its leader's or the prefix cache's."""
        if sequence.request.num_prompt_logprobs is not None:
            return []  # computing the prompt yields its logprobs
        computed = self._block_manager.get_computed_blocks(sequence)
        leader = sequence.leader
        if leader and leader.status is SequenceStatus.RUNNING:
            # The last prompt token is left to compute, since its logits are needed.
            num_shared = min(leader.num_computed_tokens, sequence.num_prompt_tokens - 1)
            num_blocks = num_shared // self._block_manager.block_size
            if num_blocks > len(computed):
                return leader.block_table[:num_blocks]
        return computed

    def _is_computed_soon(self, sequence: Sequence, index: int) -> bool:
        """Whether a running sequence of the same or a higher class is about to compute block
        `index`, the first one that this sequence lacks. Then it waits for that block."""
        manager = self._block_manager
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

    def _fits(self, sequence: Sequence, computed: list[int], without: Seq[Sequence] = ()) -> bool:
        """Whether a waiting sequence could run, if those in `without` did not."""
        manager, request = self._block_manager, sequence.request
        num_running = len(self.running) - len(without)
        num_growing = num_running - manager.num_promises
        reserve = num_growing * self._config.reserve_blocks_per_seq
        wanted = request.max_kv_tokens if self._is_protected(sequence) else sequence.num_tokens
        missing = manager.num_missing_blocks(computed, wanted, without)
        return num_running < self._config.max_num_seqs and missing + reserve <= 0

    def _make_room(self, sequence: Sequence, computed: list[int], victims: list[Sequence]) -> bool:
        """Whether a waiting sequence can run now; preempts victims only if that lets it run."""
        if not self._fits(sequence, computed, without=victims):
            return False
        for victim in victims:
            if self._fits(sequence, computed):
                break
            self.preempt(victim)
        return self._fits(sequence, computed)

    def _start(self, sequence: Sequence, computed: list[int]) -> None:
        self.waiting.remove(sequence)
        self._block_manager.touch(sequence, computed)
        if self._is_protected(sequence):
            self._block_manager.promise(sequence, sequence.request.max_kv_tokens)
        if not sequence.scheduled_time:
            sequence.scheduled_time = self._clock()
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.status = SequenceStatus.RUNNING
        sequence.admission_index = next(self._admission_indices)
        sequence.num_bypasses = 0
        insort(self.running, sequence, key=_running_order)
        self.admitted.append(sequence)
        self._prefilling.append(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._block_manager.free(sequence)
        self.enqueue(sequence)

    def _promote(self) -> None:
        """Promote the sequence that has waited longest, if long enough and the bound allows it."""
        longest = self.waiting.longest()
        if not longest or self._clock() - longest.queued_time < self._config.ageing_seconds:
            return
        promoted = takewhile(lambda s: s.is_promoted, self.waiting)
        num_promoted = sum(1 for _ in promoted) + sum(s.is_promoted for s in self.running)
        if num_promoted < max(self._config.max_num_seqs // 8, 1):
            self.waiting.promote(longest)

    def _has_to_publish(self, sequence: Sequence) -> bool:
        manager = self._block_manager
        return (
            sequence.status is SequenceStatus.RUNNING
            and manager.reuses(sequence)
            and sequence.num_published_blocks < manager.num_prompt_blocks(sequence)
        )


def _running_order(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank, sequence.admission_index
