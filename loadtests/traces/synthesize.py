"""Synthetic traces with given statistics; the same seed gives the same trace."""

import math
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np

from tritium.backend.accounts.trace import TraceRequest

_BLOCK_SIZE = 16
_P95 = 1.6449  # 95th percentile of the normal distribution


class Lengths(NamedTuple):
    """Lengths of prompts or answers in tokens, with a log-normal distribution."""

    median: float
    p95: float

    def draw(self, rng: np.random.Generator) -> int:
        sigma = math.log(self.p95 / self.median) / _P95
        return max(1, round(self.median * math.exp(sigma * rng.standard_normal())))


class Shape(NamedTuple):
    """The statistics of a synthetic trace."""

    num_requests: int
    rate: float  # requests/s
    input_length: Lengths
    output_length: Lengths
    dispersion: float = 1.0  # dispersion of arrivals in bins of 1 s; 1: Poisson
    hit_ratio: float = 0.0  # share of prompt tokens, with an unlimited prefix cache

    def check(self) -> None:
        """Check the values.

        Raises:
            ValueError: names the field, its value and what is allowed.
        """
        for name, value, is_right, allowed in (
            ("num_requests", self.num_requests, self.num_requests >= 1, "at least 1"),
            ("rate", self.rate, self.rate > 0, "more than 0"),
            ("dispersion", self.dispersion, self.dispersion >= 1, "at least 1"),
            ("hit_ratio", self.hit_ratio, 0 <= self.hit_ratio < 1, "at least 0, less than 1"),
        ):
            if not is_right:
                raise ValueError(f"{name} can't be {value}; it is {allowed}")
        for name, lengths in (("input", self.input_length), ("output", self.output_length)):
            if not 1 <= lengths.median <= lengths.p95:
                raise ValueError(
                    f"{name}_length can't have median {lengths.median} and p95 {lengths.p95}; "
                    "the median is at least 1, and p95 at least the median"
                )


def synthesize(shape: Shape, seed: int = 0) -> Iterator[TraceRequest]:
    """Generate the requests of a trace.

    Raises:
        ValueError: see `Shape.check`.
    """
    shape.check()
    rng = np.random.default_rng(seed)
    ids = count()
    recent: deque[list[int]] = deque([[]], maxlen=64)
    tokens = hits = 0
    for timestamp in _arrivals(shape, rng):
        length = shape.input_length.draw(rng)
        earlier = recent[rng.integers(len(recent))]
        # As many shared blocks as bring the share of all tokens so far to the wanted ratio.
        missing = shape.hit_ratio * (tokens + length) - hits
        shared = min(round(missing / _BLOCK_SIZE), len(earlier), (length - 1) // _BLOCK_SIZE)
        shared = max(shared, 0)
        num_blocks = -(-length // _BLOCK_SIZE)
        hash_ids = earlier[:shared] + [next(ids) for _ in range(num_blocks - shared)]
        recent.append(hash_ids[: length // _BLOCK_SIZE])
        tokens, hits = tokens + length, hits + shared * _BLOCK_SIZE
        yield TraceRequest(
            timestamp,
            length,
            shape.output_length.draw(rng),
            hash_ids=hash_ids,
            hash_block_size=_BLOCK_SIZE,
        )


def _arrivals(shape: Shape, rng: np.random.Generator) -> Iterator[float]:
    """Arrival times in milliseconds, the first at 0.

    Each second has its own rate, drawn so that the variance of the counts is `dispersion` times
    their mean (a negative binomial distribution).
    """
    first_second, given = 0, 0
    for second in count():
        rate = shape.rate
        if shape.dispersion > 1:
            rate = rng.gamma(rate / (shape.dispersion - 1), shape.dispersion - 1)
        for time in np.sort(rng.random(rng.poisson(rate))):
            if not given:
                first_second = second
            since = second - first_second + float(time) if given else 0.0
            yield round(since * 1000, 3)
            given += 1
            if given == shape.num_requests:
                return
