"""Translates a client's request for the engine: token ids, sampling, deadlines, cache salts."""

import math
import random
from dataclasses import fields, replace
from itertools import chain, count
from typing import NamedTuple

from tritium.backend.config import EngineConfig
from tritium.backend.engine.request import (
    Deadline,
    EngineRequest,
    Milestone,
    RequestClass,
    SamplingOptions,
)
from tritium.backend.errors import InvalidArgument
from tritium.backend.front.chat_template import render
from tritium.backend.front.output import RequestOutput
from tritium.backend.front.protocol import GenerationRequest
from tritium.backend.front.structured import Grammar
from tritium.backend.front.tokenizer import Tokenizer
from tritium.backend.front.vocabulary import Vocabulary


class Arrival(NamedTuple):
    """When a request arrived, and how long it may wait for its first token."""

    time: float  # time.perf_counter()
    timeout: float  # seconds; 0: no limit


class InputProcessor:
    """Turns generation requests into engine requests, within this server's limits.

    Args:
        config: Limits.
        tokenizer: The model's tokenizer.
        max_model_len: Most tokens of prompt and answer together.
        vocabulary: The model's tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        max_model_len: int,
        vocabulary: Vocabulary,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocabulary = vocabulary
        self._request_ids = count()

    def check(self, request: GenerationRequest) -> None:
        """Check what can be checked without token ids.

        Raises:
            InvalidArgument: the request exceeds a limit or needs a feature that is off.
        """
        num_answers = request.sampling.n
        if num_answers > self._config.max_num_seqs:
            raise InvalidArgument(
                f"sampling parameter 'n': {num_answers!s:.100} is not allowed; at most "
                f"{self._config.max_num_seqs} answers run at once (max_num_seqs)"
            )
        self._check_lora(request.sampling.lora_name)
        if request.sampling.speculative and not self._config.speculative_config:
            raise InvalidArgument(
                "sampling parameter 'speculative': true is not allowed; this server has no "
                "speculative_config"
            )

    def patience(self, request: GenerationRequest) -> float:
        """The longest acceptable wait in the queue, in seconds."""
        deadline_ms = request.deadline_ms or math.inf
        if request.request_class is RequestClass.INTERACTIVE:
            deadline_ms = min(deadline_ms, self._config.max_queue_delay_ms)
        return deadline_ms / 1e3

    def encode(self, request: GenerationRequest) -> list[int]:
        """The prompt's token ids.

        Raises:
            InvalidArgument: the prompt has no tokens, too many, or one that the model lacks, or
                the chat template refuses it.
        """
        tokenizer = self._tokenizer
        if request.chat:
            tools = (request.tools.functions or None) if request.tools else None
            text = render(tokenizer.chat_template, tokenizer.special_tokens, request.chat, tools)
            name, token_ids = "messages", tokenizer.encode_rendered(text)
        else:
            name, token_ids = "text_input", tokenizer.encode(request.text_input or "")
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
        self._vocabulary.check(name, token_ids)
        return token_ids

    def engine_requests(
        self,
        request: GenerationRequest,
        prompt_token_ids: list[int],
        grammar: Grammar | None,
        arrival: Arrival,
    ) -> list[EngineRequest]:
        """One engine request per answer; the later ones are forks of the first.

        Raises:
            InvalidArgument: the model lacks a token.
        """
        sampling = request.sampling
        bad_words = [
            tuple(token_ids)
            for word in sampling.bad_words
            for token_ids in self._tokenizer.encode_word(word)
        ]
        for name, demanded in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("allowed_token_ids", sampling.allowed_token_ids or []),
            ("logit_bias", sampling.logit_bias),
            ("bad_words", chain.from_iterable(bad_words)),
        ):
            self._vocabulary.check(f"sampling parameter '{name}'", demanded)
        stop_token_ids = set(sampling.stop_token_ids)
        if grammar or not sampling.ignore_eos:  # a complete grammar must be able to end
            stop_token_ids.update(self._vocabulary.eos_token_ids)
        num_logprobs = sampling.logprobs
        if num_logprobs is None and "return_cumulative_logprob" in request.returned:
            num_logprobs = 0
        detection = sampling.repetition_detection
        if detection is None and not sampling.ignore_eos:  # ignore_eos demands a fixed length
            detection = self._config.repetition_detection
        lora = sampling.lora_name or ""
        scope = request.business_line if self._config.prefix_cache_scope == "line" else ""
        seed = random.getrandbits(63) if sampling.seed is None else sampling.seed
        passed_on = {field.name: getattr(sampling, field.name) for field in fields(SamplingOptions)}
        first = EngineRequest(
            request_id=next(self._request_ids),
            prompt_token_ids=prompt_token_ids,
            max_tokens=min(
                sampling.max_tokens or self._config.default_max_tokens,
                self._config.max_output_tokens,
                self._max_model_len - len(prompt_token_ids),
            ),
            stop_token_ids=frozenset(stop_token_ids),
            seed=seed,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=sampling.prompt_logprobs,
            logit_bias=tuple(sampling.logit_bias.items()),
            allowed_token_ids=tuple(sampling.allowed_token_ids or ()),
            bad_words=tuple(bad_words),
            grammar=grammar,
            repetition_detection=detection,
            request_class=request.request_class,
            deadlines=self.deadlines(request, arrival),
            speculative=self._speculates(sampling.speculative),
            lora=lora,
            # Prefixes are shared neither between business lines (where the scope is the line), nor
            # between adapters, which compute different KV.
            cache_salt=f"{len(scope)}:{scope}{len(lora)}:{lora}{request.cache_salt}".encode(),
            cache_scope=scope,
            **passed_on,
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

    def output(
        self, request: GenerationRequest, prompt_token_ids: list[int], arrival: Arrival
    ) -> RequestOutput:
        """The text side of one answer."""
        sampling = request.sampling
        return RequestOutput(
            self._tokenizer.detokenizer(prompt_token_ids, sampling.skip_special_tokens),
            stop=sampling.stop,
            stop_tokens=self._stop_tokens(sampling.stop),
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            stream=request.stream,
            prefix=(request.text_input or "") if request.echo else "",
            num_prompt_tokens=len(prompt_token_ids),
            trim_blanks=(
                self._config.trim_blanks if sampling.trim_blanks is None else sampling.trim_blanks
            ),
            arrival_time=arrival.time,
        )

    def _stop_tokens(self, stop: list[str]) -> dict[int, str]:
        """Stop strings that are one token of their own, by its id."""
        ids = {self._tokenizer.special_token_id(text): text for text in stop}
        return {token_id: text for token_id, text in ids.items() if token_id is not None}

    def deadlines(self, request: GenerationRequest, arrival: Arrival) -> tuple[Deadline, ...]:
        """When each of the request's milestones must have been reached."""
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
        """Raises with the messages of vLLM's Triton Server backend, which clients compare."""
        supported = list(self._config.lora_modules)
        if name is not None and not supported:
            raise InvalidArgument("LoRA feature is not enabled.")
        if name is not None and name not in supported:
            raise InvalidArgument(
                f"LoRA {name:.100} is not supported, we currently support {supported}"
            )
