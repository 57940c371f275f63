"""The cost of a step's tokens, context and sequences on this device, measured before serving."""

import logging
import time
from itertools import combinations
from typing import NamedTuple

import numpy as np

from tritium.backend.engine.request import EngineRequest
from tritium.backend.engine.sequence import ScheduledSequence, Sequence
from tritium.backend.engine.usage import DEFAULT_WEIGHTS, Weights
from tritium.backend.runner.model_runner import ModelRunner

logger = logging.getLogger("tritium")

_GOOD_FIT = 0.8  # explained share of the variance


class MeasuredStep(NamedTuple):
    """A step of the warm-up, to fit weights to."""

    num_tokens: int
    attended: int  # tokens attended to, summed over the step's tokens
    num_sequences: int
    duration: int  # ns


class _Shape(NamedTuple):
    num_sequences: int
    start: int  # computed tokens per sequence
    num_new: int  # new tokens per sequence

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.num_new

    def measured(self, duration: int) -> MeasuredStep:
        attended = self.num_tokens * (2 * self.start + self.num_new + 1) // 2
        return MeasuredStep(self.num_tokens, attended, self.num_sequences, duration)


_SHAPES = [
    *(_Shape(1, 0, 1), _Shape(8, 0, 1), _Shape(1, 511, 1), _Shape(8, 511, 1)),
    *(_Shape(1, 0, 32), _Shape(1, 512, 32), _Shape(1, 0, 64)),
]
_SECONDS = 2  # after this time no further round starts


def measure_weights(runner: ModelRunner, max_num_seqs: int, max_num_tokens: int) -> Weights:
    """Fit weights to some steps of the real model; the default weights if no fit succeeds.

    Args:
        max_num_seqs: The most sequences per step.
        max_num_tokens: The most tokens per step.
    """
    shapes = [
        shape
        for shape in _SHAPES
        if shape.start + shape.num_new <= runner.num_positions
        and shape.num_sequences <= max_num_seqs
        and shape.num_tokens <= max_num_tokens
    ]
    batches = [_batch(runner, shape) for shape in shapes]

    def durations() -> list[int]:
        return [_duration(runner, batch) for batch in batches]

    # The fastest run of each shape counts, as other processes only slow a run down. On a quiet
    # machine two rounds are enough.
    deadline = time.monotonic() + _SECONDS
    fastest, weights = durations(), None
    while not weights:
        if is_early := time.monotonic() < deadline:
            fastest = [*map(min, fastest, durations())]
        weights = fit([shape.measured(ns) for shape, ns in zip(shapes, fastest, strict=True)])
        if not is_early:
            break
    logger.info(
        f"cost of a step, in picoseconds: {weights or DEFAULT_WEIGHTS}"
        + ("" if weights else "; by default, as the warm-up's steps don't fit")
    )
    return weights or DEFAULT_WEIGHTS


def fit(steps: list[MeasuredStep]) -> Weights | None:
    """Least-squares fit of steps' times, without negative weights; None where the fit is poor.

    The model also has a constant per step; that time is divided in proportion to the weights.
    """
    if len(steps) <= 4:  # four unknowns: anything fits
        return None
    columns = np.array([[s.num_tokens, s.attended, s.num_sequences, 1] for s in steps], float)
    durations = np.array([s.duration for s in steps], float)
    variance = ((durations - durations.mean()) ** 2).sum()
    best, least = np.zeros(4), np.inf
    for size in range(1, 5):  # try each set of nonzero unknowns
        for kept in combinations(range(4), size):
            found, *_ = np.linalg.lstsq(columns[:, kept], durations, rcond=None)
            error = ((columns[:, kept] @ found - durations) ** 2).sum()
            if (found >= 0).all() and error < least:
                best, least = np.zeros(4), error
                best[list(kept)] = found
    if least > (1 - _GOOD_FIT) * variance or not best[:3].any():
        return None
    token, context, sequence = (round(1000 * weight) for weight in best[:3])
    return Weights(max(token, 1), context, sequence)


def _batch(runner: ModelRunner, shape: _Shape) -> list[ScheduledSequence]:
    """All sequences use the same blocks, whose content is not needed yet."""
    end = shape.start + shape.num_new
    batch = []
    for _ in range(shape.num_sequences):
        sequence = Sequence(EngineRequest(-1, [0] * end, max_tokens=1))
        sequence.block_table = list(range(-(-end // runner.block_size)))
        batch.append(ScheduledSequence(sequence, shape.start, end, True))
    return batch


def _duration(runner: ModelRunner, batch: list[ScheduledSequence]) -> int:
    begin = time.perf_counter_ns()
    runner.launch(batch)()
    return time.perf_counter_ns() - begin
