"""The fit of weights to measured steps."""

import random

import pytest

from tritium.backend.engine.usage import Weights
from tritium.backend.runner.calibration import MeasuredStep, fit


def test_fit_finds_the_weights_that_made_the_steps():
    true = Weights(token=40_000_000, context=9_000, sequence=150_000_000)
    steps = [
        MeasuredStep(n * t, a := n * t * (t + 1) // 2, n, 2_000_000 + _ns(true, n * t, a, n))
        for n, t in [(1, 1), (4, 1), (8, 1), (1, 16), (1, 64), (2, 64), (1, 256)]
    ]
    found = fit(steps)
    assert found == pytest.approx(true, rel=1e-3)


def _ns(weights: Weights, tokens: int, attended: int, sequences: int) -> int:
    picoseconds = weights.token * tokens + weights.context * attended
    return (picoseconds + weights.sequence * sequences) // 1000


def test_noise_gives_no_weights():
    rng = random.Random(3)
    steps = [MeasuredStep(t, t, 1, rng.randint(1, 10**6)) for t in (1, 2, 3, 4, 5, 6, 7, 8)]
    assert fit(steps) is None


def test_no_weight_is_negative():
    steps = [MeasuredStep(n, n, n, 1000 * n - 10) for n in range(1, 9)]
    found = fit(steps)
    assert found
    assert min(found) >= 0
    assert found.token >= 1
