"""Statistics of traces and runs."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that `percent` of all values do not exceed; NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    return ordered[max(0, int(-(-len(ordered) * percent // 100)) - 1)]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and its 95 % confidence interval.

    The interval is computed from ranks and holds for any distribution: the number of values below
    the true median is binomial. With less than six values even the extremes do not reach 95 %.
    """
    ordered, n = sorted(values), len(values)
    below = [math.comb(n, k) / 2**n for k in range(n)]
    rank = max(sum(cumulated <= 0.025 for cumulated in itertools.accumulate(below)) - 1, 0)
    return statistics.median(ordered), ordered[rank], ordered[-1 - rank]


def ks_distance(first: Sequence[float], second: Sequence[float], tolerance: float = 0.0) -> float:
    """Kolmogorov-Smirnov distance: the largest gap between two distributions, 0 to 1.

    Args:
        tolerance: Values closer than this count as equal.
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
    """Index of dispersion of arrivals: variance divided by mean of the counts in bins of 1 s.

    It is 1 for a Poisson process and larger for bursts.

    Args:
        times: Seconds from the start, in any order.
    """
    counts = Counter(int(time) for time in times)
    num_bins = max(counts, default=0) + 1
    mean = counts.total() / num_bins
    squares = sum(count * count for count in counts.values()) / num_bins
    return (squares - mean * mean) / mean if mean else 0.0
