"""What a request used, as its client and its row of the ledger tell it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """What a request used. Times in milliseconds, from the request's arrival."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, not computed again
    output_tokens: int
    queue_ms: float
    ttft_ms: float  # time to first token
    total_ms: float
    preemptions: int = 0  # how often it was recomputed, to give others its KV blocks
    # Of the device; added when the engine has ended the request.
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    recompute_ms: float = 0.0  # after preemption; not billed
    saved_ms: float = 0.0  # that computing the cached tokens would have taken, estimated
    kv_block_seconds: float = 0.0
    peak_kv_bytes: int = 0
    peak_own_kv_bytes: int = 0  # without what was found in the prefix cache
    cost: float | None = None  # where the server has a price

    @classmethod
    def of_samples(cls, usages: list["RequestUsage"]) -> "RequestUsage":
        """What a request used whose prompt has several answers."""
        first = usages[0]
        return cls(
            first.prompt_tokens,
            first.cached_tokens,
            sum(usage.output_tokens for usage in usages),
            first.queue_ms,
            min((usage.ttft_ms for usage in usages if usage.output_tokens), default=0.0),
            max(usage.total_ms for usage in usages),
            max(usage.preemptions for usage in usages),
        )
