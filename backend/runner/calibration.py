"""What a step's tokens, context and sequences cost on this device, measured before it serves."""

import logging
import time
from typing import NamedTuple

from tritium.backend.engine.request import EngineRequest
from tritium.backend.engine.sequence import ScheduledSequence, Sequence
from tritium.backend.engine.usage import DEFAULT_WEIGHTS, MeasuredStep, Weights, fit
from tritium.backend.runner.model_runner import ModelRunner

logger = logging.getLogger("tritium")


class _Shape(NamedTuple):
    num_sequences: int
    start: int  # tokens of each that are computed already
    num_new: int  # that are to be

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
_SECONDS = 2  # after so long no more rounds are begun for a better fit


def measure_weights(runner: ModelRunner, max_num_seqs: int, max_num_tokens: int) -> Weights:
    """Fit weights to some steps of the real model; the default ones where they don't fit.

    Args:
        max_num_seqs: Sequences that a step can have.
        max_num_tokens: Tokens that it can compute.
    """
    positions = min(
        runner.num_blocks * runner.block_size, runner.model.config.max_position_embeddings
    )
    shapes = [
        shape
        for shape in _SHAPES
        if shape.start + shape.num_new <= positions
        and shape.num_sequences <= max_num_seqs
        and shape.num_tokens <= max_num_tokens
    ]
    batches = [_batch(runner, shape) for shape in shapes]

    def durations() -> list[int]:
        return [_duration(runner, batch) for batch in batches]

    # The fastest of each counts, which nothing else held up; two rounds on a quiet machine.
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


def _batch(runner: ModelRunner, shape: _Shape) -> list[ScheduledSequence]:
    """All sequences are in the same blocks, whose content nobody needs yet."""
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
