"""Between Triton Server and the engine: requests to token ids, tokens to responses.

`handle()` runs on Triton Server's thread; a request whose answer must have a form that has to be
compiled goes on from there on a thread of the compiler's. One output thread of the front's own
turns tokens into responses; it is the only one that uses the responder of a request which has
reached the engine, so that nothing is sent or asked after the final response. While it is behind,
what a request has ready is merged into one response.
"""

import contextlib
import logging
import math
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np

from backend.billing import Bill, Billing
from backend.config import ConfigError, EngineConfig
from backend.engine import Engine, EngineStats, Runner, StepFigures
from backend.errors import (
    Cancelled,
    InvalidArgument,
    RefusalReason,
    RequestError,
    Unavailable,
)
from backend.output import RequestOutput, Usage
from backend.protocol import GenerationRequest, parse, response_tensors
from backend.sequence import (
    Deadline,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Milestone,
    RequestClass,
)
from backend.structured import Grammar, GrammarCompiler
from backend.tokenizer import Tokenizer
from backend.trace import Captured, TraceWriter
from backend.usage import BusyTime, Totals

logger = logging.getLogger("tritium")

_POLL_SECONDS = 0.2  # cancellations and gauges


class Responder(Protocol):
    """Sends one request's responses to its client."""

    def send(self, tensors: Mapping[str, np.ndarray], final: bool) -> None: ...

    def fail(self, error: RequestError) -> None: ...  # final, too

    def is_cancelled(self) -> bool: ...


class Metrics(Protocol):
    """Takes what the front and the engine count."""

    def request_refused(self, reason: RefusalReason) -> None: ...

    def prompt_tokenized(self) -> None: ...

    def update(self, stats: EngineStats, steps: list[StepFigures]) -> None: ...


class _Arrival(NamedTuple):
    """When a request came, and how long it is ready to wait for its first token."""

    time: float  # time.perf_counter()
    timeout: float  # seconds, 0: for ever


@dataclass(slots=True, eq=False)
class _Live:
    """A request that the engine has and whose final response is not sent."""

    request: GenerationRequest
    responder: Responder
    outputs: dict[int, RequestOutput]  # by the engine's request ids: one an answer
    first: EngineRequest  # of them
    bill: Bill
    cancelling: bool = False


class _Compiling(NamedTuple):
    """A request that has its places and waits for the grammar of its answer."""

    request: GenerationRequest
    responder: Responder
    arrival: _Arrival
    bill: Bill


