"""The engine: requests in, tokens out, one step at a time. Knows nothing of text.

`step()` may be called directly (offline use, tests) or by the engine's own thread (`start()`);
never both at once. All other methods may be called from any thread.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tritium.backend.config import EngineConfig
from tritium.backend.engine.admission import Admission
from tritium.backend.engine.block_manager import BlockManager
from tritium.backend.engine.prefix_index import Overlap, PrefixIndex
from tritium.backend.engine.request import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    RequestClass,
    SampledToken,
)
from tritium.backend.engine.scheduler import Policy, Scheduler
from tritium.backend.engine.sequence import ScheduledSequence, Sequence
from tritium.backend.engine.usage import BusyTime, Shares, Totals
from tritium.backend.errors import InvalidArgument, OutOfMemory, RefusalReason, Unavailable

logger = logging.getLogger("tritium")

_MAX_STEPS = 1000  # kept until they are taken
_TOTALS_NS = 1_000_000_000  # between two reports of where the time went
_MAX_FAILURES = 3  # steps in a row; what comes then fails too, and a reload is better
_STEP_SECONDS = 10  # that a stopping engine waits for the step at hand


class Runner(Protocol):
    """What the engine needs of a model runner."""

    num_blocks: int
    overlaps: bool  # whether it pays to launch a step before the one before it is read

    def start(self) -> None:
        """Called on the thread that is going to launch, before it does so."""
        ...

    def launch(self, batch: list[ScheduledSequence]) -> Callable[[], list[SampledToken]]:
        """Start a step; what is returned waits for it and gives its tokens: of each of the batch,
        in its order, `num_samples`.

        Raises:
            OutOfMemory: there is too little for this step; a smaller one may be tried.
        """
        ...


class _Step(NamedTuple):
    """A step that has been launched and not read."""

    batch: list[ScheduledSequence]
    read: Callable[[], list[SampledToken]]
    shares: Shares


class StepFigures(NamedTuple):
    """A step that has been read."""

    num_sequences: int
    num_tokens: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How full the engine is at one moment, and what it has done since it started."""

    is_alive: bool
    num_running: int
    num_waiting: int
    block_size: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    num_steps: int
    num_computed_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int  # of the drafts
    prefix_overlap: Overlap  # where the prefix cache is `auto`


