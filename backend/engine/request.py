"""The plain data that crosses between front and engine: requests in, outputs out."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from tritium.backend.config import RepetitionDetection


class FinishReason(StrEnum):
    """Why a sequence ended. The first three are answers; the others are not."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # one of its deadlines has passed
    SHUTDOWN = "shutdown"
    ERROR = "error"
    INVALID = "invalid_arg"  # what the request demands can't be had


class RequestClass(IntEnum):
    """Whom the others give way to: the smaller one goes first."""

    INTERACTIVE = 0
    OFFLINE = 1


class Milestone(IntEnum):
    """What a request gets to, one after the other."""

    ADMISSION = 0  # it has left the queue
    FIRST_TOKEN = 1
    END = 2


class Deadline(NamedTuple):
    """A request ends with `error`, if it has not got to the milestone by then."""

    time: float  # time.perf_counter()
    milestone: Milestone
    error: str


class GrammarState(Protocol):
    """How far one answer has got in its grammar."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing can follow."""
        ...

    @property
    def error(self) -> str:
        """Why the last token was not accepted."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on by the token that was sampled. False: it does not fit, nor will any other."""
        ...

    @staticmethod
    def fill_masks(states: Seq[Any], masks: np.ndarray, rows: Seq[int]) -> None:
        """Set the bits of the tokens that may come next, and of no others, in each state's row.

        Args:
            states: All of one class.
            masks: [num_rows, ceil(vocab_size / 32)] int32; bit token % 32 of word token // 32.
            rows: One for each state.
        """
        ...


class Grammar(Protocol):
    """What an answer's tokens have to obey."""

    def start(self) -> GrammarState:
        """For a new answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The sampling parameters that reach the engine as the client sent them.

    Names, bounds and meanings are vLLM's. The front checks the bounds (`SamplingParams`, which
    inherits these fields) and copies all of them into the engine's request; a parameter that needs
    no translation is declared here alone.
    """

    min_tokens: Annotated[int, Ge(0)] = 0  # tokens to sample before a stop token may follow
    temperature: Annotated[float, Ge(0), Le(100)] = 1.0  # 0: greedy
    top_k: Annotated[int, Ge(-1)] = 0  # 0 and -1: all tokens
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    # Of tokens in prompt or output; CTRL (Keskar et al., 2019).
    repetition_penalty: Annotated[float, Ge(0.01), Le(100)] = 1.0
    # Subtracted from the logits of tokens in the output, once; and once per occurrence.
    presence_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    # Within its class, a waiting request with a smaller one is admitted first.
    priority: Annotated[int, Ge(-(2**31)), Lt(2**31)] = 0


@dataclass(frozen=True, slots=True)
class EngineRequest(SamplingOptions):
    """What the front hands to the engine. Plain data but for `grammar`, already validated."""

    request_id: int
    prompt_token_ids: Seq[int]  # at least one
    max_tokens: int  # at least 1
    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = field(default=0.0, kw_only=True)  # greedy where no client decides
    seed: int = 0  # of 64 bits; the random number of a token depends on (seed, position) alone
    num_logprobs: int | None = None  # None: none; 0: the chosen token's; k: the top k as well
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens but the first
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # none: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids that never stand in this order
    grammar: Grammar | None = None  # that the answer has to obey
    repetition_detection: RepetitionDetection | None = None
    request_class: RequestClass = RequestClass.INTERACTIVE
    deadlines: tuple[Deadline, ...] = ()
    fork_of: int | None = None  # an earlier request, no fork, with this prompt: they share its KV
    speculative: bool = False  # whether draft tokens may be tried, where the engine has any
    lora: str = ""  # the adapter's name, "": the base model
    cache_salt: bytes = b""  # prompts share KV blocks only under equal salts
    cache_scope: str = ""  # for whose prompts together it is decided whether they are reused

    @property
    def needs_history(self) -> bool:
        """Whether the host must know all tokens so far before the next one can be sampled."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.bad_words
            or self.grammar
        )

    @property
    def max_kv_tokens(self) -> int:
        """The most tokens whose KV this request can need: the last one's is never computed."""
        return len(self.prompt_token_ids) + self.max_tokens - 1


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position, of the model's own distribution (temperature 1)."""

    logprob: float  # of the chosen token
    rank: int  # of the chosen token, 1 is the most likely
    top: list[tuple[int, float]]  # (token id, logprob), the most likely first


class SampledToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None


class Figures(NamedTuple):
    """What a sequence used of the device, when it has ended."""

    prefill_ns: int = 0
    decode_ns: int = 0
    recompute_ns: int = 0  # again, after preemption; on no one's bill
    saved_ns: int = 0  # what computing its cached tokens would have taken, estimated
    block_seconds: float = 0.0  # of KV blocks; one with k holders counts 1/k for each
    peak_blocks: int = 0  # the most that it held at once
    peak_own_blocks: int = 0  # the same without those that it found in the prefix cache
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What the engine hands back after a step, for each request that has something new."""

    request_id: int
    tokens: list[SampledToken]
    finish_reason: FinishReason | None = None
    is_whole: bool = False  # STOP came without a stop token: the last one is part of the answer
    error: str = ""  # what went wrong, for those that are no answers
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    num_preemptions: int = 0
    scheduled_time: float = 0.0  # time.perf_counter() when it first left the queue, 0: never
    prompt_logprobs: list[SampledToken] = field(
        default_factory=list
    )  # all, from the first output on
    figures: Figures = field(default_factory=Figures)  # with the finish reason
