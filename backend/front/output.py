"""The text side of a running request: deltas, stop strings, token counts, usage, finish reason.

Knows nothing of KV blocks, tensors or Triton Server.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tritium.backend.accounts.request_usage import AnswerUsage
from tritium.backend.engine.request import EngineOutput, FinishReason, SampledToken


class Detokenizer(Protocol):
    def add(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of one answer that one response carries."""

    text: str
    tokens: list[SampledToken]
    cumulative_logprob: float  # of all tokens so far
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[SampledToken] | None = None  # with the first delta
    context: tuple[int, ...] = ()  # ids of the last tokens before these, four at most


class RequestOutput:
    """Collects an answer's tokens and releases text as soon as it is final.

    Text that may be the start of a stop string, or trailing blanks, is held back.

    Args:
        detokenizer: The answer's own.
        stop: Stop strings.
        stop_tokens: Those of them that are one token of their own, by its id: they also stop where
            the text hides it.
        include_stop: Whether the text keeps the stop string, or the stop token's text.
        min_tokens: Stop strings are ignored within this many tokens.
        stream: False: everything comes in one delta at the end.
        prefix: Text that the first delta starts with (the echoed prompt).
        num_prompt_tokens: Length of the prompt.
        trim_blanks: Whether trailing blanks are removed.
        clock: Seconds, as time.perf_counter.
        arrival_time: Of the request, by the clock; None: now.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: list[str],
        stop_tokens: Mapping[int, str],
        include_stop: bool,
        min_tokens: int,
        stream: bool,
        prefix: str,
        num_prompt_tokens: int,
        trim_blanks: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        arrival_time: float | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._stop_tokens = stop_tokens
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._stream = stream
        self._trim_blanks = trim_blanks
        self._text = prefix  # ready to be sent
        self._held = ""  # held back, after _text
        self._tokens: list[SampledToken] = []  # not sent yet
        self._context: tuple[int, ...] = ()  # ids of the last ones that were sent
        self._prompt_logprobs: list[SampledToken] | None = None
        self._cumulative_logprob = 0.0
        self._num_output_tokens = 0
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens = 0
        self._clock = clock
        self._arrival_time = clock() if arrival_time is None else arrival_time
        self._scheduled_time = 0.0
        self._first_token_time = 0.0
        self._last_token_time = 0.0
        self.gaps: list[float] = []  # seconds between consecutive tokens
        self.finish_reason: FinishReason | None = None
        self._has_ended = False  # the finish reason was taken

    def add(self, output: EngineOutput) -> None:
        """Take in an output of the engine; anything after the finish reason is ignored."""
        if self.finish_reason:
            return
        self._num_cached_tokens = output.num_cached_tokens
        self._scheduled_time = output.scheduled_time
        if not self._num_output_tokens:
            self._prompt_logprobs = output.prompt_logprobs
        for i, token in enumerate(output.tokens):
            is_last = i == len(output.tokens) - 1
            stops = is_last and output.finish_reason is FinishReason.STOP and not output.is_whole
            hidden = stops and not self._include_stop
            self._add_token(token, hidden)
            if not hidden and not self.finish_reason:
                self._stop_at(token.token_id)
            if self.finish_reason:
                return
        if output.finish_reason:
            self._add_text(self._detokenizer.finish())
        if output.finish_reason and not self.finish_reason:
            self.finish_reason = output.finish_reason
            self._text += self._held.rstrip() if self._trim_blanks else self._held

    @property
    def is_ready(self) -> bool:
        """Whether there is something to send."""
        if self.finish_reason:
            return not self._has_ended
        return bool(self._stream and self._text)

    def take(self) -> Delta:
        """The next delta. Once the answer has ended, every delta has its finish reason."""
        delta = Delta(
            self._text,
            self._tokens,
            self._cumulative_logprob,
            self.finish_reason,
            self._prompt_logprobs,
            self._context,
        )
        sent = (token.token_id for token in self._tokens[-4:])
        self._context = (*self._context, *sent)[-4:]
        self._text, self._tokens, self._prompt_logprobs = "", [], None
        self._has_ended = self.finish_reason is not None
        return delta

    def usage(self) -> AnswerUsage:
        """The answer's usage so far."""

        def since_arrival(moment: float) -> float:
            return round((moment - self._arrival_time) * 1e3, 3) if moment else 0.0

        return AnswerUsage(
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=self._num_cached_tokens,
            output_tokens=self._num_output_tokens,
            queue_ms=since_arrival(self._scheduled_time),
            ttft_ms=since_arrival(self._first_token_time),
            total_ms=since_arrival(self._clock()),
        )

    def _add_token(self, token: SampledToken, hidden: bool) -> None:
        now = self._clock()
        if self._num_output_tokens:
            self.gaps.append(now - self._last_token_time)
        else:
            self._first_token_time = now
        self._last_token_time = now
        self._num_output_tokens += 1
        self._tokens.append(token)
        if token.logprobs:
            self._cumulative_logprob += token.logprobs.logprob
        if not hidden:
            self._add_text(self._detokenizer.add(token.token_id))

    def _add_text(self, new: str) -> None:
        """Take in text; what may not be sent yet is held back."""
        text = self._held + new
        if self._num_output_tokens <= self._min_tokens:
            self._text += text
            return
        found = _first_stop(text, self._stop)
        if found is None:
            final = len(text) - _longest_started_stop(text, self._stop)
            if self._trim_blanks:
                final = min(final, len(text.rstrip()))
            self._text += text[:final]
            self._held = text[final:]
            return
        start, stop = found
        self._text += text[: start + len(stop) if self._include_stop else start]
        self._held = ""
        self.finish_reason = FinishReason.STOP

    def _stop_at(self, token_id: int) -> None:
        """End the answer if a stop string is this token, which the text hides."""
        stop = self._stop_tokens.get(token_id)
        if stop is None or self._num_output_tokens <= self._min_tokens:
            return
        if self._include_stop:
            self._text += self._held + stop
        else:
            self._text += self._held.rstrip() if self._trim_blanks else self._held
        self._held = ""
        self.finish_reason = FinishReason.STOP


def _first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(start, stop string) of the stop string that begins first; of equals the longest."""
    found = [(start, -len(stop), stop) for stop in stops if (start := text.find(stop)) >= 0]
    if not found:
        return None
    start, _, stop = min(found)
    return start, stop


def _longest_started_stop(text: str, stops: list[str]) -> int:
    """The length of the longest suffix of `text` that is a prefix of a stop string."""
    longest = max(map(len, stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
