"""What a request used: one record, which its client, the ledger, the log and the metrics read.

It joins what the front saw (`AnswerUsage`) with what the engine measured (`SequenceUsage`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_NS_PER_HOUR = 3_600_000_000_000


class AnswerUsage(NamedTuple):
    """What the front saw. Times in milliseconds from the request's arrival; 0: did not happen."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    output_tokens: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0  # time to first token
    total_ms: float = 0.0

    @classmethod
    def of_request(cls, answers: Sequence["AnswerUsage"]) -> "AnswerUsage":
        """The usage of a request with several answers to one prompt, from that of each answer."""
        first = answers[0]
        return first._replace(
            output_tokens=sum(answer.output_tokens for answer in answers),
            ttft_ms=min(
                (answer.ttft_ms for answer in answers if answer.output_tokens), default=0.0
            ),
            total_ms=max(answer.total_ms for answer in answers),
        )


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request that has ended, with or without an answer. The fields are the ledger's columns."""

    key: str  # unique over all ledgers: "<server>/<number>"
    request_id: str  # chosen by the client; "": none
    trace_id: str  # of W3C's traceparent; "": none
    business_line: str
    request_class: str
    arrival: float  # seconds since 1970
    outcome: str  # a finish reason or an error's code
    n: int  # answers to the prompt
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float
    ttft_ms: float
    total_ms: float
    prefill_ns: int
    decode_ns: int
    recompute_ns: int
    saved_ns: int
    kv_block_seconds: float
    peak_blocks: int
    peak_own_blocks: int
    preemptions: int

    @property
    def busy_ns(self) -> int:
        """The device time that is billed."""
        return self.prefill_ns + self.decode_ns

    def usage(self, block_bytes: int, price_per_hour: float | None) -> dict[str, float | None]:
        """The `usage` output of the request's last response.

        Args:
            block_bytes: Size of a KV block.
            price_per_hour: Price of the device; None: the cost is None.
        """
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "queue_ms": self.queue_ms,
            "ttft_ms": self.ttft_ms,
            "total_ms": self.total_ms,
            "preemptions": self.preemptions,
            "prefill_ms": _ms(self.prefill_ns),
            "decode_ms": _ms(self.decode_ns),
            "recompute_ms": _ms(self.recompute_ns),
            "saved_ms": _ms(self.saved_ns),
            "kv_block_seconds": round(self.kv_block_seconds, 6),
            "peak_kv_bytes": self.peak_blocks * block_bytes,
            "peak_own_kv_bytes": self.peak_own_blocks * block_bytes,
            "cost": None
            if price_per_hour is None
            else self.busy_ns / _NS_PER_HOUR * price_per_hour,
        }


def _ms(duration_ns: int) -> float:
    return round(duration_ns / 1e6, 3)