class Engine:
    """Continuous batching over a model runner.

    Args:
        config: Limits.
        runner: Runs a step's batch and holds `num_blocks` blocks of KV cache.
        on_outputs: Called after a step, on the thread that stepped, with what is new.
        busy_time: Shares the steps' time among the sequences.
        on_totals: Called likewise, behind the outputs that they go with: once a second while
            there is something to do, and when there is nothing any more.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        on_outputs: Callable[[list[EngineOutput]], None],
        busy_time: BusyTime | None = None,
        on_totals: Callable[[Totals], None] | None = None,
    ) -> None:
        self._config = config
        self._runner = runner
        self._on_outputs = on_outputs
        self._on_totals = on_totals
        self._busy_time = busy_time or BusyTime()
        self._next_totals = 0
        self._steps: deque[StepFigures] = deque(maxlen=_MAX_STEPS)
        self.block_manager = BlockManager(
            runner.num_blocks,
            config.block_size,
            config.prefix_cache != "off",
            self._busy_time.clock,
        )
        self._prefix_index = (
            PrefixIndex(runner.num_blocks, config.block_size)
            if config.prefix_cache == "auto"
            else None
        )
        self.scheduler = Scheduler(
            self.block_manager,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.speculative_config,
            Policy(
                config.max_preemptions,
                config.reserve_blocks_per_seq,
                config.max_bypasses,
                config.ageing_seconds,
            ),
        )
        self._inbox: deque[Sequence | int] = deque()  # to add, or the id to abort
        self._wake = threading.Condition()
        self.admission = Admission(  # guarded by _wake
            config.max_num_seqs, config.max_queue_size, config.max_queue_tokens
        )
        self._stopping = ""  # why no more requests are taken
        self._thread: threading.Thread | None = None
        self._in_flight: _Step | None = None
        self._at_work: list[ScheduledSequence] = []  # whom a failure now takes with it
        self._num_failures = 0  # of steps, in a row
        self._num_steps = 0
        self._num_computed_tokens = 0

    @property
    def max_kv_tokens(self) -> int:
        """The longest that a sequence's KV can be, with the whole cache to itself."""
        return self.block_manager.num_blocks * self._config.block_size

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def reserve(
        self,
        num_places: int = 1,
        request_class: RequestClass = RequestClass.INTERACTIVE,
        patience: float = math.inf,
    ) -> None:
        """Take places for requests that will be submitted; done before they are tokenised.

        Args:
            patience: Seconds after which it is no use to leave the queue.

        Raises:
            Unavailable: the queue is full or too slow, or the engine is stopping.
        """
        with self._wake:
            self._check_open()
            self.admission.reserve(num_places, request_class, patience, time.perf_counter())

    def release(
        self, num_places: int = 1, request_class: RequestClass = RequestClass.INTERACTIVE
    ) -> None:
        """Give back reserved places that no request was submitted for."""
        with self._wake:
            self.admission.release(num_places, request_class)

    def submit(self, *requests: EngineRequest) -> None:
        """Queue requests on reserved places, all or none.

        Exactly one output with a finish reason follows for each.

        Raises:
            InvalidArgument: one could not fit in the KV cache even alone.
            Unavailable: the engine is stopping.
        """
        for request in requests:
            if request.max_kv_tokens > self.max_kv_tokens:
                raise InvalidArgument(
                    f"the request can never fit in the KV cache: prompt ("
                    f"{len(request.prompt_token_ids)} tokens) and max_tokens "
                    f"({request.max_tokens}) together need {request.max_kv_tokens} tokens, the "
                    f"cache holds {self.max_kv_tokens}",
                    RefusalReason.KV_NEVER_FITS,
                )
        sequences = [Sequence(request) for request in requests]  # may raise, by a grammar's fault
        self._look_at_prefixes(sequences)
        with self._wake:
            self._check_open()
            for request in requests:
                self.admission.submitted(request, time.perf_counter())
            self._inbox.extend(sequences)
            self._wake.notify()

    def _look_at_prefixes(self, sequences: list[Sequence]) -> None:
        """Hash prompts here, where no step waits for it, and decide whether they are reused."""
        if not self.block_manager.prefix_cache:
            return
        hashes: list[bytes] = []
        reuses = True
        for sequence in sequences:
            request = sequence.request
            if request.fork_of is None:
                hashes = self.block_manager.hash_prompt(sequence)
                reuses = self._prefix_index is None or self._prefix_index.observe(
                    request.cache_scope, hashes, sequence.num_prompt_tokens
                )
            else:  # it comes behind the one that it forks
                sequence.block_hashes = hashes.copy()
            sequence.reuses_prefix = reuses

    def abort(self, request_id: int) -> None:
        """End a request, waiting or running; does nothing where it has ended."""
        with self._wake:
            self._inbox.append(request_id)
            self._wake.notify()

    def stats(self) -> EngineStats:
        running = len(self.scheduler.running)
        return EngineStats(
            is_alive=self.is_alive(),
            num_running=running,
            num_waiting=max(self.admission.num_places - running, 0),
            block_size=self.block_manager.block_size,
            num_blocks=self.block_manager.num_blocks,
            num_used_blocks=self.block_manager.num_used_blocks,
            num_cached_blocks=self.block_manager.num_cached_blocks,
            num_preemptions=self.scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_draft_tokens=self.scheduler.drafts.num_tokens,
            num_accepted_tokens=self.scheduler.drafts.num_accepted_tokens,
            prefix_overlap=self._prefix_index.total if self._prefix_index else Overlap(),
        )

    def take_steps(self) -> list[StepFigures]:
        """The steps that have been read since this was asked last, at most the latest 1,000."""
        return [self._steps.popleft() for _ in range(len(self._steps))]

    def step(self) -> list[EngineOutput]:
        """One step over what is there now: schedule, run, update."""
        self._at_work = []
        if not self.scheduler.has_unfinished():
            self._busy_time.end_idle()
        outputs = self._take_inbox() + self._hand_out(self.scheduler.expire())
        batch = self.scheduler.schedule()
        self._note_admitted()
        before, self._in_flight = self._in_flight, None
        try:
            self._in_flight = self._launch(batch)
        finally:  # also where that failed: the next step must know what this one sampled
            outputs += self._update(before)
        if not self._runner.overlaps or self.scheduler.waits_for(batch):
            launched, self._in_flight = self._in_flight, None
            outputs += self._update(launched)
        self._report_totals()
        return outputs

    def _launch(self, batch: list[ScheduledSequence]) -> _Step | None:
        if not batch:
            return None
        self._at_work = batch
        try:
            read = self._runner.launch(batch)
        except OutOfMemory as error:
            if not self.scheduler.retreat(batch):
                raise
            self._busy_time.end_failed_step()
            logger.warning(
                f"no memory for a step of {sum(s.num_new_tokens for s in batch)} tokens; "
                f"trying at most {self.scheduler.token_budget}: {error}"
            )
            return None
        step = _Step(batch, read, self._busy_time.shares(batch))
        self.scheduler.advance(batch)
        self._num_steps += 1
        self._num_computed_tokens += sum(scheduled.num_new_tokens for scheduled in batch)
        return step

    def _update(self, step: _Step | None) -> list[EngineOutput]:
        if step is None:
            return []
        launching, self._at_work = self._at_work, step.batch
        sampled = step.read()
        self._num_failures = 0
        duration = self._busy_time.end_step(step.shares)
        num_tokens = sum(scheduled.num_new_tokens for scheduled in step.batch)
        self._steps.append(StepFigures(len(step.batch), num_tokens, duration))
        outputs = self._hand_out(self.scheduler.update(step.batch, sampled))
        self._at_work = launching
        return outputs

    def start(self) -> None:
        """Step on a thread of the engine's own until `stop()`."""
        self._report_totals()
        # A daemon, so that a step that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self, drain_seconds: float) -> None:
        """Refuse new requests, let the others go on for so long, then end them with an error.

        Takes at most `drain_seconds`, then one step, and no more than 10 seconds for that.
        """
        with self._wake:
            self._stopping = self._stopping or "the model is shutting down"
        deadline = time.monotonic() + drain_seconds
        while self.admission.num_places and time.monotonic() < deadline and self.is_alive():
            time.sleep(0.02)
        with self._wake:
            self._thread, thread = None, self._thread
            self._wake.notify()
        if thread:
            thread.join(_STEP_SECONDS)
            if thread.is_alive():
                logger.error(f"a step hangs for {_STEP_SECONDS} s; its sequences end without it")
        self._take_inbox()
        self._end_all(self.scheduler.unfinished_ids(), FinishReason.SHUTDOWN, self._stopping)
        self._busy_time.end_idle()
        self._report_totals()

    def totals(self) -> Totals:
        """Where the device's time has gone; on the thread that steps, or where none does."""
        is_quiet = not self.scheduler.has_unfinished()
        return self._busy_time.totals(self.block_manager.used_block_ns(), is_quiet)

    def check_integrity(self) -> None:
        """Assert that queues, places and blocks agree, and that every nanosecond is on one bill."""
        self.scheduler.check_integrity()
        with self._wake:
            self.admission.check_integrity()
        self._busy_time.check_integrity(self.scheduler.unfinished())

    def _report_totals(self) -> None:
        now = self._busy_time.clock()
        if self._on_totals and (now >= self._next_totals or not self.scheduler.has_unfinished()):
            self._next_totals = now + _TOTALS_NS
            self._on_totals(self.totals())

    def _run(self) -> None:
        try:
            self._runner.start()
            self._loop()
        except BaseException as error:
            logger.critical("the engine's loop ended; nothing is served any more", exc_info=True)
            with self._wake:
                self._stopping = f"the engine has failed and serves nothing any more: {error!r}"
            self._take_inbox()
            self._end_all(self.scheduler.unfinished_ids(), FinishReason.SHUTDOWN, self._stopping)

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._has_something_to_do)
                if self._thread is None:
                    return
            try:
                self.step()
            except Exception as error:
                logger.exception("a step failed; its sequences end with an error")
                self._busy_time.end_failed_step()
                self._end_all(
                    [scheduled.sequence.request_id for scheduled in self._at_work],
                    FinishReason.ERROR,
                    f"the engine's step failed: {error}",
                )
                self._report_totals()
                self._num_failures += 1
                if self._num_failures == _MAX_FAILURES:
                    raise

    def _check_open(self) -> None:
        if self._stopping:
            reason = RefusalReason.DRAINING if self.is_alive() else None  # else it has failed
            raise Unavailable(self._stopping, reason)

    def _note_admitted(self) -> None:
        request_ids = [sequence.request_id for sequence in self.scheduler.newly_admitted]
        if request_ids:
            with self._wake:
                self.admission.admitted(request_ids, time.perf_counter())

    def _has_something_to_do(self) -> bool:
        return bool(self._thread is None or self._inbox or self.scheduler.has_unfinished())

    def _take_inbox(self) -> list[EngineOutput]:
        """Add what was submitted, end what was aborted; returns the outputs of the latter."""
        aborted: list[EngineOutput] = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Sequence):
                self.scheduler.add(item)
            else:
                aborted += self.scheduler.end(item, FinishReason.CANCELLED)
        return self._hand_out(aborted)

    def _end_all(self, request_ids: list[int], reason: FinishReason, error: str) -> None:
        for request_id in request_ids:
            self._hand_out(self.scheduler.end(request_id, reason, error))

    def _hand_out(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        finished = [output.request_id for output in outputs if output.finish_reason]
        if finished:
            self._busy_time.close([output.figures for output in outputs])
            with self._wake:
                for request_id in finished:
                    self.admission.ended(request_id)
        if outputs:
            self._on_outputs(outputs.copy())  # step() adds to what is returned here
        return outputs
