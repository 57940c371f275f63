"""Between Triton Server and the engine: requests to token ids, tokens to responses.

`handle()` runs on Triton Server's thread. One output thread of the front's own turns tokens into
responses; it is the only one that uses the responder of a request which has reached the engine,
so that nothing is sent or asked after the final response. While it is behind, what a request has
ready is merged into one response.
"""

import contextlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np

from backend.config import EngineConfig
from backend.engine import Engine, EngineStats, Runner
from backend.errors import Cancelled, InvalidArgument, RequestError, Unavailable
from backend.output import RequestOutput, Usage
from backend.protocol import GenerationRequest, parse, response_tensors
from backend.sequence import EngineOutput, EngineRequest, FinishReason
from backend.tokenizer import Tokenizer

logger = logging.getLogger("tritium")

_POLL_SECONDS = 0.2  # cancellations and gauges


class Responder(Protocol):
    """Sends one request's responses to its client."""

    def send(self, tensors: Mapping[str, np.ndarray], final: bool) -> None: ...

    def fail(self, error: RequestError) -> None: ...  # final, too

    def is_cancelled(self) -> bool: ...


class Metrics(Protocol):
    """Takes what the front and the engine count."""

    def request_finished(self, outcome: str, usage: Usage | None) -> None: ...

    def update(self, stats: EngineStats) -> None: ...


@dataclass(slots=True)
class _Live:
    """A request that the engine has and whose final response is not sent."""

    request: GenerationRequest
    responder: Responder
    output: RequestOutput
    num_input_tokens: int
    cancelling: bool = False


