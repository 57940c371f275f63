"""The scheduler and the block manager under random traffic, with a model that reads its KV cache.

The fake model's "KV" of a token is a hash of the token and of the KV before it, read through the
block table; the KV of the last token determines the next one. So a block with wrong content changes
the answer, and each answer is compared with that of the sequence alone. Drafts are right, wrong, or
right up to some token; a rejected draft leaves wrong KV behind. Time passes only between steps, by
a rule of the machine.
"""

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.helpers import make_config
from tritium.backend.config import SpeculativeConfig
from tritium.backend.engine.admitter import Admitter
from tritium.backend.engine.block_manager import BlockManager
from tritium.backend.engine.request import (
    Deadline,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Milestone,
    RequestClass,
    SampledToken,
)
from tritium.backend.engine.scheduler import Scheduler
from tritium.backend.engine.sequence import ScheduledSequence, Sequence

VOCAB_SIZE = 8
SALTS = (b"", b"red", b"blue")


def kv_of(before: int, token_id: int) -> int:
    return hash((before, token_id))


def next_token(kv: int) -> int:
    return (kv >> 7) % VOCAB_SIZE


def alone(request: EngineRequest) -> tuple[list[int], FinishReason]:
    """What a request must get: its tokens and its finish reason, without any scheduler."""
    kv = SALTS.index(request.cache_salt)
    for token_id in request.prompt_token_ids:
        kv = kv_of(kv, token_id)
    tokens: list[int] = []
    while len(tokens) < request.max_tokens:
        tokens.append(next_token(kv))
        if tokens[-1] in request.stop_token_ids:
            return tokens, FinishReason.STOP
        kv = kv_of(kv, tokens[-1])
    return tokens, FinishReason.LENGTH


class FakeProposer:
    """Knows the answer, even beyond its end, and makes most of its drafts wrong."""

    def __init__(self, request: EngineRequest) -> None:
        answer, _ = alone(replace(request, max_tokens=40, stop_token_ids=frozenset()))
        self._right = [*request.prompt_token_ids, *answer]
        self._pauses = request.request_id % 2  # such sequences go through steps that overlap
        self.num_observed = 0

    def is_paused(self, num_tokens: int) -> bool:
        return bool(self._pauses and num_tokens % 3)

    def propose(self, token_ids: list[int], limit: int) -> list[int]:
        luck = hash(tuple(token_ids)) >> 3
        draft = self._right[len(token_ids) :][: max(min(limit, luck % 5), 0)]
        first_wrong = luck // 5 % 7
        return [t if i < first_wrong else (t + 1) % VOCAB_SIZE for i, t in enumerate(draft)]

    def observe(self, num_tokens: int, num_accepted_tokens: int) -> None:
        self.num_observed += 1


