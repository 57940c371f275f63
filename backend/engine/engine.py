"""The engine: requests in, tokens out, one step at a time. Knows nothing of text.

`step()` is called either directly (offline use, tests) or by the engine's own thread (`start()`),
never both at once. All other methods may be called from any thread.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tritium.backend.config import EngineConfig
from tritium.backend.engine.admission import AdmissionControl
from tritium.backend.engine.block_manager import BlockManager
from tritium.backend.engine.prefix_index import Overlap, PrefixIndex
from tritium.backend.engine.request import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    RequestClass,
    SampledToken,
)
from tritium.backend.engine.scheduler import Scheduler
from tritium.backend.engine.sequence import ScheduledSequence, Sequence
from tritium.backend.engine.usage import BusyTime, DeviceTotals, StepShares
from tritium.backend.errors import (
    InvalidArgument,
    OutOfMemory,
    RefusalReason,
    Unavailable,
    is_fatal,
)
from tritium.backend.supervisor import Supervisor

logger = logging.getLogger("tritium")

_MAX_RECORDS = 1000  # steps
_TOTALS_NS = 1_000_000_000  # between two reports of where the time went
_MAX_FAILURES = 3  # in a row; then it may be the device that fails, and not the sequences
_STEP_SECONDS = 10  # that a stopping engine waits for its last step


class Runner(Protocol):
    """What the engine needs of a model runner."""

    num_blocks: int
    overlaps: bool  # whether it pays to launch a step before the previous one is read

    def start(self) -> None:
        """Called once on the thread that will launch steps, before the first one."""

    def launch(self, batch: list[ScheduledSequence]) -> Callable[[], list[SampledToken]]:
        """Start a step.

        Returns:
            A function that waits for the step and returns its tokens: `num_samples` of each
            sequence, in the order of the batch.

        Raises:
            OutOfMemory: there is too little memory for this step; a smaller one may be tried.
        """


class StepInFlight(NamedTuple):
    """A step that has been launched and not read, or whose launch has failed."""

    batch: list[ScheduledSequence]
    shares: StepShares
    read: Callable[[], list[SampledToken]]
    error: BaseException | None  # of the launch; to be raised instead of reading


class StepRecord(NamedTuple):
    """A step that has been read."""

    num_sequences: int
    num_tokens: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's load at one moment, and what it has done since it started."""

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
    num_prompt_tokens: int  # of prompts that were computed; once for several answers
    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int  # draft tokens that were accepted
    prefix_overlap: Overlap  # measured if the prefix cache is `auto`