class Front:
    """Serves requests with an engine on a thread of its own.

    Args:
        config: Limits.
        tokenizer: The model's.
        runner: The model.
        max_model_len: Tokens of prompt and answer together.
        eos_token_ids: End an answer, unless `ignore_eos`.
        metrics: Told of every request that ends, and of the engine a few times a second.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        runner: Runner,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._metrics = metrics
        self._live: dict[int, _Live] = {}
        self._request_ids = count()
        self._outputs: queue.SimpleQueue[list[EngineOutput] | None] = queue.SimpleQueue()
        self._engine = Engine(config, runner, self._outputs.put)
        self._thread = threading.Thread(target=self._run, name="output")
        self._engine.start()
        self._thread.start()

    def is_ready(self) -> bool:
        return self._engine.is_alive() and self._thread.is_alive()

    def handle(
        self, inputs: Mapping[str, np.ndarray], parameters: str, responder: Responder
    ) -> None:
        """Accept a request or answer it with an error. Never raises."""
        try:
            self._submit(parse(inputs, parameters), responder)
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("a request could not be read")
                error = RequestError(f"internal error: {error!r}")
            self._metrics.request_finished(error.code.lower(), None)
            responder.fail(error)

    def stop(self) -> None:
        """Let running requests end for `drain_seconds`, then end what is left with an error."""
        self._engine.stop(self._config.drain_seconds)
        self._outputs.put(None)
        self._thread.join()

    def _submit(self, request: GenerationRequest, responder: Responder) -> None:
        self._engine.reserve()  # before tokenising, so that a burst costs nothing
        request_id = next(self._request_ids)
        try:
            prompt_token_ids = self._encode(request)
            sampling = request.sampling
            self._live[request_id] = _Live(
                request,
                responder,
                RequestOutput(
                    self._tokenizer.detokenizer(prompt_token_ids, sampling.skip_special_tokens),
                    stop=sampling.stop,
                    include_stop=sampling.include_stop_str_in_output,
                    min_tokens=sampling.min_tokens,
                    stream=request.stream,
                    prefix=(request.text_input or "") if request.echo else "",
                    num_prompt_tokens=len(prompt_token_ids),
                ),
                len(prompt_token_ids),
            )
            self._engine.submit(self._engine_request(request_id, request, prompt_token_ids))
        except BaseException:
            self._live.pop(request_id, None)
            self._engine.release()
            raise

    def _encode(self, request: GenerationRequest) -> list[int]:
        if request.messages is not None:
            name, token_ids = "messages", self._tokenizer.encode_chat(request.messages)
        else:
            name, token_ids = "text_input", self._tokenizer.encode(request.text_input or "")
        if not token_ids:
            raise InvalidArgument(f"{name}: is empty; at least one token is needed")
        if len(token_ids) >= self._max_model_len:
            raise InvalidArgument(
                f"{name}: the prompt has {len(token_ids)} tokens; at most "
                f"{self._max_model_len - 1} are allowed (max_model_len is {self._max_model_len}, "
                "one is needed for the answer)"
            )
        return token_ids

    def _engine_request(
        self, request_id: int, request: GenerationRequest, prompt_token_ids: list[int]
    ) -> EngineRequest:
        sampling = request.sampling
        stop_token_ids = set(sampling.stop_token_ids)
        for token_id in stop_token_ids:
            if not 0 <= token_id < self._tokenizer.vocab_size:
                raise InvalidArgument(
                    f"sampling parameter 'stop_token_ids': {token_id} is not allowed; token ids "
                    f"are 0 to {self._tokenizer.vocab_size - 1}"
                )
        if not sampling.ignore_eos:
            stop_token_ids.update(self._eos_token_ids)
        num_logprobs = sampling.logprobs
        if num_logprobs is None and "return_cumulative_logprob" in request.returned:
            num_logprobs = 0
        return EngineRequest(
            request_id=request_id,
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
            seed=random.getrandbits(63) if sampling.seed is None else sampling.seed,
            num_logprobs=num_logprobs,
            # The line is always part of the salt, so nobody can take on another line's.
            cache_salt=f"{len(request.business_line)}:{request.business_line}"
            f"{request.cache_salt}".encode(),
        )

    # -- the output thread --

    def _run(self) -> None:
        next_poll = 0.0
        stopping = False
        while not stopping:
            outputs: dict[int, list[EngineOutput]] = {}
            try:
                stepped = self._outputs.get(timeout=_POLL_SECONDS)
                while stepped is not None:
                    for output in stepped:
                        outputs.setdefault(output.request_id, []).append(output)
                    stepped = self._outputs.get_nowait()
                stopping = True
            except queue.Empty:
                pass
            for request_id, merged in outputs.items():
                if live := self._live.get(request_id):
                    self._guarded(self._respond, request_id, live, merged)
            if time.monotonic() >= next_poll:
                self._poll()
                next_poll = time.monotonic() + _POLL_SECONDS
        self._poll()

    def _guarded(
        self, function: Callable[..., None], request_id: int, live: _Live, *args: Any
    ) -> None:
        """Whatever fails for one request must not end the thread that serves all."""
        try:
            function(request_id, live, *args)
        except Exception:
            logger.exception("request %d: its response failed", request_id)
            self._live.pop(request_id, None)
            self._engine.abort(request_id)
            with contextlib.suppress(Exception):  # the client may be what failed
                live.responder.fail(RequestError("internal error: the response failed"))

    def _respond(self, request_id: int, live: _Live, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            live.output.add(output)
        delta = live.output.take()
        if delta is None:
            return
        if delta.finish_reason:
            del self._live[request_id]
            self._metrics.request_finished(str(delta.finish_reason), delta.usage)
            if outputs[-1].finish_reason is None:  # a stop string, which the engine can't know
                self._engine.abort(request_id)
            if error := _error(delta.finish_reason, outputs[-1].error):
                live.responder.fail(error)
                if live.cancelling:
                    logger.info("[vllm] Successfully cancelled the request")
                return
        tensors = response_tensors(live.request, delta, live.num_input_tokens, self._tokenizer)
        live.responder.send(tensors, final=delta.finish_reason is not None)

    def _poll(self) -> None:
        for request_id, live in list(self._live.items()):
            self._guarded(self._check_cancelled, request_id, live)
        self._metrics.update(self._engine.stats())

    def _check_cancelled(self, request_id: int, live: _Live) -> None:
        if not live.cancelling and live.responder.is_cancelled():
            logger.info("[vllm] Cancelling the request")
            live.cancelling = True
            self._engine.abort(request_id)


def _error(reason: FinishReason, message: str) -> RequestError | None:
    """The error that a request ends with, None where it ends with an answer."""
    if reason is FinishReason.CANCELLED:
        return Cancelled("the request was cancelled")
    if reason is FinishReason.SHUTDOWN:
        return Unavailable("the model is shutting down")
    if reason is FinishReason.ERROR:
        return RequestError(message)
    return None