class FakeModel:
    """Computes a batch like a real model: writes the KV of the new tokens, then reads it."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._kv: dict[int, list[int | None]] = {}  # block id -> its slots
        self._last: dict[Sequence, int] = {}  # tokens sampled by the last step

    def launch(self, batch: list[ScheduledSequence]) -> list[SampledToken]:
        for sequence, start, end, _, draft_token_ids in batch:
            token_ids = sequence.token_ids[start:end]
            if not draft_token_ids and len(token_ids) < end - start:
                token_ids.append(self._last[sequence])
            token_ids += draft_token_ids
            for position, token_id in zip(range(start, end), token_ids, strict=True):
                self._write(sequence, position, token_id)
        sampled = [
            (s.sequence, next_token(self._read(s.sequence, position)))
            for s in batch
            for position in range(s.end - s.num_samples, s.end)
        ]
        self._last = dict(sampled)
        return [SampledToken(token_id, None) for _, token_id in sampled]

    def _write(self, sequence: Sequence, position: int, token_id: int) -> None:
        block_id, slot = self._locate(sequence, position)
        assert self._manager.blocks[block_id].ref_count == 1, "written to a shared block"
        before = self._read(sequence, position - 1)
        slots = self._kv.setdefault(block_id, [None] * self._manager.block_size)
        slots[slot] = kv_of(before, token_id)

    def _read(self, sequence: Sequence, position: int) -> int:
        if position < 0:
            return SALTS.index(sequence.request.cache_salt)  # so that reuse across salts is noticed
        block_id, slot = self._locate(sequence, position)
        kv = self._kv[block_id][slot]
        assert kv is not None, "read before it was written"
        return kv

    def _locate(self, sequence: Sequence, position: int) -> tuple[int, int]:
        index, slot = divmod(position, self._manager.block_size)
        return sequence.block_table[index], slot


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_tokens=st.sampled_from([12, 24, 64]),  # of the whole KV cache
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.integers(0, 8),
        prefix_cache=st.booleans(),
        overlap=st.booleans(),  # whether a step is launched before the one before it is read
        speculative=st.none() | st.builds(SpeculativeConfig, disable_by_batch_size=st.just(4)),
        bounds=st.builds(
            dict,
            max_preemptions=st.integers(0, 3),
            reserve_blocks_per_seq=st.integers(0, 2),
            max_bypasses=st.integers(0, 3),
            ageing_seconds=st.sampled_from([3.0, 30.0]),
        ),
    )
    def start(
        self,
        block_size,
        num_tokens,
        max_num_seqs,
        spare_budget,
        prefix_cache,
        overlap,
        speculative,
        bounds,
    ):
        self.now = 1.0
        self.manager = BlockManager(num_tokens // block_size, block_size, prefix_cache)
        self.budget = max_num_seqs + spare_budget
        self.max_num_seqs = max_num_seqs
        self.speculative = speculative
        self.config = make_config(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.budget,
            speculative_config=speculative,
            **bounds,
        )
        self.scheduler = Scheduler(self.config, self.manager, clock=lambda: self.now)
        self.scheduler.admitter._is_computed_soon = self._is_computed_soon
        self.scheduler.admitter._make_room = self._make_room
        self.wait_for_another: set[Sequence] = set()  # for a block that this step computes
        self.left_out: Counter[Sequence] = Counter()  # steps in a row that did not compute it
        self.computed: set[int] = set()  # requests of which a step has computed something
        self.model = FakeModel(self.manager)
        self.overlap = overlap
        self.in_flight: tuple[list[ScheduledSequence], list[SampledToken]] | None = None
        self.num_tokens = num_tokens
        self.requests: list[EngineRequest] = []
        self.tokens: list[list[int]] = []  # of each request, by its id
        self.reasons: list[list[FinishReason]] = []

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        parent=st.none() | st.integers(0, 30),
        max_tokens=st.integers(1, 10),
        stop_token_ids=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        salt=st.sampled_from(SALTS),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        request_class=st.sampled_from(RequestClass),
        patience=st.none() | st.tuples(st.sampled_from(Milestone), st.integers(1, 20)),
        fork=st.booleans(),
        drafts=st.booleans(),
    )
    def add(
        self,
        prompt,
        parent,
        max_tokens,
        stop_token_ids,
        salt,
        priority,
        request_class,
        patience,
        fork,
        drafts,
    ):
        fork_of = None
        if fork and parent is not None and self.requests:  # another answer to the same prompt
            fork_of = parent % len(self.requests)
            if self.requests[fork_of].fork_of is not None:
                fork_of = self.requests[fork_of].fork_of
            earlier = self.requests[fork_of]
            prompt, salt = earlier.prompt_token_ids, earlier.cache_salt
        elif parent is not None and self.requests:  # the next turn of a conversation
            parent %= len(self.requests)
            earlier = self.requests[parent]
            prompt = [*earlier.prompt_token_ids, *self.tokens[parent], *prompt[:2]]
            salt = earlier.cache_salt
        deadlines = ()
        if patience:
            milestone, seconds = patience
            deadlines = (Deadline(self.now + seconds, milestone, "late"),)
        request = EngineRequest(
            len(self.requests),
            prompt,
            max_tokens,
            stop_token_ids=frozenset(stop_token_ids),
            cache_salt=salt,
            priority=priority,
            request_class=request_class,
            deadlines=deadlines,
            fork_of=fork_of,
            speculative=drafts,
        )
        self._submit(request)

    @precondition(lambda self: self.scheduler.running)
    @rule(number=st.integers(0, 4), room=st.integers(1, 8))
    def share_a_running_prefix(self, number, room):
        """A long interactive request, of which a running sequence has a part."""
        running = self.scheduler.running[number % len(self.scheduler.running)]
        prompt = [*running.token_ids, *[0] * self.num_tokens][: self.num_tokens - room]
        salt = running.request.cache_salt
        self._submit(EngineRequest(len(self.requests), prompt, 1, cache_salt=salt))

    def _submit(self, request: EngineRequest) -> None:
        if request.max_kv_tokens > self.num_tokens:
            return  # refused by the engine
        self.requests.append(request)
        self.tokens.append([])
        self.reasons.append([])
        sequence = Sequence(request)
        self.scheduler.add(sequence)
        assert bool(sequence.proposer) == bool(self.speculative and request.speculative)
        if sequence.proposer:
            sequence.proposer = FakeProposer(request)

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            self._step()

    @rule(seconds=st.integers(1, 10))
    def time_passes(self, seconds):
        self.now += seconds
        self._take(self.scheduler.expire())
        for sequence in self.scheduler._sequences.values():
            for deadline in sequence.request.deadlines:
                if deadline.milestone is Milestone.ADMISSION:
                    reached = sequence.request_id in self.computed
                elif deadline.milestone is Milestone.FIRST_TOKEN:
                    reached = bool(self.tokens[sequence.request_id])
                else:
                    reached = False
                assert reached or self.now < deadline.time

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 30))
    def abort(self, number):
        number %= len(self.requests)
        ended_before = bool(self.reasons[number])
        outputs = self.scheduler.end(number, FinishReason.CANCELLED)
        assert bool(outputs) is not ended_before
        self._take(outputs)

    @precondition(lambda self: self.scheduler.running)
    @rule(
        is_launched=st.booleans(),
        cut=st.integers(0, 5),
        poisoned=st.none() | st.integers(0, 5),
        no_memory=st.booleans(),
    )
    def fail_a_step(self, is_launched, cut, poisoned, no_memory):
        """As in the engine: the step runs again in two parts. If it was launched, the step in
        flight fails, too. One sequence ends, or one part finds no memory, and the others continue.
        """
        steps = [self.scheduler.schedule()]
        if is_launched:
            self._launch(steps[0])
            if self.in_flight:
                steps.insert(0, self.in_flight[0])
            for batch in steps:
                self.scheduler.withdraw(batch)
        elif self.in_flight:
            self._take(self.scheduler.update(*self.in_flight))
        self.in_flight = None
        for batch in steps:
            for first, last in ((0, cut), (cut, len(batch))):
                part = [scheduled for scheduled in batch[first:last] if scheduled.can_run]
                if not first and poisoned is not None and poisoned < len(part):
                    failed = part.pop(poisoned).sequence.request_id
                    self._take(self.scheduler.end(failed, FinishReason.ERROR, "failed"))
                if not first and no_memory and part and self.scheduler.retreat(part):
                    continue
                self._take(self.scheduler.update(part, self._launch(part)))

    @precondition(lambda self: self.scheduler.has_unfinished())
    @rule()
    def find_no_memory(self):
        """As in the engine: the step in flight is read, the next one is smaller."""
        batch = self.scheduler.schedule()
        num_tokens = sum(scheduled.num_new_tokens for scheduled in batch)
        if batch and self.scheduler.retreat(batch):
            assert self.scheduler.token_budget == num_tokens // 2
        for scheduled in batch if num_tokens == 1 else ():  # a step that can't be smaller
            self._take(self.scheduler.end(scheduled.sequence.request_id, FinishReason.ERROR))
        if self.in_flight:
            self._take(self.scheduler.update(*self.in_flight))
            self.in_flight = None

    @invariant()
    def bookkeeping_agrees(self):
        self.scheduler.check_integrity()

    @invariant()
    def a_draft_leaves_nothing_behind(self):
        block_size = self.manager.block_size
        for sequence in self.scheduler.running:
            num_blocks = self.manager.blocks_for(sequence.num_computed_tokens)
            assert len(sequence.block_table) == num_blocks
            assert sequence.num_published_blocks * block_size <= sequence.num_computed_tokens

    @invariant()
    def the_scheduler_knows_all_unfinished_requests(self):
        unfinished = [i for i, reasons in enumerate(self.reasons) if not reasons]
        assert sorted(s.request_id for s in self.scheduler.unfinished()) == unfinished

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # Each step computes at least one token. A token is computed again only after a preemption,
        # which may take another step.
        unfinished = [sequence.request for sequence in self.scheduler.unfinished()]
        once = sum(request.max_kv_tokens + 1 for request in unfinished)
        for _ in range(once * (self.config.max_preemptions + 1) + 1):
            self._step()
            self.scheduler.check_integrity()
        assert not self.scheduler.has_unfinished()
        assert self.manager.num_used_blocks == 0
        assert all(len(reasons) == 1 for reasons in self.reasons)

    def _is_computed_soon(self, sequence: Sequence, index: int) -> bool:
        found = Admitter._is_computed_soon(self.scheduler.admitter, sequence, index)
        if found:
            self.wait_for_another.add(sequence)
        return found

    def _make_room(self, sequence: Sequence, computed: list[int], victims: list[Sequence]) -> bool:
        before = self.scheduler.admitter.num_preemptions
        has_room = Admitter._make_room(self.scheduler.admitter, sequence, computed, victims)
        assert has_room or self.scheduler.admitter.num_preemptions == before, "preempted in vain"
        return has_room

    def _launch(self, batch: list[ScheduledSequence]) -> list[SampledToken]:
        sampled = self.model.launch(batch)
        self.scheduler.advance(batch)
        for scheduled in batch:
            self.computed.add(scheduled.sequence.request_id)
            del self.left_out[scheduled.sequence]
        return sampled

    def _step(self) -> None:
        running, bypasses = list(self.scheduler.running), self._bypasses()
        self.wait_for_another.clear()
        batch = self.scheduler.schedule()
        self._check_batch(batch, running)
        self._check_victims(running)
        self._check_order(batch, running, bypasses)
        before, self.in_flight = self.in_flight, (batch, self._launch(batch))
        if before:
            self._take(self.scheduler.update(*before))
        if not self.overlap or self.scheduler.waits_for(batch):
            self._take(self.scheduler.update(*self.in_flight))
            self.in_flight = None

    def _check_batch(self, batch: list[ScheduledSequence], running: list[Sequence]) -> None:
        scheduled = [s.sequence for s in batch]
        assert len(set(map(id, scheduled))) == len(scheduled)
        now_running = self.scheduler.running
        new_tokens = [s.num_new_tokens for s in batch]
        assert sum(new_tokens) <= self.scheduler.token_budget <= self.budget
        # Each running sequence gets a token; in turns, if memory was short.
        left_out = {s for s in now_running if s.num_tokens_to_compute} - set(scheduled)
        preempted = any(s not in now_running for s in running)
        budget = self.scheduler.token_budget
        assert not left_out or preempted or sum(new_tokens) == budget < self.budget
        self.left_out = Counter({s: self.left_out[s] + 1 for s in left_out})
        num_turns = -(-self.max_num_seqs // budget)
        assert all(n < num_turns for n in self.left_out.values()), "others had more turns"
        assert all(num_new >= 1 for num_new in new_tokens)
        assert all(s.end <= s.sequence.request.max_kv_tokens for s in batch)
        assert [n > 1 for n in new_tokens] == sorted(n > 1 for n in new_tokens)

    def _check_victims(self, running: list[Sequence]) -> None:
        """The latest of the lowest class first, and none for lack of blocks of a lower class."""
        preempted = [s for s in running if s not in self.scheduler.running]
        assert set(preempted) <= set(self.scheduler.waiting)
        exposed = [s for s in running if not s.num_promised_blocks or s in preempted]
        assert exposed[len(exposed) - len(preempted) :] == preempted

    def _check_order(
        self,
        batch: list[ScheduledSequence],
        running: list[Sequence],
        bypasses: dict[Sequence, int],
    ) -> None:
        """Each admitted sequence counts as a bypass of the waiting ones before it in the order, and
        each sequence that could be admitted was."""
        scheduler = self.scheduler
        admitted = [s for s in scheduler.running if s not in running]
        waiting = [s for s in scheduler.waiting if s not in running]
        for sequence in waiting:
            ahead = sum(self._order(s) > self._order(sequence) for s in admitted)
            assert sequence.num_bypasses == bypasses.get(sequence, 0) + ahead
            assert sequence.num_bypasses <= self.config.max_bypasses
        num_promoted = sum(s.is_promoted for s in scheduler._sequences.values())
        assert num_promoted <= max(self.max_num_seqs // 8, 1)
        preempted = any(s not in scheduler.running for s in running)
        spare = scheduler.token_budget - sum(
            s.num_new_tokens - len(s.draft_token_ids) for s in batch
        )
        if preempted or not spare or any(s.draft_token_ids for s in batch):
            return
        for skipped, sequence in enumerate(scheduler.waiting):
            computed = scheduler.admitter._computed_blocks(sequence)
            fits = scheduler.admitter._fits(sequence, computed)
            assert sequence in self.wait_for_another or not fits
            if max(skipped, sequence.num_bypasses) >= self.config.max_bypasses:
                break

    def _order(self, sequence: Sequence) -> tuple:
        request = sequence.request
        return (
            not sequence.is_promoted,
            not sequence.is_promoted and (request.request_class, request.priority),
            sequence.arrival_index,
        )

    def _bypasses(self) -> dict[Sequence, int]:
        return {s: s.num_bypasses for s in self.scheduler.waiting}

    def _take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            number = output.request_id
            assert not self.reasons[number], "an output after the last one"
            self.tokens[number] += [token.token_id for token in output.tokens]
            expected, reason = alone(self.requests[number])
            assert self.tokens[number] == expected[: len(self.tokens[number])]
            if output.finish_reason:
                self.reasons[number].append(output.finish_reason)
            if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert (self.tokens[number], output.finish_reason) == (expected, reason)


def test_scheduler_machine():
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=250,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
        ),
    )
