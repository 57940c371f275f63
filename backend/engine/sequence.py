"""A request's state inside the engine. Knows nothing of text or tensors."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tritium.backend.engine.repetition import ends_in_loop
from tritium.backend.engine.request import (
    EngineRequest,
    Figures,
    FinishReason,
    GrammarState,
    RequestClass,
    SampledToken,
)
from tritium.backend.engine.speculative import NgramProposer


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


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
