"""A request inside the engine: token ids in, token ids out. Knows nothing of text or tensors."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from tritium.backend.config import RepetitionDetection
from tritium.backend.engine.repetition import ends_in_loop
from tritium.backend.engine.speculative import NgramProposer


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


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


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the front hands to the engine. Plain data but for `grammar`, already validated."""

    request_id: int
    prompt_token_ids: Seq[int]  # at least one
    max_tokens: int  # at least 1
    min_tokens: int = 0  # so many are sampled before one of stop_token_ids can be
    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # of 64 bits; the random number of a token depends on (seed, position) alone
    num_logprobs: int | None = None  # None: none; 0: the chosen token's; k: the top k as well
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens but the first
    repetition_penalty: float = 1.0  # of tokens in prompt or output; CTRL (Keskar et al., 2019)
    presence_penalty: float = 0.0  # taken off the logits of tokens in the output
    frequency_penalty: float = 0.0  # the same, times how often they are there
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # none: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids that never stand in this order
    grammar: Grammar | None = None  # that the answer has to obey
    repetition_detection: RepetitionDetection | None = None
    request_class: RequestClass = RequestClass.INTERACTIVE
    priority: int = 0  # within its class, who waits with a smaller one is admitted first
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


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's state in the engine.

    A step lets `num_computed_tokens` catch up with `num_tokens`, prompt or output alike::

        |<------------------ num_tokens ------------------->|
        |<---- num_prompt_tokens ---->|<----- output ------>|
        |<- num_computed_tokens ->|<- what is to be done -->|

    Where steps overlap, the last output tokens may be pending: sampled on the device by a step
    that has been launched, to be known when that step is read. They count among `num_tokens`.
    """

    request: EngineRequest
    token_ids: list[int] = field(init=False)  # prompt, then output
    grammar: GrammarState | None = field(init=False)  # has accepted the known output tokens
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0  # set by the scheduler
    scheduled_time: float = 0.0  # set by the scheduler at the first admission
    num_preemptions: int = 0  # set by the scheduler
    num_lost_tokens: int = 0  # that were computed before a preemption; set by the scheduler
    num_cached_tokens: int = 0  # set by the scheduler at the first admission
    prompt_logprobs: list[SampledToken] = field(default_factory=list)  # set by the model runner
    arrival: int = 0  # how many came before; set by the scheduler
    queued_time: float = 0.0  # when it last joined the queue; set by the scheduler
    admission: int = 0  # how many were admitted before, at the last time; set by the scheduler
    is_promoted: bool = False  # has waited so long that it goes first; set by the scheduler
    num_bypasses: int = 0  # who went first, as it lacked blocks; set by the scheduler
    leader: "Sequence | None" = None  # whose prompt's blocks it starts with; set by the scheduler
    forks: list["Sequence"] = field(default_factory=list)  # wait for its prompt; by the scheduler
    proposer: NgramProposer | None = None  # of its draft tokens; set by the scheduler

    # -- owned by the block manager --
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks hashed so far
    reuses_prefix: bool = True  # and lets others reuse its; set by the engine
    num_published_blocks: int = 0  # leading blocks of block_table that others may find
    num_promised_blocks: int = 0  # it can have so many in all, whatever others want; 0: no promise
    num_found_blocks: int = 0  # leading blocks of block_table that it did not take itself
    peak_blocks: int = 0
    peak_own_blocks: int = 0
    block_ns: float = 0.0  # of KV blocks, once it holds none

    # -- owned by usage.py --
    prefill_ns: int = 0
    decode_ns: int = 0
    recompute_ns: int = 0
    saved_ns: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.grammar = self.request.grammar.start() if self.request.grammar else None

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def figures(self) -> Figures:
        """For a sequence that holds no block any more."""
        return Figures(
            self.prefill_ns,
            self.decode_ns,
            self.recompute_ns,
            self.saved_ns,
            self.block_ns / 1e9,
            self.peak_blocks,
            self.peak_own_blocks,
            self.num_preemptions,
        )

    @property
    def rank(self) -> RequestClass:
        """The class that it runs in."""
        return RequestClass.INTERACTIVE if self.is_promoted else self.request.request_class

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - len(self.request.prompt_token_ids)

    @property
    def num_tokens_to_compute(self) -> int:
        """What a step has to do: nothing where the last token is pending, which needs no KV."""
        if self.num_pending_tokens and self.num_output_tokens >= self.request.max_tokens:
            return 0
        return self.num_tokens - self.num_computed_tokens

    def finish_reason(self) -> FinishReason | None:
        """Whether the last known token was the last one."""
        request = self.request
        if self.token_ids[-1] in request.stop_token_ids:
            return FinishReason.STOP
        if self.grammar and self.grammar.is_complete:
            return FinishReason.STOP
        if len(self.token_ids) - self.num_prompt_tokens >= request.max_tokens:
            return FinishReason.LENGTH
        detection = request.repetition_detection
        if detection and ends_in_loop(self.token_ids, self.num_prompt_tokens, detection):
            return FinishReason.REPETITION
        return None


class ScheduledSequence(NamedTuple):
    """A sequence's part of a step, fixed when the step is scheduled."""

    sequence: Sequence
    start: int  # the step computes tokens [start, end)
    end: int
    samples: bool  # whether that reaches the sequence's last token, and so yields the next one
    draft_token_ids: tuple[int, ...] = ()  # the last of them, behind the sequence's own

    @property
    def num_new_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_samples(self) -> int:
        """Tokens that the step yields: the one behind the sequence's last, and behind each
        draft token the one that would follow, were it right."""
        return 1 + len(self.draft_token_ids) if self.samples else 0

    def with_draft(self, draft_token_ids: list[int]) -> "ScheduledSequence":
        end = self.end + len(draft_token_ids)
        return self._replace(end=end, draft_token_ids=tuple(draft_token_ids))

    @classmethod
    def of(cls, sequence: Sequence, num_new_tokens: int) -> "ScheduledSequence":
        """The next tokens of a sequence."""
        start = sequence.num_computed_tokens
        end = start + num_new_tokens
        return cls(sequence, start, end, end == sequence.num_tokens)
