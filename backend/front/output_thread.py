"""The front's output thread: turns the engine's tokens into responses.

Once a request has reached the engine, only this thread uses its responder, so nothing happens after
the final response. When the thread falls behind, a request's outputs are merged into one response.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from tritium.backend.accounts.billing import Bill, Billing
from tritium.backend.accounts.request_usage import AnswerUsage
from tritium.backend.accounts.trace import Captured, TraceWriter
from tritium.backend.engine.engine import Engine, EngineStats, StepRecord
from tritium.backend.engine.request import EngineOutput, EngineRequest, FinishReason, RequestClass
from tritium.backend.engine.usage import DeviceTotals
from tritium.backend.errors import (
    Cancelled,
    InvalidArgument,
    RefusalReason,
    RequestError,
    Unavailable,
)
from tritium.backend.front.output import RequestOutput
from tritium.backend.front.protocol import GenerationRequest, response_tensors
from tritium.backend.front.tokenizer import Tokenizer
from tritium.backend.supervisor import Supervisor

logger = logging.getLogger("tritium")

_POLL_SECONDS = 0.2  # cancellations and gauges


class Responder(Protocol):
    """Sends one request's responses to its client."""

    def send(self, tensors: Mapping[str, NDArray[Any]], final: bool) -> None: ...

    def fail(self, error: RequestError) -> None: ...  # the final response

    def is_cancelled(self) -> bool: ...


