"""The front: accepts requests from Triton Server and submits them to the engine.

`handle()` runs on Triton Server's thread. A request with structured outputs continues on one of the
compiler's threads when its grammar is ready, and one with a long prompt on a thread for these.
Responses are sent by the output thread (output_thread.py).
"""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from numpy.typing import NDArray

from tritium.backend.accounts.billing import Bill, Billing
from tritium.backend.accounts.trace import TraceWriter
from tritium.backend.config import EngineConfig
from tritium.backend.engine.engine import Engine, Runner
from tritium.backend.engine.request import FinishReason
from tritium.backend.engine.usage import BusyTime
from tritium.backend.errors import Cancelled, RefusalReason, RequestError, Unavailable
from tritium.backend.front.bounds import MAX_NAME_CHARS, Bounds
from tritium.backend.front.input_processor import Arrival, InputProcessor
from tritium.backend.front.output_thread import (
    LiveRequest,
    Metrics,
    Outputs,
    OutputThread,
    Responder,
)
from tritium.backend.front.protocol import GenerationRequest, parse
from tritium.backend.front.structured import Grammar, GrammarCompiler
from tritium.backend.front.tokenizer import Tokenizer
from tritium.backend.front.vocabulary import Vocabulary
from tritium.backend.supervisor import Supervisor

logger = logging.getLogger("tritium")

_LONG = 2**14  # bytes of a prompt; shorter ones are tokenised within some 30 ms, on arrival
_NUM_THREADS = 2  # for longer ones


class _Accepted(NamedTuple):
    """A request that holds its slots in the queue, one per answer."""

    request: GenerationRequest
    responder: Responder
    arrival: Arrival
    bill: Bill