class Engine:
    """Continuous batching over a model runner.

    Args:
        config: Limits.
        runner: Runs a step's batch and holds `num_blocks` blocks of KV cache.
        on_outputs: Takes new outputs, on the thread that steps. If it raises, it has taken none;
            then it gets them one by one, and a sequence whose output fails alone is aborted.
        busy_time: Divides the steps' time among the sequences.
        on_totals: Takes the device's totals, on the same thread and after the outputs that they
            include: once per second while there is work, and when there is none any more.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        on_outputs: Callable[[list[EngineOutput]], None],
        busy_time: BusyTime | None = None,
        on_totals: Callable[[DeviceTotals], None] | None = None,
    ) -> None:
        self._config = config
        self._runner = runner
        self.on_outputs = on_outputs
        self._on_totals = on_totals
        self._busy_time = busy_time or BusyTime()
        self._next_totals = 0
        self._records: deque[StepRecord] = deque(maxlen=_MAX_RECORDS)
        clock = self._busy_time.clock
        self.block_manager = BlockManager(
            runner.num_blocks, config.block_size, config.prefix_cache != "off", clock
        )
        self._prefix_index: PrefixIndex | None = None
        if config.prefix_cache == "auto":
            self._prefix_index = PrefixIndex(runner.num_blocks, config.block_size)
        self.scheduler = Scheduler(config, self.block_manager)
        self._inbox: deque[Sequence | int] = deque()  # sequences to add, request ids to abort
        self._wake = threading.Condition()
        self.admission_control = AdmissionControl(config)  # guarded by _wake
        self._stopping = ""  # why new requests are refused
        self._thread: threading.Thread | None = None
        self._num_failures = 0  # of steps in a row
        self._num_steps = 0
        self._num_computed_tokens = 0

    # -- the thread that steps --

    def step(self, previous: StepInFlight | None = None) -> StepInFlight | None:
        """One step over the current work: schedule, run, update.

        Where steps overlap, the step that this call launches is read by the next call, after the
        next launch. A step that fails is run again in halves, until it is known which sequences
        fail alone: these end with an error, and no others.

        Args:
            previous: The step in flight, as returned by the previous call.

        Returns:
            The step now in flight, None if all steps have been read.

        Raises:
            Exception: every sequence fails, and so does a step without a client's data; or no step
                could be scheduled, for the third time in a row.
        """
        batch = self._schedule()
        launched = self._launch(batch)
        return self._update(previous, launched)

    def _schedule(self) -> list[ScheduledSequence]:
        try:
            if not self.scheduler.has_unfinished():
                self._busy_time.end_idle()
            self._take_inbox()
            self._hand_out(self.scheduler.expire())
            batch = self.scheduler.schedule()
            if admitted := [s.request_id for s in self.scheduler.admitter.admitted]:
                with self._wake:
                    self.admission_control.admitted(admitted, time.perf_counter())
        except Exception:
            logger.exception("no step could be scheduled")
            self._busy_time.end_failed_step()
            self._num_failures += 1
            if self._num_failures >= _MAX_FAILURES:
                raise
            self.scheduler.admitter.undo_admissions()
            return []
        return batch

    def _launch(self, batch: list[ScheduledSequence]) -> StepInFlight | None:
        """Start a step. An error is kept until the previous step has been read."""
        if not batch:
            return None
        read: Callable[[], list[SampledToken]] = list
        failure = None
        try:
            read = self._runner.launch(batch)
        except BaseException as error:
            if is_fatal(error):
                raise
            if isinstance(error, OutOfMemory) and self.scheduler.retreat(batch):
                self._busy_time.end_failed_step()
                logger.warning(
                    f"no memory for a step of {_num_tokens(batch)} tokens; "
                    f"trying at most {self.scheduler.token_budget}: {error}"
                )
                return None
            failure = error
        step = StepInFlight(batch, self._busy_time.shares(batch), read, failure)
        self.scheduler.advance(batch)
        return step

    def _update(
        self, previous: StepInFlight | None, launched: StepInFlight | None
    ) -> StepInFlight | None:
        """Read the previous step; also the launched one, if the next step can't overlap with it."""
        if previous and self._read(previous):
            if launched:  # it began with tokens of the previous step
                self.scheduler.withdraw(launched.batch)
            self._run_apart(previous.batch)
            self._run_apart(launched.batch if launched else [])
            launched = None
        if launched and (
            launched.error or not self._runner.overlaps or self.scheduler.waits_for(launched.batch)
        ):
            if self._read(launched):
                self._run_apart(launched.batch)
            launched = None
        self._report_totals()
        return launched

    def _read(self, step: StepInFlight) -> BaseException | None:
        """Read a step and hand out its tokens; if it fails, withdraw it and return the error."""
        try:
            if step.error:
                raise step.error
            sampled = step.read()
        except BaseException as error:
            if is_fatal(error):
                raise
            logger.exception(f"a step of {len(step.batch)} sequences failed")
            self._busy_time.end_failed_step()
            self.scheduler.withdraw(step.batch)
            return error.with_traceback(None)  # it would keep the step's tensors
        self._num_failures = 0
        duration = self._busy_time.end_step(step.shares)
        num_tokens = _num_tokens(step.batch)
        self._num_steps += 1
        self._num_computed_tokens += num_tokens
        self._records.append(StepRecord(len(step.batch), num_tokens, duration))
        self._hand_out(self.scheduler.update(step.batch, sampled))
        return None

    def _run_apart(self, batch: list[ScheduledSequence]) -> None:
        """Run a failed step to its end, in halves where it fails. Who fails alone ends."""
        # A part of a step is a step: its sequences have their blocks and know nothing of others.
        batch = [scheduled for scheduled in batch if scheduled.can_run]
        step = self._launch(batch)
        error = self._read(step) if step else None
        if not error:
            return
        if len(batch) > 1:
            self._run_apart(batch[: len(batch) // 2])
            self._run_apart(batch[len(batch) // 2 :])
            return
        message = f"the engine's step failed: {str(error) or repr(error):.300}"
        self._end([batch[0].sequence], FinishReason.ERROR, message)
        self._num_failures += 1
        if self._num_failures >= _MAX_FAILURES:
            self._probe()

    def _probe(self) -> None:
        """Run a step of one token that no client has sent; raises if it fails, too."""
        probe = Sequence(EngineRequest(-1, [0], max_tokens=1))
        if not self.block_manager.allocate(probe, 1):
            return  # after the next failure
        scheduled = ScheduledSequence.of(probe, 1)
        block_table = probe.block_table.copy()
        self.block_manager.free(probe)  # at once, as nobody pays for the block; its content is void
        probe.block_table = block_table
        try:
            self._runner.launch([scheduled])()
        except Exception:
            self.scheduler.admitter.undo_admissions()  # the rest of the failed step does not run
            raise
        finally:
            self._busy_time.end_failed_step()
        self._num_failures = 0

    def _take_inbox(self) -> None:
        """Add submitted sequences, end aborted ones."""
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Sequence):
                self.scheduler.add(item)
            else:
                self._hand_out(self.scheduler.end(item, FinishReason.CANCELLED))

    def _end(self, sequences: Iterable[Sequence], reason: FinishReason, error: str) -> None:
        for sequence in sequences:
            self._hand_out(self.scheduler.end(sequence.request_id, reason, error))

    def _hand_out(self, outputs: list[EngineOutput]) -> None:
        finished = [output for output in outputs if output.finish_reason]
        if finished:
            self._busy_time.close(output.usage for output in finished)
            with self._wake:
                for output in finished:
                    self.admission_control.ended(output.request_id)
        if outputs:
            self._deliver(outputs)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        try:
            self.on_outputs(outputs)
        except Exception:
            logger.exception(f"{len(outputs)} outputs could not be handed out")
            if len(outputs) == 1:
                self.abort(outputs[0].request_id)
            for output in outputs if len(outputs) > 1 else ():
                self._deliver([output])

    def _report_totals(self) -> None:
        now = self._busy_time.clock()
        if self._on_totals and (now >= self._next_totals or not self.scheduler.has_unfinished()):
            self._next_totals = now + _TOTALS_NS
            self._on_totals(self.totals())

    def totals(self) -> DeviceTotals:
        """Where the device's time has gone; called on the thread that steps, or if none does."""
        is_quiet = not self.scheduler.has_unfinished()
        return self._busy_time.totals(self.block_manager.used_block_ns(), is_quiet)

    def check_integrity(self) -> None:
        """Assert that queues, slots and blocks agree, and that each nanosecond is on one bill."""
        self.scheduler.check_integrity()
        with self._wake:
            self.admission_control.check_integrity()
        self._busy_time.check_integrity(self.scheduler.unfinished())

    # -- any thread --

    @property
    def max_kv_tokens(self) -> int:
        """The most tokens of KV that a sequence can have, with the whole cache to itself."""
        return self.block_manager.num_blocks * self._config.block_size

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def reserve(
        self,
        num_slots: int = 1,
        request_class: RequestClass = RequestClass.INTERACTIVE,
        patience: float = math.inf,
    ) -> None:
        """Reserve slots for requests that will be submitted, before they are tokenised.

        Args:
            patience: Seconds; a request that leaves the queue later is of no use.

        Raises:
            Unavailable: the queue is full or too slow, or the engine is stopping.
        """
        with self._wake:
            self._check_open()
            self.admission_control.reserve(num_slots, request_class, patience, time.perf_counter())

    def release(
        self, num_slots: int = 1, request_class: RequestClass = RequestClass.INTERACTIVE
    ) -> None:
        """Give back reserved slots for which no request was submitted."""
        with self._wake:
            self.admission_control.release(num_slots, request_class)

    def submit(self, *requests: EngineRequest) -> None:
        """Queue requests in reserved slots, all or none.

        Exactly one output with a finish reason follows for each.

        Raises:
            InvalidArgument: a request does not fit in the KV cache even alone.
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
        sequences = [Sequence(request) for request in requests]  # raises if a grammar can't start
        self._hash_prompts(sequences)
        with self._wake:
            self._check_open()
            for request in requests:
                self.admission_control.submitted(request, time.perf_counter())
            self._inbox.extend(sequences)
            self._wake.notify()

    def _hash_prompts(self, sequences: list[Sequence]) -> None:
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
            else:  # comes after its leader, which has the same prompt
                sequence.block_hashes = hashes.copy()
            sequence.reuses_prefix = reuses

    def abort(self, request_id: int) -> None:
        """End a request, waiting or running; does nothing if it has ended."""
        with self._wake:
            self._inbox.append(request_id)
            self._wake.notify()

    def stats(self) -> EngineStats:
        scheduler, manager = self.scheduler, self.block_manager
        num_running = len(scheduler.running)
        return EngineStats(
            is_alive=self.is_alive(),
            num_running=num_running,
            num_waiting=max(self.admission_control.num_slots - num_running, 0),
            block_size=manager.block_size,
            num_blocks=manager.num_blocks,
            num_used_blocks=manager.num_used_blocks,
            num_cached_blocks=manager.num_cached_blocks,
            num_preemptions=scheduler.admitter.num_preemptions,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_output_tokens=scheduler.num_output_tokens,
            num_draft_tokens=scheduler.drafts.num_tokens,
            num_accepted_tokens=scheduler.drafts.num_accepted_tokens,
            prefix_overlap=self._prefix_index.total if self._prefix_index else Overlap(),
        )

    def take_steps(self) -> list[StepRecord]:
        """The steps read since the last call, at most the latest 1,000."""
        return [self._records.popleft() for _ in range(len(self._records))]

    # -- start and stop --

    def start(self, supervisor: Supervisor | None = None) -> None:
        """Step on a thread of the engine's own until `stop()`."""
        self._report_totals()
        with self._wake:  # the thread waits until it is known
            # A daemon, so that a step that hangs does not keep the process from ending.
            self._thread = (supervisor or Supervisor()).start("engine", self._run)

    def stop(self, drain_seconds: float, reason: str = "the model is shutting down") -> None:
        """Refuse new requests, continue with the others for `drain_seconds`, then end them.

        Takes at most `drain_seconds`, one step, and no more than 10 seconds for that step.
        """
        with self._wake:
            self._stopping = self._stopping or reason
        deadline = time.monotonic() + drain_seconds
        while self.admission_control.num_slots and time.monotonic() < deadline and self.is_alive():
            time.sleep(0.02)
        with self._wake:
            self._thread, thread = None, self._thread
            self._wake.notify()
        if thread and thread is not threading.current_thread():
            thread.join(_STEP_SECONDS)
            if thread.is_alive():
                logger.error(f"a step hangs for {_STEP_SECONDS} s; its sequences end without it")
        self._end_all()
        self._busy_time.end_idle()
        self._report_totals()

    def _run(self) -> None:
        try:
            self._runner.start()
            in_flight = None
            while self._wait_for_work():
                in_flight = self.step(in_flight)
        except BaseException as error:
            with self._wake:
                self._stopping = f"the engine has failed and serves nothing any more: {error!r}"
            self._end_all()
            self._report_totals()
            raise

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do. False: the engine was stopped."""
        with self._wake:
            self._wake.wait_for(
                lambda: not self._thread or self._inbox or self.scheduler.has_unfinished()
            )
            return self._thread is not None

    def _end_all(self) -> None:
        self._take_inbox()
        self._end(self.scheduler.unfinished(), FinishReason.SHUTDOWN, self._stopping)

    def _check_open(self) -> None:
        if self._stopping:
            reason = RefusalReason.DRAINING if self.is_alive() else None  # else it has failed
            raise Unavailable(self._stopping, reason)


def _num_tokens(batch: list[ScheduledSequence]) -> int:
    return sum(scheduled.num_new_tokens for scheduled in batch)
