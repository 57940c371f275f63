"""Which requests of a trace are replayed, when, and with which lengths."""

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tritium.backend.accounts.trace import TraceRequest
from tritium.loadtests.traces.format import read_trace


class Planned(msgspec.Struct, frozen=True):
    """A planned request."""

    index: int  # in the plan
    due: float  # seconds from the start
    input_length: int  # tokens
    output_length: int
    hash_ids: list[int]
    block_size: int  # prompt tokens per hash id
    business_line: str
    request_class: str

    def as_trace(self) -> TraceRequest:
        """The request as a row of a trace."""
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
        trace: Path of a trace in Tritium's format.
        start, window: Seconds of the trace; a window of 0 reaches to its end.
        rate: Factor by which time runs faster than recorded.
        input_scale, output_scale: Factors for lengths. With hash ids, `input_scale` is rounded so
            that a block has a whole number of tokens.
    """

    trace: Path
    start: float = 0.0
    window: float = 0.0
    rate: float = 1.0
    input_scale: float = 1.0
    output_scale: float = 1.0

    def check(self) -> None:
        """Check the plan.

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
            TraceError: a row is bad.
            ValueError: a field of the plan is wrong.
        """
        self.check()
        for request in read_trace(self.trace):
            time = request.timestamp / 1000 - self.start
            if self.window and time >= self.window:
                return
            if time >= 0:
                yield request

    def requests(self) -> Iterator[Planned]:
        """Plan one request after the other; raises the errors of `source`."""
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