class Front:
    """Serves requests with an engine, which runs on its own thread.

    Args:
        config: Limits.
        tokenizer: The model's tokenizer.
        runner: Runs the model.
        grammars: Compiles structured outputs.
        max_model_len: Most tokens of prompt and answer together.
        vocabulary: The model's tokens.
        metrics: Counts refusals; receives the engine's state a few times per second.
        billing: Opens and closes a bill for every request.
        busy_time: Shares the engine's time among the requests.
        trace: Records every request that ends.
        supervisor: Starts the threads; told to end all requests when one of them fails.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        runner: Runner,
        grammars: GrammarCompiler,
        max_model_len: int,
        vocabulary: Vocabulary,
        metrics: Metrics,
        billing: Billing,
        busy_time: BusyTime | None = None,
        trace: TraceWriter | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._drain_seconds = config.drain_seconds
        self._inputs = InputProcessor(config, tokenizer, max_model_len, vocabulary)
        self._bounds = Bounds(max_model_len, tokenizer.max_token_bytes)
        self._grammars = grammars
        self._metrics = metrics
        self._billing = billing
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "long prompts")
        # What waits for its grammar, or for a thread for its long prompt. Keyed by id: a callback
        # lives as long as its cached grammar and must not keep the responder alive.
        self._preparing: dict[int, _Accepted] = {}
        self._preparing_ids = count()
        self._preparing_lock = threading.Lock()
        self._is_stopped = False
        outputs: Outputs = queue.SimpleQueue()
        self._engine = Engine(config, runner, outputs.put, busy_time, outputs.put)
        self._output_thread = OutputThread(
            outputs, self._engine, tokenizer, metrics, billing, trace, self._poll_preparing
        )
        self._supervisor = supervisor or Supervisor()
        self._supervisor.on_failure(self._fail)
        with ExitStack() as stack:
            self._engine.start(self._supervisor)
            stack.callback(self._engine.stop, 0)
            self._output_thread.start(self._supervisor)
            stack.pop_all()

    def is_ready(self) -> bool:
        """Whether both threads are alive."""
        return self._engine.is_alive() and self._output_thread.is_alive()

    def handle(
        self,
        inputs: Mapping[str, NDArray[Any]],
        parameters: str,
        responder: Responder,
        timeout: float = 0,
        request_id: str = "",
    ) -> None:
        """Accept a request or answer it with an error. Never raises.

        Args:
            inputs: The request's tensors.
            parameters: The request's parameters, a JSON object or "".
            responder: Sends the responses.
            timeout: Seconds to the first token, after which the request fails; 0: no limit.
            request_id: The client's id for the request.
        """
        arrival = Arrival(time.perf_counter(), timeout)
        bill = self._billing.open(request_id[:MAX_NAME_CHARS])
        try:
            self._bounds.check(inputs, parameters, request_id)
            request = parse(inputs, parameters)
            bill.trace_id, bill.business_line = request.trace_id, request.business_line
            bill.request_class = request.request_class.name.lower()
            bill.n = request.sampling.n
            self._inputs.check(request)
            # Admission control comes before the expensive work: refusing a burst must be cheap.
            self._engine.reserve(
                request.sampling.n, request.request_class, self._inputs.patience(request)
            )
        except Exception as error:  # noqa: BLE001 -- the request must get an answer
            self._refuse(responder, bill, error)
            return
        accepted = _Accepted(request, responder, arrival, bill)
        if not request.constraint and request.size <= _LONG:
            self._submit(accepted)
            return
        preparing_id = next(self._preparing_ids)
        self._preparing[preparing_id] = accepted
        try:
            if request.constraint:
                compiled = self._grammars.compile(request.constraint)
                compiled.add_done_callback(partial(self._submit_prepared, preparing_id))
            else:
                self._pool.submit(self._submit_prepared, preparing_id)
        except RuntimeError:  # their threads have ended: the engine takes no request any more
            self._submit_prepared(preparing_id)

    def stop(self) -> None:
        """Let requests continue for `drain_seconds`, then end the rest with UNAVAILABLE.

        A second call does nothing.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        self._engine.stop(self._drain_seconds)
        self._withdraw_preparing(Unavailable("the model is shutting down", RefusalReason.DRAINING))
        self._pool.shutdown(cancel_futures=True)
        self._output_thread.stop()

    def _fail(self) -> None:
        """End all requests with an error, as a thread that serves them has failed."""
        self._is_stopped = True
        error = Unavailable(self._supervisor.reason)
        self._engine.stop(0, self._supervisor.reason)
        self._withdraw_preparing(error)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._output_thread.stop(timeout=2)
        self._output_thread.fail_all(error)

    def _withdraw_preparing(self, error: Unavailable) -> None:
        with self._preparing_lock:
            preparing = list(self._preparing.values())
            self._preparing.clear()
        for accepted in preparing:
            self._withdraw(accepted, error)

    def _submit_prepared(self, preparing_id: int, compiled: Future[Grammar] | None = None) -> None:
        """Submit a request whose turn it is, unless it has been answered. Never raises."""
        with self._preparing_lock:
            accepted = self._preparing.pop(preparing_id, None)
        if accepted:
            self._submit(accepted, compiled)

    def _submit(self, accepted: _Accepted, compiled: Future[Grammar] | None = None) -> None:
        """Submit a request to the engine, or answer it with an error. Never raises."""
        request, responder, arrival, bill = accepted
        live = None
        try:
            grammar = _grammar(request, compiled) if compiled else None
            self._metrics.prompt_tokenized()
            token_ids = self._inputs.encode(request)
            engine_requests = self._inputs.engine_requests(request, token_ids, grammar, arrival)
            outputs = {
                engine_request.request_id: self._inputs.output(request, token_ids, arrival)
                for engine_request in engine_requests
            }
            live = LiveRequest(request, responder, outputs, engine_requests[0], bill)
            self._output_thread.add(live)
            self._billing.submitted(bill, outputs)
            self._engine.submit(*engine_requests)
        except Exception as error:  # noqa: BLE001 -- the request must get an answer
            if live:
                self._output_thread.discard(live)
            self._billing.withdrawn(bill)
            self._withdraw(accepted, error)

    def _withdraw(self, accepted: _Accepted, error: Exception, outcome: str = "") -> None:
        """Answer a request with an error and release its slots."""
        self._engine.release(accepted.request.sampling.n, accepted.request.request_class)
        self._refuse(accepted.responder, accepted.bill, error, outcome)

    def _refuse(
        self, responder: Responder, bill: Bill, error: Exception, outcome: str = ""
    ) -> None:
        if isinstance(error, CancelledError):
            error = Unavailable("the model is shutting down", RefusalReason.DRAINING)
        if not isinstance(error, RequestError):
            logger.error("a request failed before it reached the engine", exc_info=error)
            error = RequestError(f"internal error: {error!r}")
        self._billing.close(bill, outcome or error.code.lower())
        if error.reason:
            self._metrics.request_refused(error.reason)
        responder.fail(error)

    def _poll_preparing(self) -> None:
        """End requests that are cancelled or late before they reach the engine. Never raises."""
        for preparing_id in list(self._preparing):
            try:
                self._check_preparing(preparing_id)
            except Exception:
                logger.exception("a request that is being prepared could not be ended")

    def _check_preparing(self, preparing_id: int) -> None:
        with self._preparing_lock:  # once answered elsewhere, the responder must not be used
            accepted = self._preparing.get(preparing_id)
            if not accepted:
                return
            is_cancelled = accepted.responder.is_cancelled()
            deadlines = self._inputs.deadlines(accepted.request, accepted.arrival)
            missed = [d for d in deadlines if d.time <= time.perf_counter()]
            if not is_cancelled and not missed:
                return
            del self._preparing[preparing_id]
        if not is_cancelled:
            self._withdraw(accepted, Unavailable(missed[0].error), FinishReason.EXPIRED)
            return
        logger.info("[vllm] Cancelling the request")
        self._withdraw(accepted, Cancelled("the request was cancelled"))
        logger.info("[vllm] Successfully cancelled the request")


def _grammar(request: GenerationRequest, compiled: Future[Grammar]) -> Grammar:
    # Not compiled.result(): it would raise the cached exception, whose traceback would then keep
    # this request alive for as long as the grammar is cached.
    error = compiled.exception()
    if isinstance(error, RequestError):
        raise type(error)(f"{request.constraint_source}: {error}")
    if error:
        raise RuntimeError(f"a grammar could not be compiled: {error!r}") from error
    return compiled.result()