class Front:
    """Serves requests with an engine on a thread of its own.

    Args:
        config: Limits.
        tokenizer: The model's.
        runner: The model.
        grammars: For answers that must have a form.
        max_model_len: Tokens of prompt and answer together.
        eos_token_ids: End an answer, unless `ignore_eos`.
        metrics: Told of refusals, and of the engine a few times a second.
        billing: Told of every request that comes and ends.
        busy_time: Shares the engine's time among the requests.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        runner: Runner,
        grammars: GrammarCompiler,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        metrics: Metrics,
        billing: Billing,
        busy_time: BusyTime | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._metrics = metrics
        self._billing = billing
        self._trace = _trace_writer(config)
        self._live: dict[int, _Live] = {}  # by the engine's request ids
        # By ids: the callbacks of grammars live as long as those, and responders must not.
        self._compiling: dict[int, _Compiling] = {}
        self._compiling_ids = count()
        self._compiling_lock = threading.Lock()
        self._request_ids = count()
        self._outputs: queue.SimpleQueue[list[EngineOutput] | Totals | None] = queue.SimpleQueue()
        self._engine = Engine(config, runner, self._outputs.put, busy_time, self._outputs.put)
        self._thread = threading.Thread(target=self._run, name="output")
        self._engine.start()
        self._thread.start()

    def is_ready(self) -> bool:
        return self._engine.is_alive() and self._thread.is_alive()

    def handle(
        self,
        inputs: Mapping[str, np.ndarray],
        parameters: str,
        responder: Responder,
        timeout: float = 0,
        request_id: str = "",
    ) -> None:
        """Accept a request or answer it with an error. Never raises.

        Args:
            timeout: Seconds after which it is refused, if it has no token by then; 0: never.
            request_id: Its client's.
        """
        arrival = _Arrival(time.perf_counter(), timeout)
        bill = self._billing.open(request_id)
        try:
            request = parse(inputs, parameters)
            bill.describe(request)
            self._check(request)
            # First, so that a burst costs nothing.
            self._engine.reserve(request.sampling.n, request.request_class, self._patience(request))
        except Exception as error:
            self._refuse(responder, bill, error)
            return
        if request.form:
            compiling_id = next(self._compiling_ids)
            self._compiling[compiling_id] = _Compiling(request, responder, arrival, bill)
            compiled = self._grammars.compile(request.form)
            compiled.add_done_callback(partial(self._submit_compiled, compiling_id))
        else:
            self._submit(request, responder, arrival, bill)

    def stop(self) -> None:
        """Let running requests end for `drain_seconds`, then end what is left with an error."""
        self._engine.stop(self._config.drain_seconds)
        with self._compiling_lock:
            compiling = list(self._compiling.values())
            self._compiling.clear()
        for request, responder, _, bill in compiling:
            self._engine.release(request.sampling.n, request.request_class)
            stopping = Unavailable("the model is shutting down", RefusalReason.DRAINING)
            self._refuse(responder, bill, stopping)
        self._grammars.close()
        self._outputs.put(None)
        self._thread.join()
        if self._trace:
            self._trace.close()

    def _check(self, request: GenerationRequest) -> None:
        num_answers = request.sampling.n
        if num_answers > self._config.max_num_seqs:
            raise InvalidArgument(
                f"sampling parameter 'n': {num_answers} is not allowed; at most "
                f"{self._config.max_num_seqs} answers run at once (max_num_seqs)"
            )
        self._check_lora(request.sampling.lora_name)
        if request.sampling.speculative and not self._config.speculative_config:
            raise InvalidArgument(
                "sampling parameter 'speculative': true is not allowed; this server has no "
                "speculative_config"
            )

    def _submit_compiled(self, compiling_id: int, compiled: Future[Grammar]) -> None:
        """Never raises."""
        with self._compiling_lock:
            compiling = self._compiling.pop(compiling_id, None)
        if compiling:  # not cancelled meanwhile
            request, responder = compiling.request, compiling.responder
            self._submit(request, responder, compiling.arrival, compiling.bill, compiled)

    def _submit(
        self,
        request: GenerationRequest,
        responder: Responder,
        arrival: _Arrival,
        bill: Bill,
        compiled: Future[Grammar] | None = None,
    ) -> None:
        """Hand a request over on its reserved places, or answer it with an error. Never raises."""
        live = None
        try:
            grammar = _grammar(request, compiled) if compiled else None
            prompt_token_ids = self._encode(request)
            engine_requests = self._engine_requests(request, prompt_token_ids, grammar, arrival)
            live = _Live(
                request,
                responder,
                {
                    r.request_id: self._output(request, prompt_token_ids, arrival.time)
                    for r in engine_requests
                },
                engine_requests[0],
                bill,
            )
            for request_id in live.outputs:
                self._live[request_id] = live
            self._billing.submitted(bill, live.outputs)
            self._engine.submit(*engine_requests)
        except Exception as error:
            self._engine.release(request.sampling.n, request.request_class)
            for request_id in live.outputs if live else ():
                self._live.pop(request_id, None)
            self._billing.withdrawn(bill)
            self._refuse(responder, bill, error)

    def _refuse(self, responder: Responder, bill: Bill, error: Exception) -> None:
        if isinstance(error, CancelledError):
            error = Unavailable("the model is shutting down", RefusalReason.DRAINING)
        if not isinstance(error, RequestError):
            logger.error("a request could not be read", exc_info=error)
            error = RequestError(f"internal error: {error!r}")
        self._billing.close(bill, error.code.lower())
        if error.reason:
            self._metrics.request_refused(error.reason)
        responder.fail(error)

    def _output(
        self, request: GenerationRequest, prompt_token_ids: list[int], arrival_time: float
    ) -> RequestOutput:
        sampling = request.sampling
        return RequestOutput(
            self._tokenizer.detokenizer(prompt_token_ids, sampling.skip_special_tokens),
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            stream=request.stream,
            prefix=(request.text_input or "") if request.echo else "",
            num_prompt_tokens=len(prompt_token_ids),
            trim_blanks=(
                self._config.trim_blanks if sampling.trim_blanks is None else sampling.trim_blanks
            ),
            arrival_time=arrival_time,
        )

    def _encode(self, request: GenerationRequest) -> list[int]:
        self._metrics.prompt_tokenized()
        if request.messages is not None:
            tools = request.tools.functions if request.tools else None
            name, token_ids = "messages", self._tokenizer.encode_chat(request.messages, tools)
        else:
            name, token_ids = "text_input", self._tokenizer.encode(request.text_input or "")
        if not token_ids:
            raise InvalidArgument(f"{name}: is empty; at least one token is needed")
        keep = request.sampling.truncate_prompt_tokens
        if keep is not None:
            token_ids = token_ids[-(self._max_model_len - 1 if keep == -1 else keep) :]
        if len(token_ids) >= self._max_model_len:
            raise InvalidArgument(
                f"{name}: the prompt has {len(token_ids)} tokens; at most "
                f"{self._max_model_len - 1} are allowed (max_model_len is {self._max_model_len}, "
                "one is needed for the answer)"
            )
        return token_ids

    def _engine_requests(
        self,
        request: GenerationRequest,
        prompt_token_ids: list[int],
        grammar: Grammar | None,
        arrival: _Arrival,
    ) -> list[EngineRequest]:
        """One for each answer; the later ones share the first one's prompt."""
        sampling = request.sampling
        for name, token_ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("allowed_token_ids", sampling.allowed_token_ids or []),
            ("logit_bias", sampling.logit_bias),
        ):
            self._check_token_ids(name, token_ids)
        stop_token_ids = set(sampling.stop_token_ids)
        if grammar or not sampling.ignore_eos:  # an answer ends where its grammar does
            stop_token_ids.update(self._eos_token_ids)
        num_logprobs = sampling.logprobs
        if num_logprobs is None and "return_cumulative_logprob" in request.returned:
            num_logprobs = 0
        detection = sampling.repetition_detection
        if detection is None and not sampling.ignore_eos:  # which asks for a certain length
            detection = self._config.repetition_detection
        lora = sampling.lora_name or ""
        scope = request.business_line if self._config.prefix_cache_scope == "line" else ""
        seed = random.getrandbits(63) if sampling.seed is None else sampling.seed
        first = EngineRequest(
            request_id=next(self._request_ids),
            prompt_token_ids=prompt_token_ids,
            max_tokens=min(
                sampling.max_tokens or self._config.default_max_tokens,
                self._config.max_output_tokens,
                self._max_model_len - len(prompt_token_ids),
            ),
            min_tokens=sampling.min_tokens,
            stop_token_ids=frozenset(stop_token_ids),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=seed,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=sampling.prompt_logprobs,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=tuple(sampling.logit_bias.items()),
            allowed_token_ids=tuple(sampling.allowed_token_ids or ()),
            bad_words=tuple(
                tuple(token_ids)
                for word in sampling.bad_words
                for token_ids in self._tokenizer.encode_word(word)
            ),
            grammar=grammar,
            repetition_detection=detection,
            request_class=request.request_class,
            priority=sampling.priority,
            deadlines=self._deadlines(request, arrival),
            speculative=self._speculates(sampling.speculative),
            lora=lora,
            # The line is part of the salt, so nobody can take on another line's.
            # So is the adapter, whose KV is no other's.
            cache_salt=f"{len(scope)}:{scope}{len(lora)}:{lora}{request.cache_salt}".encode(),
            cache_scope=scope,
        )
        forks = [
            replace(
                first,
                request_id=next(self._request_ids),
                seed=seed + i,
                fork_of=first.request_id,
                num_prompt_logprobs=None,
            )
            for i in range(1, sampling.n)
        ]
        return [first, *forks]

    def _patience(self, request: GenerationRequest) -> float:
        """Seconds that a request may wait in the queue."""
        deadline_ms = request.deadline_ms or math.inf
        if request.request_class is RequestClass.INTERACTIVE:
            deadline_ms = min(deadline_ms, self._config.max_queue_delay_ms)
        return deadline_ms / 1e3

    def _deadlines(self, request: GenerationRequest, arrival: _Arrival) -> tuple[Deadline, ...]:
        config = self._config
        limits = [
            (
                config.max_request_seconds,
                Milestone.END,
                f"max_request_seconds: the request has taken {config.max_request_seconds:g} s",
            )
        ]
        if request.deadline_ms is not None:
            limits.append(
                (
                    request.deadline_ms / 1e3,
                    Milestone.END,
                    f"deadline_ms: the answer was not complete within {request.deadline_ms} ms",
                )
            )
        if arrival.timeout:
            limits.append(
                (
                    arrival.timeout,
                    Milestone.FIRST_TOKEN,
                    f"timeout: the request has waited {arrival.timeout:g} s for its first token",
                )
            )
        if request.request_class is RequestClass.INTERACTIVE:
            limits.append(
                (
                    config.max_queue_delay_ms / 1e3,
                    Milestone.ADMISSION,
                    f"max_queue_delay_ms: the request has waited {config.max_queue_delay_ms} ms",
                )
            )
        return tuple(
            Deadline(arrival.time + seconds, milestone, error)
            for seconds, milestone, error in limits
        )

    def _speculates(self, wanted: bool | None) -> bool:
        config = self._config.speculative_config
        return config is not None and (config.by_default if wanted is None else wanted)

    def _check_lora(self, name: str | None) -> None:
        """The messages are those of vLLM's Triton backend; its clients compare them."""
        supported = list(self._config.lora_modules)
        if name is not None and not supported:
            raise InvalidArgument("LoRA feature is not enabled.")
        if name is not None and name not in supported:
            raise InvalidArgument(
                f"LoRA {name:.100} is not supported, we currently support {supported}"
            )

    def _check_token_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._tokenizer.vocab_size:
                raise InvalidArgument(
                    f"sampling parameter '{name}': {token_id} is not allowed; token ids "
                    f"are 0 to {self._tokenizer.vocab_size - 1}"
                )

    # -- the output thread --

    def _run(self) -> None:
        _give_way()
        next_poll = 0.0
        stopping = False
        while not stopping:
            outputs: dict[int, list[EngineOutput]] = {}
            totals: Totals | None = None
            try:
                stepped = self._outputs.get(timeout=_POLL_SECONDS)
                while stepped is not None:
                    if isinstance(stepped, Totals):
                        totals = stepped  # of what has been taken so far, and no more
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
            fresh: dict[_Live, list[EngineOutput]] = {}
            for request_id, merged in outputs.items():
                if live := self._live.get(request_id):
                    fresh.setdefault(live, []).extend(merged)
            for live, merged in fresh.items():
                self._guarded(self._respond, live, merged)
            if totals:
                self._billing.totals(totals)
            if time.monotonic() >= next_poll:
                self._poll()
                next_poll = time.monotonic() + _POLL_SECONDS
        self._poll()

    def _guarded(self, function: Callable[..., None], live: _Live, *args: Any) -> None:
        """Whatever fails for one request must not end the thread that serves all."""
        try:
            function(live, *args)
        except Exception:
            logger.exception("request %d: its response failed", min(live.outputs))
            self._forget(live)
            if not live.bill.outcome:
                self._billing.close(live.bill, RequestError.code.lower())
            with contextlib.suppress(Exception):  # the client may be what failed
                live.responder.fail(RequestError("internal error: the response failed"))

    def _respond(self, live: _Live, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if live.outputs[output.request_id].finish_reason:
                continue  # more than was wanted, before the engine knew
            live.outputs[output.request_id].add(output)
            if error := _error(live.request, output):
                self._end(live, output.finish_reason)
                live.responder.fail(error)
                if live.cancelling:
                    logger.info("[vllm] Successfully cancelled the request")
                return
            if live.outputs[output.request_id].finish_reason and not output.finish_reason:
                self._engine.abort(output.request_id)  # a stop string, which it can't know
        answers = live.outputs.values()
        final = all(answer.finish_reason for answer in answers)
        if final and live.bill.engine_ids and "return_usage" in live.request.returned:
            return  # the engine's last word, about a step after a stop string, is missing
        if not final and not (live.request.stream and any(answer.is_ready for answer in answers)):
            return
        deltas = [answer.take() for answer in answers]
        usage = self._end(live, deltas[0].finish_reason) if final else None
        tensors = response_tensors(
            live.request,
            deltas,
            len(live.first.prompt_token_ids),
            usage,
            self._tokenizer,
        )
        live.responder.send(tensors, final)

    def _end(self, live: _Live, reason: FinishReason | None) -> Usage:
        self._forget(live)
        answers = live.outputs.values()
        usage = Usage.of_samples([answer.usage() for answer in answers])
        gaps = [gap for answer in answers for gap in answer.gaps]
        self._billing.close(live.bill, str(reason), usage, gaps)
        if self._trace:
            self._trace.add(
                Captured(
                    live.bill.arrival,
                    live.first.prompt_token_ids,
                    [answer.usage().output_tokens for answer in answers],
                    live.first.cache_salt,
                    live.bill.business_line,
                    live.bill.request_class,
                )
            )
        return self._billing.usage(live.bill, usage)

    def _forget(self, live: _Live) -> None:
        """Nothing of the request will be sent from here on; the engine ends what it has of it."""
        for request_id, answer in live.outputs.items():
            if self._live.pop(request_id, None) and not answer.finish_reason:
                self._engine.abort(request_id)

    def _poll(self) -> None:
        for compiling_id in list(self._compiling):
            try:
                self._check_compiling(compiling_id)
            except Exception:
                logger.exception("a request that waits for its grammar could not be cancelled")
        for live in set(self._live.copy().values()):
            self._guarded(self._check_cancelled, live)
        self._metrics.update(self._engine.stats(), self._engine.take_steps())

    def _check_compiling(self, compiling_id: int) -> None:
        with self._compiling_lock:  # nothing is asked once another thread may have answered
            compiling = self._compiling.get(compiling_id)
            if not compiling or not compiling.responder.is_cancelled():
                return
            del self._compiling[compiling_id]
        logger.info("[vllm] Cancelling the request")
        self._engine.release(compiling.request.sampling.n, compiling.request.request_class)
        self._refuse(compiling.responder, compiling.bill, Cancelled("the request was cancelled"))
        logger.info("[vllm] Successfully cancelled the request")

    def _check_cancelled(self, live: _Live) -> None:
        if not live.cancelling and live.responder.is_cancelled():
            logger.info("[vllm] Cancelling the request")
            live.cancelling = True
            for request_id in live.outputs:
                self._engine.abort(request_id)


def _trace_writer(config: EngineConfig) -> TraceWriter | None:
    if not config.trace_path:
        return None
    try:
        return TraceWriter(config.trace_path, config.trace_max_size, config.block_size)
    except OSError as error:
        raise ConfigError(
            f"config.pbtxt: parameter 'trace_path' can't be {str(config.trace_path)!r}. {error}"
        ) from None


def _give_way() -> None:
    """Let the calling thread take no core from a thread of the model's arithmetic.

    On CPU all of those wait for the one that was interrupted: with a batch of 32, 5 % more tokens.
    """
    thread = threading.get_native_id()
    os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, thread, 10)


def _grammar(request: GenerationRequest, compiled: Future[Grammar]) -> Grammar:
    # Not raised itself: its traceback would hold on to this request for as long as it is kept.
    error = compiled.exception()
    if isinstance(error, RequestError):
        raise type(error)(f"{request.form_name}: {error}")
    if error:
        raise RuntimeError(f"a form could not be compiled: {error!r}") from error
    return compiled.result()


def _error(request: GenerationRequest, output: EngineOutput) -> RequestError | None:
    """The error that a request ends with, None where it goes on or ends with an answer."""
    if output.finish_reason is FinishReason.CANCELLED:
        return Cancelled("the request was cancelled")
    if output.finish_reason in (FinishReason.SHUTDOWN, FinishReason.EXPIRED):
        return Unavailable(output.error)
    if output.finish_reason is FinishReason.INVALID:
        return InvalidArgument(
            f"{request.form_name}: the answer can't go on in the form demanded: {output.error}"
        )
    if output.finish_reason is FinishReason.ERROR:
        return RequestError(output.error)
    return None
