"""The few statistics that traces and runs are judged by."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of all do not exceed; NaN of none."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    return ordered[max(0, int(-(-len(ordered) * percent // 100)) - 1)]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and between which two of the values the true one lies with 95 % certainty.

    By ranks, whatever the distribution: how many of n values are below the true median is
    binomial. With less than six values even the extremes are less certain than that.
    """
    ordered, n = sorted(values), len(values)
    below = [math.comb(n, k) / 2**n for k in range(n)]
    rank = max(sum(cumulated <= 0.025 for cumulated in itertools.accumulate(below)) - 1, 0)
    return statistics.median(ordered), ordered[rank], ordered[-1 - rank]


def ks_distance(first: Sequence[float], second: Sequence[float], tolerance: float = 0.0) -> float:
    """Kolmogorov and Smirnov's: the largest gap between two samples' distributions, 0 to 1.

    Args:
        tolerance: By how much a value may be off before it counts as another.
    """
    if not len(first) or not len(second):
        return float(bool(len(first)) != bool(len(second)))
    one, two = np.sort(first), np.sort(second)

    def ahead(of: np.ndarray, behind: np.ndarray) -> float:
        shares = np.arange(1, len(of) + 1) / len(of)
        return float(
            (shares - np.searchsorted(behind, of + tolerance, "right") / len(behind)).max()
        )

    return max(ahead(one, two), ahead(two, one), 0.0)


def dispersion(times: Iterable[float]) -> float:
    """Index of dispersion of arrivals: variance over mean of the counts in bins of 1 s.

    1 for a Poisson process, more where arrivals come in bursts.

    Args:
        times: Seconds from the start; any order.
    """
    counts = Counter(int(time) for time in times)
    num_bins = max(counts, default=0) + 1
    mean = counts.total() / num_bins
    squares = sum(count * count for count in counts.values()) / num_bins
    return (squares - mean * mean) / mean if mean else 0.0
