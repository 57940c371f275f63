"""The plain data that crosses between front and engine: requests in, outputs out."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import astuple, dataclass, field
from enum import IntEnum, StrEnum
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from numpy.typing import NDArray

from tritium.backend.config import RepetitionDetection


class FinishReason(StrEnum):
    """Why a sequence ended. With the first three there is an answer; with the others an error."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # a deadline has passed
    SHUTDOWN = "shutdown"
    ERROR = "error"
    INVALID = "invalid_arg"  # the request's grammar can't be satisfied


class RequestClass(IntEnum):
    """Scheduling class: the smaller value is scheduled first and preempts the larger one."""

    INTERACTIVE = 0
    OFFLINE = 1


class Milestone(IntEnum):
    """The stages of a request, in order."""

    ADMISSION = 0  # the request has left the queue
    FIRST_TOKEN = 1
    END = 2


class Deadline(NamedTuple):
    """A request that has not reached the milestone at `time` ends with `error`."""

    time: float  # seconds of time.perf_counter()
    milestone: Milestone
    error: str


class GrammarState(Protocol):
    """The state of one answer in its grammar."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete and no token can follow."""

    @property
    def error(self) -> str:
        """Why the last token was not accepted."""

    def accept(self, token_id: int) -> bool:
        """Advance by the sampled token. False: the grammar rejects it; the answer must end."""

    @staticmethod
    def fill_masks(states: Seq[Any], masks: NDArray[np.int32], rows: Seq[int]) -> None:
        """Write each state's row: set the bits of the tokens that may come next, clear the others.

        Args:
            states: States of one class.
            masks: [num_rows, ceil(vocab_size / 32)] int32; bit token % 32 of word token // 32.
            rows: One row of `masks` per state.
        """


class Grammar(Protocol):
    """A constraint on an answer's tokens."""

    def start(self) -> GrammarState:
        """The state of a new, empty answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The sampling parameters that reach the engine as the client sent them.

    Names, bounds and meanings are vLLM's. The front checks the bounds (`SamplingParams`, which
    inherits these fields) and copies all of them into the engine's request; a parameter that needs
    no translation is declared here alone.
    """

    min_tokens: Annotated[int, Ge(0)] = 0  # a shorter answer does not end at a stop token
    temperature: Annotated[float, Ge(0), Le(100)] = 1.0  # 0: greedy
    top_k: Annotated[int, Ge(-1)] = 0  # 0 and -1: all tokens
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    # Of tokens in prompt or output; CTRL (Keskar et al., 2019).
    repetition_penalty: Annotated[float, Ge(0.01), Le(100)] = 1.0
    # Subtracted from the logits of tokens in the output.
    presence_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    # Subtracted once per occurrence of the token in the output.
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    # Within its class, the smaller value is admitted first.
    priority: Annotated[int, Ge(-(2**31)), Lt(2**31)] = 0


@dataclass(frozen=True, slots=True)
class EngineRequest(SamplingOptions):
    """What the front hands to the engine: already validated, plain data except `grammar`."""

    request_id: int
    prompt_token_ids: Seq[int]  # at least one
    max_tokens: int  # at least 1
    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = field(default=0.0, kw_only=True)  # greedy where no client decides
    seed: int = 0  # 64 bits; a token's random number depends only on (seed, position)
    num_logprobs: int | None = None  # None: none; 0: of the chosen token; k: also of the top k
    num_prompt_logprobs: int | None = None  # likewise, for all prompt tokens except the first
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token id sequences that the output never contains
    grammar: Grammar | None = None
    repetition_detection: RepetitionDetection | None = None
    request_class: RequestClass = RequestClass.INTERACTIVE
    deadlines: tuple[Deadline, ...] = ()
    fork_of: int | None = None  # an earlier request, itself no fork, whose prompt's KV it shares
    speculative: bool = False  # whether draft tokens may be tried, if the engine has any
    lora: str = ""  # the adapter's name, "": the base model
    cache_salt: bytes = b""  # prompts share KV blocks only under equal salts
    cache_scope: str = ""  # prefix reuse is measured and decided per scope

    @property
    def needs_history(self) -> bool:
        """Whether the host must know all previous tokens before the next one can be sampled."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.bad_words
            or self.grammar
        )

    @property
    def max_kv_tokens(self) -> int:
        """The most tokens whose KV this request can need; the last token's is never computed."""
        return len(self.prompt_token_ids) + self.max_tokens - 1


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position, by the model's own distribution (temperature 1)."""

    logprob: float  # of the chosen token
    rank: int  # of the chosen token, 1 is the most likely
    top: list[tuple[int, float]]  # (token id, logprob), the most likely first


class SampledToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class SequenceUsage:
    """What a sequence used of the device. The engine adds to it until the sequence has ended."""

    # -- set by usage.py --
    prefill_ns: int = 0
    decode_ns: int = 0
    recompute_ns: int = 0  # computing again after a preemption; not billed
    saved_ns: int = 0  # estimated time that computing the cached tokens would have taken
    # -- set by the block manager --
    block_seconds: float = 0.0  # of KV blocks; a block with k holders counts 1/k for each
    peak_blocks: int = 0  # most blocks held at once
    peak_own_blocks: int = 0  # most blocks held at once, without those found in the prefix cache
    # -- set by the admitter --
    num_preemptions: int = 0

    @property
    def busy_ns(self) -> int:
        """The device time that is billed."""
        return self.prefill_ns + self.decode_ns

    @classmethod
    def total(cls, usages: Iterable["SequenceUsage"]) -> "SequenceUsage":
        """The sum, field by field."""
        return cls(*map(sum, zip(*map(astuple, (cls(), *usages)), strict=True)))


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What the engine hands back after a step, one per sequence that has something new."""

    request_id: int
    tokens: list[SampledToken]
    finish_reason: FinishReason | None = None
    is_whole: bool = False  # stopped without a stop token: the last token is part of the answer
    error: str = ""  # the reason, where `finish_reason` is an error
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    scheduled_time: float = 0.0  # time.perf_counter() of the first admission, 0: never admitted
    prompt_logprobs: list[SampledToken] = field(default_factory=list)  # all, in each output
    usage: SequenceUsage = field(default_factory=SequenceUsage)  # final with the finish reason
