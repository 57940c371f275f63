"""Describes a trace: rates, dispersion, lengths, and how much a prefix cache could reuse."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable

import msgspec
import numpy as np
from rich.table import Table

from tritium.backend.accounts.trace import TraceRequest
from tritium.loadtests.statistics import dispersion

QUANTILES = (1, 5, 25, 50, 75, 95, 99, 100)
CACHE_SIZES = (2**18, 2**20, 2**22, 2**24)  # tokens
_BLOCK_SIZE = 16  # the server's block size; reuse is in whole blocks


class Description(msgspec.Struct, frozen=True):
    """The description of a trace. Times in seconds, lengths in tokens."""

    num_requests: int
    duration: float
    rate: float  # requests/s
    peak_rate: float  # requests in the busiest second
    dispersion: float  # in bins of 1 s; 1 for a Poisson process
    input_tokens: int
    output_tokens: int
    input_length: dict[str, float]  # by quantile
    output_length: dict[str, float]
    hit_ratio: dict[str, float]  # share of prompt tokens by cache size; empty without hash ids


class PrefixCache:
    """Simulates a prefix cache with least-recently-used eviction.

    Args:
        size: Size in tokens; 0: unlimited.
    """

    def __init__(self, size: int = 0) -> None:
        self._size = size
        self._used = 0
        self._blocks: OrderedDict[int, int] = OrderedDict()  # tokens, by hash id
        self.hit_tokens = 0
        self.tokens = 0

    @property
    def hit_ratio(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    def add(self, request: TraceRequest) -> None:
        """Look up a prompt and count its reusable tokens, then store it."""
        hits = 0
        for hash_id in request.hash_ids:
            if hash_id not in self._blocks:
                break
            hits += 1
        # The last token of a prompt is always computed.
        found = min(hits * request.hash_block_size, request.input_length - 1)
        self.hit_tokens += found // _BLOCK_SIZE * _BLOCK_SIZE
        self.tokens += request.input_length
        for hash_id in reversed(
            request.hash_ids
        ):  # so that a prefix is evicted after its continuation
            self._used += request.hash_block_size - self._blocks.pop(hash_id, 0)
            self._blocks[hash_id] = request.hash_block_size
        while self._size and self._used > self._size:
            self._used -= self._blocks.popitem(last=False)[1]


def describe(requests: Iterable[TraceRequest]) -> Description:
    """Read a trace once. Memory grows by 16 bytes per request, and with the hash ids."""
    times, inputs, outputs = array("d"), array("L"), array("L")
    caches = {str(size): PrefixCache(size) for size in CACHE_SIZES} | {"endless": PrefixCache()}
    for request in requests:
        times.append(request.timestamp / 1000)
        inputs.append(request.input_length)
        outputs.append(request.output_length)
        if request.hash_ids:
            for cache in caches.values():
                cache.add(request)
    if not times:
        raise ValueError("the trace has no requests")
    start, duration = times[0], times[-1] - times[0]
    seconds = (np.array(times) - start).astype(np.int64)
    return Description(
        num_requests=len(times),
        duration=duration,
        rate=len(times) / duration if duration else float(len(times)),
        peak_rate=float(np.unique(seconds, return_counts=True)[1].max()),
        dispersion=dispersion(seconds.tolist()),
        input_tokens=sum(inputs),
        output_tokens=sum(outputs),
        input_length=_quantiles(inputs),
        output_length=_quantiles(outputs),
        hit_ratio={size: cache.hit_ratio for size, cache in caches.items() if cache.tokens},
    )


def _quantiles(lengths: array) -> dict[str, float]:
    values = np.percentile(np.array(lengths), QUANTILES, method="inverted_cdf")
    return {f"p{q}": float(value) for q, value in zip(QUANTILES, values, strict=True)} | {
        "mean": float(np.mean(np.array(lengths)))
    }


def description_table(name: str, found: Description) -> Table:
    table = Table(title=name, show_header=False)
    rows = [
        ("requests", f"{found.num_requests}"),
        ("duration", f"{found.duration:.1f} s"),
        ("rate", f"{found.rate:.3f} requests/s, at most {found.peak_rate:.0f} within a second"),
        ("dispersion (1 s bins)", f"{found.dispersion:.2f} (Poisson: 1)"),
        ("tokens", f"{found.input_tokens} in, {found.output_tokens} out"),
    ]
    for name, lengths in (("input", found.input_length), ("output", found.output_length)):
        rows.append(
            (f"{name} length", ", ".join(f"{key} {value:.0f}" for key, value in lengths.items()))
        )
    rows += [
        (
            "prefix hits, endless cache" if size == "endless" else f"  {int(size):,} tokens",
            f"{ratio:.1%}",
        )
        for size, ratio in reversed(found.hit_ratio.items())
    ]
    for row in rows:
        table.add_row(*row)
    return table
