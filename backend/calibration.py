"""What a step's tokens, context and sequences cost on this device, measured before it serves."""

import logging
import time

from backend.model_runner import ModelRunner
from backend.scheduler import ScheduledSequence
from backend.sequence import EngineRequest, Sequence
from backend.usage import DEFAULT_WEIGHTS, MeasuredStep, Weights, fit

logger = logging.getLogger("tritium")

# (sequences, tokens of each that are computed already, tokens that are to be)
_SHAPES = [(1, 0, 1), (8, 0, 1), (1, 511, 1), (8, 511, 1), (1, 0, 32), (1, 512, 32), (1, 0, 64)]
_ROUNDS = 2  # the faster one counts
_SECONDS = 2  # no more shapes are begun after so long


def measure_weights(runner: ModelRunner, max_num_seqs: int, max_num_tokens: int) -> Weights:
    """Fit weights to some steps of the real model; the default ones where they don't fit.

    Args:
        max_num_seqs: Sequences that a step can have.
        max_num_tokens: Tokens that it can compute.
    """
    positions = min(
        runner.num_blocks * runner.block_size, runner.model.config.max_position_embeddings
    )
    steps = []
    deadline = time.monotonic() + _SECONDS
    for num_sequences, start, num_new in _SHAPES:
        if (
            start + num_new > positions
            or num_sequences > max_num_seqs
            or num_sequences * num_new > max_num_tokens
            or time.monotonic() > deadline
        ):
            continue
        sequences = [_sequence(start + num_new, runner.block_size) for _ in range(num_sequences)]
        batch = [ScheduledSequence(s, start, start + num_new, True) for s in sequences]
        duration = min(_duration(runner, batch) for _ in range(_ROUNDS))
        attended = num_sequences * num_new * (2 * start + num_new + 1) // 2
        steps.append(MeasuredStep(num_sequences * num_new, attended, num_sequences, duration))
    weights = fit(steps)
    logger.info(
        f"cost of a step, in picoseconds: {weights or DEFAULT_WEIGHTS}"
        + ("" if weights else "; by default, as the warm-up's steps don't fit")
    )
    return weights or DEFAULT_WEIGHTS


def _sequence(num_tokens: int, block_size: int) -> Sequence:
    """All are in the same blocks, whose content nobody needs yet."""
    sequence = Sequence(EngineRequest(-1, [0] * num_tokens, max_tokens=1))
    sequence.block_table = list(range(-(-num_tokens // block_size)))
    return sequence


def _duration(runner: ModelRunner, batch: list[ScheduledSequence]) -> int:
    begin = time.perf_counter_ns()
    runner.launch(batch)()
    return time.perf_counter_ns() - begin