class Metrics(Protocol):
    """Receives what the front and the engine count."""

    def request_refused(self, reason: RefusalReason) -> None: ...

    def prompt_tokenized(self) -> None: ...

    def update(self, stats: EngineStats, steps: list[StepRecord]) -> None: ...


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that was submitted to the engine and whose final response was not sent yet."""

    request: GenerationRequest
    responder: Responder
    outputs: dict[int, RequestOutput]  # one per answer, by the engine's request id
    first: EngineRequest  # the first answer's
    bill: Bill
    has_sent: bool = False
    cancelling: bool = False

    @property
    def urgency(self) -> tuple[bool, RequestClass]:
        """The smaller value is sent first: first tokens, then interactive requests."""
        return self.has_sent, self.first.request_class


# What the engine's thread puts, in order; None: the end.
Outputs = queue.SimpleQueue[list[EngineOutput] | DeviceTotals | None]


class OutputThread:
    """Sends responses, and polls for cancelled requests a few times per second.

    Args:
        outputs: Filled by the engine.
        engine: Aborts requests that were cancelled or met a stop string.
        tokenizer: The model's tokenizer.
        metrics: Receives the engine's state a few times per second.
        billing: Closes the bill of every request that ends.
        trace: Records every request that ends.
        on_poll: Called a few times per second, on this thread; must not raise.
    """

    def __init__(
        self,
        outputs: Outputs,
        engine: Engine,
        tokenizer: Tokenizer,
        metrics: Metrics,
        billing: Billing,
        trace: TraceWriter | None,
        on_poll: Callable[[], None],
    ) -> None:
        self._outputs = outputs
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._billing = billing
        self._trace = trace
        self._on_poll = on_poll
        self._live: dict[int, LiveRequest] = {}  # by the engine's request id
        self._thread: threading.Thread | None = None

    def start(self, supervisor: Supervisor) -> None:
        self._thread = supervisor.start("output", self._run, daemon=False)

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout: float | None = None) -> None:
        """Send everything the engine has put so far, then end the thread.

        Args:
            timeout: Seconds to wait for the end of the thread; None: as long as it takes.
        """
        self._outputs.put(None)
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def fail_all(self, error: RequestError) -> None:
        """End the requests that have no final response yet with an error, after the thread.

        What they have cost is on their bills.
        """
        for live in set(self._live.copy().values()):
            self._guarded(self._fail, live, error)
        with contextlib.suppress(queue.Empty):
            while True:
                for output in _outputs_of(self._outputs.get_nowait()):
                    if output.finish_reason:
                        self._billing.engine_ended(output)

    def add(self, live: LiveRequest) -> None:
        """Register a request; call it before the engine has the request."""
        for request_id in live.outputs:
            self._live[request_id] = live

    def discard(self, live: LiveRequest) -> None:
        """Forget a request that the engine did not accept."""
        for request_id in live.outputs:
            self._live.pop(request_id, None)

    def _run(self) -> None:
        _lower_priority()
        next_poll = 0.0
        stopping = False
        while not stopping:
            outputs: dict[int, list[EngineOutput]] = {}
            totals: DeviceTotals | None = None
            try:
                stepped = self._outputs.get(timeout=_POLL_SECONDS)
                while stepped is not None:
                    if isinstance(stepped, DeviceTotals):
                        totals = stepped  # includes nothing that the engine puts later
                        break
                    for output in stepped:
                        outputs.setdefault(output.request_id, []).append(output)
                        if output.finish_reason:
                            self._billing.engine_ended(output)
                    stepped = self._outputs.get_nowait()
                else:
                    stopping = True
            except queue.Empty:
                pass
            fresh: dict[LiveRequest, list[EngineOutput]] = {}
            for request_id, merged in outputs.items():
                if live := self._live.get(request_id):
                    fresh.setdefault(live, []).extend(merged)
            for live in sorted(fresh, key=lambda live: live.urgency):
                self._guarded(self._respond, live, fresh[live])
            if totals:
                self._billing.totals(totals)
            if time.monotonic() >= next_poll:
                self._poll()
                next_poll = time.monotonic() + _POLL_SECONDS
        self._poll()

    def _guarded(self, function: Callable[..., None], live: LiveRequest, *args: Any) -> None:
        """Call the function; a failure for one request must not end the thread."""
        try:
            function(live, *args)
        except Exception:
            logger.exception("request %d: its response failed", min(live.outputs))
            self._forget(live)
            if not live.bill.outcome:
                self._billing.close(live.bill, RequestError.code.lower())
            with contextlib.suppress(Exception):  # the client may be what failed
                live.responder.fail(RequestError("internal error: the response failed"))

    def _respond(self, live: LiveRequest, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if live.outputs[output.request_id].finish_reason:
                continue  # computed after a stop string, before the abort reached the engine
            live.outputs[output.request_id].add(output)
            if error := _error(live.request, output):
                self._end(live, output.finish_reason)
                live.responder.fail(error)
                if live.cancelling:
                    logger.info("[vllm] Successfully cancelled the request")
                return
            if live.outputs[output.request_id].finish_reason and not output.finish_reason:
                self._engine.abort(output.request_id)  # ended by a stop string
        answers = live.outputs.values()
        final = all(answer.finish_reason for answer in answers)
        if final and live.bill.engine_ids and "return_usage" in live.request.returned:
            return  # after a stop string, a sequence's last step is not measured yet
        if not final and not (live.request.stream and any(answer.is_ready for answer in answers)):
            return
        deltas = [answer.take() for answer in answers]
        usage = None
        if final:
            self._end(live, deltas[0].finish_reason)
            usage = self._billing.usage(live.bill)
        tensors = response_tensors(
            live.request,
            deltas,
            len(live.first.prompt_token_ids),
            usage,
            self._tokenizer,
        )
        live.responder.send(tensors, final)
        live.has_sent = True

    def _fail(self, live: LiveRequest, error: RequestError) -> None:
        self._forget(live)
        self._billing.close(live.bill, error.code.lower())
        live.responder.fail(error)

    def _end(self, live: LiveRequest, reason: FinishReason | None) -> None:
        self._forget(live)
        answers = [output.usage() for output in live.outputs.values()]
        gaps = [gap for output in live.outputs.values() for gap in output.gaps]
        self._billing.close(live.bill, str(reason), AnswerUsage.of_request(answers), gaps)
        if self._trace:
            self._trace.add(
                Captured(
                    live.bill.arrival,
                    live.first.prompt_token_ids,
                    [answer.output_tokens for answer in answers],
                    live.first.cache_salt,
                    live.bill.business_line,
                    live.bill.request_class,
                )
            )

    def _forget(self, live: LiveRequest) -> None:
        """Send nothing more for the request; abort its sequences that have not ended."""
        for request_id, answer in live.outputs.items():
            if self._live.pop(request_id, None) and not answer.finish_reason:
                self._engine.abort(request_id)

    def _poll(self) -> None:
        self._on_poll()
        for live in set(self._live.copy().values()):
            self._guarded(self._check_cancelled, live)
        self._metrics.update(self._engine.stats(), self._engine.take_steps())

    def _check_cancelled(self, live: LiveRequest) -> None:
        if not live.cancelling and live.responder.is_cancelled():
            logger.info("[vllm] Cancelling the request")
            live.cancelling = True
            for request_id in live.outputs:
                self._engine.abort(request_id)


def _outputs_of(stepped: list[EngineOutput] | DeviceTotals | None) -> list[EngineOutput]:
    return stepped if isinstance(stepped, list) else []


def _lower_priority() -> None:
    """Keep the calling thread from preempting the threads that run the model on a CPU.

    All of them wait for an interrupted one. With a batch of 32 this gives 5 % more tokens/s.
    """
    thread = threading.get_native_id()
    # Not permitted where it would be a raise (at nice 15, or idle), or to no one (gVisor).
    with contextlib.suppress(OSError):
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, 10)


def _error(request: GenerationRequest, output: EngineOutput) -> RequestError | None:
    """The error that a request ends with; None if it continues or ends with an answer."""
    if output.finish_reason is FinishReason.CANCELLED:
        return Cancelled("the request was cancelled")
    if output.finish_reason in (FinishReason.SHUTDOWN, FinishReason.EXPIRED):
        return Unavailable(output.error)
    if output.finish_reason is FinishReason.INVALID:
        return InvalidArgument(
            f"{request.constraint_source}: the answer can't continue: {output.error}"
        )
    if output.finish_reason is FinishReason.ERROR:
        return RequestError(output.error)
    return None
