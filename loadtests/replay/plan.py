"""What of a trace is replayed, when, and at which lengths."""

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tritium.backend.accounts.trace import TraceRequest
from tritium.loadtests.traces.format import read_trace


class Planned(msgspec.Struct, frozen=True):
    """A request that is to be sent."""

    index: int  # in the plan
    due: float  # seconds from the start
    input_length: int  # tokens
    output_length: int
    hash_ids: list[int]
    block_size: int  # tokens of the prompt that one of them stands for
    business_line: str
    request_class: str

    def as_trace(self) -> TraceRequest:
        """The same as a row of a trace."""
        return TraceRequest(
            self.due * 1000,
            self.input_length,
            self.output_length,
            self.hash_ids,
            self.block_size,
            self.business_line,
            self.request_class,
        )


class Plan(msgspec.Struct, frozen=True):
    """A part of a trace, at a scale.

    Args:
        trace: A trace in our format.
        start, window: Seconds of the trace; a window of 0 goes to its end.
        rate: How much faster than recorded time runs.
        input_scale, output_scale: Factors of lengths. With hash ids, the first is rounded so that
            blocks have whole tokens.
    """

    trace: Path
    start: float = 0.0
    window: float = 0.0
    rate: float = 1.0
    input_scale: float = 1.0
    output_scale: float = 1.0

    def check(self) -> None:
        """Refuse what can't be planned.

        Raises:
            ValueError: names the field, its value and what is allowed.
        """
        for name in ("rate", "input_scale", "output_scale"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} can't be {value}; it is more than 0")
        for name in ("start", "window"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} can't be {value}; it is a number of seconds")

    def source(self) -> Iterator[TraceRequest]:
        """The requests of the trace within the window.

        Raises:
            TraceError: a bad row.
            ValueError: a field can't be.
        """
        self.check()
        for request in read_trace(self.trace):
            time = request.timestamp / 1000 - self.start
            if self.window and time >= self.window:
                return
            if time >= 0:
                yield request

    def requests(self) -> Iterator[Planned]:
        """Plan one request after the other; raises what `source` does."""
        for index, request in enumerate(self.source()):
            yield self._scale(index, request)

    def _scale(self, index: int, request: TraceRequest) -> Planned:
        block_size, scale = request.hash_block_size, self.input_scale
        if request.hash_ids:
            block_size = max(1, round(block_size * scale))
            scale = block_size / request.hash_block_size
        return Planned(
            index,
            (request.timestamp / 1000 - self.start) / self.rate,
            max(1, round(request.input_length * scale)),
            max(1, round(request.output_length * self.output_scale)),
            request.hash_ids,
            block_size,
            request.business_line,
            request.request_class,
        )
