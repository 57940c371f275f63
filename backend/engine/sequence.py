"""A request's state inside the engine. Knows nothing of text or tensors."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tritium.backend.engine.repetition import ends_in_loop
from tritium.backend.engine.request import (
    EngineRequest,
    FinishReason,
    GrammarState,
    RequestClass,
    SampledToken,
    SequenceUsage,
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
        |<- num_computed_tokens ->|<----- to compute ------>|

    Where steps overlap, the last output tokens may be pending: sampled on the device by a step in
    flight, unknown to the host until that step is read. `num_tokens` includes them.
    """

    request: EngineRequest
    token_ids: list[int] = field(init=False)  # prompt, then known output
    grammar: GrammarState | None = field(init=False)  # has accepted the known output tokens
    usage: SequenceUsage = field(default_factory=SequenceUsage)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    prompt_logprobs: list[SampledToken] = field(default_factory=list)  # set by the model runner
    reuses_prefix: bool = True  # whether its blocks are found and published; set by the engine

    # -- set by the scheduler --
    num_pending_tokens: int = 0
    arrival_index: int = 0  # number of sequences that arrived before
    last_step: int = -1  # number of the last step that computed some of it
    leader: "Sequence | None" = None  # the sequence that it forks
    forks: list["Sequence"] = field(default_factory=list)  # wait until this prompt is computed
    proposer: NgramProposer | None = None  # of draft tokens

    # -- set by the admitter --
    queued_time: float = 0.0  # when it last joined the queue
    scheduled_time: float = 0.0  # of the first admission
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    admission_index: int = 0  # number of admissions before its last one
    is_promoted: bool = False  # has waited so long that it goes first
    num_bypasses: int = 0  # sequences admitted before it while it lacked blocks
    num_lost_tokens: int = 0  # leading tokens that had been computed before a preemption

    # -- set by the block manager --
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the leading full blocks
    num_published_blocks: int = 0  # leading blocks of block_table that others may find
    num_promised_blocks: int = 0  # blocks in all that it is guaranteed to get; 0: no promise
    num_found_blocks: int = 0  # leading blocks of block_table that were found, not allocated

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.grammar = self.request.grammar.start() if self.request.grammar else None

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def rank(self) -> RequestClass:
        """The class by which it is scheduled."""
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
        """Tokens left for the next steps; none if the last token is pending, which needs no KV."""
        if self.num_pending_tokens and self.num_output_tokens >= self.request.max_tokens:
            return 0
        return self.num_tokens - self.num_computed_tokens

    def finish_reason(self) -> FinishReason | None:
        """Why the answer ends with the last known token; None: it goes on."""
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
    """One sequence's share of a step, fixed when the step is scheduled."""

    sequence: Sequence
    start: int  # the step computes tokens [start, end)
    end: int
    samples: bool  # whether the step reaches the last token and so samples the next one
    draft_token_ids: tuple[int, ...] = ()  # the last tokens of [start, end), after the sequence's

    @property
    def num_new_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_samples(self) -> int:
        """Tokens that the step samples: one, and one more per draft token."""
        return 1 + len(self.draft_token_ids) if self.samples else 0

    @property
    def can_run(self) -> bool:
        """Whether the sequence is still as it was when the step was scheduled."""
        sequence = self.sequence
        is_running = sequence.status is SequenceStatus.RUNNING
        return is_running and sequence.num_computed_tokens == self.start

    @classmethod
    def of(cls, sequence: Sequence, num_new_tokens: int) -> "ScheduledSequence":
        """The sequence's next `num_new_tokens` tokens."""
        start = sequence.num_computed_tokens
        end = start + num_new_tokens
        return cls(sequence, start, end, end == sequence.num_tokens)
