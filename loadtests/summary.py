"""Counts what a load test's streams did and puts it into a table. Knows nothing of locust."""

import time
from dataclasses import dataclass, field

from rich import box
from rich.table import Table

from client import GenerationStream
from loadtests.statistics import percentile


@dataclass(frozen=True, slots=True)
class Timing:
    """One finished request, in milliseconds as the caller saw them."""

    ttft: float  # to the first non-empty text
    e2e: float
    tpot: float | None  # (e2e - ttft) / (tokens - 1); None for a single token
    num_tokens: int  # counted by the server


@dataclass(slots=True)
class ProtocolStats:
    """What happened over one protocol. Times are seconds of the monotonic clock."""

    num_failures: int = 0
    num_tokens: int = 0  # also of requests that the end of the test cut off
    first_start: float | None = None
    last_token: float = 0.0
    timings: list[Timing] = field(default_factory=list)

    def measure(self, stream: GenerationStream, start: float) -> Timing:
        """Read a stream that was opened at `start` to its end."""
        if self.first_start is None:
            self.first_start = start
        ttft = None
        num_tokens = 0
        for delta in stream:
            now = time.perf_counter()
            if ttft is None and delta.text:
                ttft = now - start
            num_tokens += delta.num_output_tokens
            self.num_tokens += delta.num_output_tokens
            self.last_token = now
        e2e = time.perf_counter() - start
        ttft = e2e if ttft is None else ttft
        tpot = (e2e - ttft) / (num_tokens - 1) * 1000 if num_tokens > 1 else None
        timing = Timing(ttft * 1000, e2e * 1000, tpot, num_tokens)
        self.timings.append(timing)
        return timing

    def tokens_per_second(self) -> float:
        """Output tokens over the time from the first request to the last token."""
        if self.first_start is None or self.last_token <= self.first_start:
            return 0.0
        return self.num_tokens / (self.last_token - self.first_start)


def summary_table(stats: dict[str, ProtocolStats]) -> Table:
    """One row a protocol: counts, throughput, latencies."""
    table = Table(
        title="Streams: times in ms, tokens as counted by the server",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column(no_wrap=True)
    counts = ("requests", "failed", "tokens", "tokens/s")
    times = ("TTFT p50", "p95", "TPOT p50", "p95")
    for column in counts + times:
        table.add_column(column, justify="right", no_wrap=True)
    for protocol, row in stats.items():
        ttft = [timing.ttft for timing in row.timings]
        tpot = [timing.tpot for timing in row.timings if timing.tpot is not None]
        table.add_row(
            protocol,
            str(len(row.timings) + row.num_failures),
            str(row.num_failures),
            str(row.num_tokens),
            f"{row.tokens_per_second():.1f}",
            *(f"{percentile(ttft, percent):.1f}" for percent in (50, 95)),
            *(f"{percentile(tpot, percent):.1f}" for percent in (50, 95)),
        )
    return table
