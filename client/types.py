"""The client's results: deltas, answers, usage, errors. Knows nothing of transports."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

_STATUSES = ("INVALID_ARGUMENT", "UNIMPLEMENTED", "UNAVAILABLE", "CANCELLED", "INTERNAL")


class GenerationError(Exception):
    """The server refused a request, ended its answer early, or could not be reached.

    `code` is a gRPC status name (`INVALID_ARGUMENT`, `UNAVAILABLE`, ...) over both transports, or
    `UNKNOWN` if the server sent a message without a code.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    @classmethod
    def from_message(cls, message: str, code: str = "UNKNOWN") -> Self:
        """Parse the server's message: "STATUS: message" if `return_error_code` had effect.

        `code` is used otherwise: an error raised before the model has only its text.
        """
        status, separator, rest = message.partition(": ")
        if separator and status in _STATUSES:
            return cls(status, rest)
        return cls(code, message)


class ConnectionLost(GenerationError):
    """The server could not be reached, or the connection broke during an answer."""

    def __init__(self, message: str) -> None:
        super().__init__("UNAVAILABLE", message)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one answer used, as measured by the server."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    preemptions: int = 0
    prefill_ms: float = 0.0  # device time, like decode_ms
    decode_ms: float = 0.0
    recompute_ms: float = 0.0  # after preemption; not billed
    saved_ms: float = 0.0  # by the prefix cache, estimated
    kv_block_seconds: float = 0.0
    peak_kv_bytes: int = 0
    peak_own_kv_bytes: int = 0  # without blocks found in the prefix cache
    cost: float | None = None  # None if the server has no price

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the server's `usage` output; keys of newer servers are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in json.loads(text).items() if key in known})


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of an answer; the last one carries `finish_reason` and `usage`."""

    text: str
    finish_reason: str | None = None
    usage: Usage | None = None
    num_output_tokens: int = 0

    @classmethod
    def from_outputs(cls, outputs: Mapping[str, Any]) -> Self:
        """Build a delta from one response's outputs, each reduced to its only element."""
        reason = outputs.get("finish_reason")
        usage = outputs.get("usage")
        return cls(
            text=outputs.get("text_output", ""),
            # In the contract the string None means that the answer has not ended.
            finish_reason=None if reason == "None" else reason,
            usage=Usage.from_json(usage) if usage else None,
            num_output_tokens=outputs.get("num_output_tokens", 0),
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer."""

    text: str
    finish_reason: str | None
    usage: Usage | None
