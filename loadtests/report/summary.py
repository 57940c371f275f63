"""The figures of a run, and whether they describe the server or only the client."""

from collections.abc import Iterable
from itertools import pairwise

import msgspec

from tritium.loadtests.replay.run import TOKENS, Record, Run
from tritium.loadtests.statistics import dispersion, ks_distance, percentile

_MAX_BUSY = 0.95  # share of a core
_MAX_DISTANCE = 0.02  # Kolmogorov-Smirnov distance
_TOLERANCE = 0.02  # seconds, between arrivals
_PHASES = 10  # offsets of the bins per second


class Distribution(msgspec.Struct, frozen=True):
    """A distribution of times in ms."""

    num: int
    mean: float | None  # None without samples
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Distribution":
        times = sorted(value * 1000 for value in seconds)
        if not times:
            return cls(0, None, None, None, None, None, None)
        mean = sum(times) / len(times)
        return cls(len(times), mean, *(percentile(times, p) for p in (50, 90, 95, 99, 100)))


class Check(msgspec.Struct, frozen=True):
    """A property of the traffic: planned and actual."""

    name: str
    planned: str
    replayed: str
    difference: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.bound


class Count(msgspec.Struct, frozen=True):
    """Tokens counted by the client, by the server and by the ledger; None: not read."""

    name: str
    here: int
    server: int | None  # growth of the server's counter
    ledger: int | None

    @property
    def agrees(self) -> bool:
        return {self.server, self.ledger} - {None} <= {self.here}


class BillLine(msgspec.Struct, frozen=True):
    """The bill of a business line for the run."""

    business_line: str
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    device_seconds: float
    kv_block_seconds: float
    cost: float | None  # None if the server has no price


class Summary(msgspec.Struct, frozen=True):
    """The summary of a run. Rates refer to its duration, from the start to the last end."""

    name: str
    sent: int
    completed: int
    rejected: int  # refused by a limit of the server
    failed: int
    duration: float  # seconds
    offered: float  # requests/s
    throughput: float  # completed requests/s
    input_tokens_per_second: float
    output_tokens_per_second: float
    goodput: float  # requests/s within the SLO
    attainment: float  # share of sent requests
    cached_ratio: float  # share of prompt tokens
    exact_lengths: int  # completed requests with exactly the planned lengths
    ttft: Distribution
    tpot: Distribution  # one sample per request
    gaps: Distribution  # one sample per response
    e2e: Distribution
    lag: Distribution
    invalid: list[str]  # reasons why the figures do not describe the server
    checks: list[Check]
    counts: list[Count]  # none without the server's metrics or ledger
    bill: list[BillLine]

    @property
    def is_like_its_source(self) -> bool:
        return all(check.holds for check in self.checks)


def summarize(run: Run) -> Summary:
    records = run.records
    completed = [record for record in records if record.outcome == "completed"]
    duration = max((record.end for record in records), default=0.0)
    good = sum(run.slo.is_met(record) for record in completed)
    num_input = sum(record.num_input_tokens for record in completed)
    num_output = sum(record.num_output_tokens for record in records)
    num_cached = sum(record.num_cached_tokens for record in completed)
    answered = [record for record in completed if record.first]
    return Summary(
        name=run.name,
        sent=len(records),
        completed=len(completed),
        rejected=sum(record.outcome == "rejected" for record in records),
        failed=sum(record.outcome == "failed" for record in records),
        duration=duration,
        offered=_ratio(len(records), max((record.sent for record in records), default=0.0)),
        throughput=_ratio(len(completed), duration),
        input_tokens_per_second=_ratio(num_input, duration),
        output_tokens_per_second=_ratio(num_output, duration),
        goodput=_ratio(good, duration),
        attainment=_ratio(good, len(records)),
        cached_ratio=_ratio(num_cached, num_input),
        exact_lengths=sum(
            (record.num_input_tokens, record.num_output_tokens)
            == (record.input_length, record.output_length)
            for record in completed
        ),
        ttft=Distribution.of(record.ttft for record in answered),
        tpot=Distribution.of(r.tpot for r in answered if r.tpot is not None),
        gaps=Distribution.of(gap for record in answered for gap in record.gaps),
        e2e=Distribution.of(record.e2e for record in completed),
        lag=Distribution.of(record.lag for record in records),
        invalid=_invalid(run),
        checks=_checks(run, completed),
        counts=_counts(run, completed),
        bill=_bill(completed),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _invalid(run: Run) -> list[str]:
    """The reasons why the run describes the client rather than the server."""
    bound = run.max_lag
    reasons = []
    if run.interrupted:
        reasons.append("it was interrupted")
    elif len(run.records) < run.planned.num_requests:
        reasons.append(f"only {len(run.records)} of {run.planned.num_requests} requests ended")
    lag = percentile([record.lag for record in run.records], 99)
    if lag > bound:
        reasons.append(
            f"the client was the bottleneck: requests left up to {lag * 1000:.0f} ms late (p99; "
            f"at most {bound * 1000:.0f} ms are allowed)"
        )
    stall = max((health.stall_p99 for health in run.healths), default=0.0)
    if stall > bound:
        reasons.append(
            f"the client was the bottleneck: its threads waited up to {stall * 1000:.0f} ms to run "
            f"(p99; at most {bound * 1000:.0f} ms are allowed)"
        )
    busy = max((health.busy for health in run.healths), default=0.0)
    if busy > _MAX_BUSY:
        reasons.append(
            f"the client was the bottleneck: a process took {busy:.0%} of a core (at most "
            f"{_MAX_BUSY:.0%} are allowed; more processes share the work)"
        )
    return reasons


def _checks(run: Run, completed: list[Record]) -> list[Check]:
    records = run.records
    checks = []
    for name, planned, counted in (
        (
            "input lengths",
            [record.input_length for record in records],
            [record.num_input_tokens for record in completed],
        ),
        (
            "output lengths",
            [record.output_length for record in records],
            [record.num_output_tokens for record in completed],
        ),
    ):
        checks.append(
            Check(
                f"{name}, KS distance",
                f"mean {_ratio(sum(planned), len(planned)):.1f}",
                f"mean {_ratio(sum(counted), len(counted)):.1f}",
                ks_distance(planned, counted),
                _MAX_DISTANCE,
            )
        )
    due = sorted(record.due for record in records)
    sent = sorted(record.sent for record in records)
    between, between_sent = (
        [after - before for before, after in pairwise(times)] for times in (due, sent)
    )
    checks.append(
        Check(
            "time between arrivals, KS distance",
            f"median {percentile(between, 50) * 1000:.0f} ms",
            f"median {percentile(between_sent, 50) * 1000:.0f} ms",
            ks_distance(between, between_sent, _TOLERANCE),
            _MAX_DISTANCE,
        )
    )
    bursts, bursts_sent = _bursts(due), _bursts(sent)
    checks.append(
        Check(
            "dispersion of arrivals, relative",
            f"{bursts:.2f}",
            f"{bursts_sent:.2f}",
            abs(bursts_sent - bursts) / max(bursts, 0.1),
            0.1,
        )
    )
    if run.source.hit_ratio:
        source, planned_ratio = (x.hit_ratio["endless"] for x in (run.source, run.planned))
        checks.append(
            Check(
                "prefix hits of an endless cache",
                f"{source:.1%}",
                f"{planned_ratio:.1%}",
                abs(source - planned_ratio),
                0.02,
            )
        )
    return checks


def _bursts(times: list[float]) -> float:
    """Dispersion, averaged over offsets of the bins, so that bin borders do not matter."""
    phases = (i / _PHASES for i in range(_PHASES))
    return sum(dispersion(time + phase for time in times) for phase in phases) / _PHASES


def _counts(run: Run, completed: list[Record]) -> list[Count]:
    if len(run.samples) < 2:
        return []
    answered = [record for record in completed if record.num_output_tokens]
    here = {
        "prompt_tokens": sum(record.num_input_tokens for record in answered),
        "cached_tokens": sum(record.num_cached_tokens for record in answered),
        "output_tokens": sum(record.num_output_tokens for record in answered),
    }
    return [
        Count(name, here[name], _growth(run, f"{name}_total"), _growth(run, f"ledger_{name}"))
        for name in TOKENS
    ]


def _growth(run: Run, name: str) -> int | None:
    """Between the first and the last sample."""
    first, last = (run.samples[i].values.get(name) for i in (0, -1))
    return None if last is None else round(last - (first or 0))


def _bill(completed: list[Record]) -> list[BillLine]:
    lines: dict[str, list[Record]] = {}
    for record in completed:
        lines.setdefault(record.business_line, []).append(record)
    return [
        BillLine(
            name,
            len(records),
            sum(record.num_input_tokens for record in records),
            sum(record.num_cached_tokens for record in records),
            sum(record.num_output_tokens for record in records),
            sum(record.device_ms for record in records) / 1000,
            sum(record.kv_block_seconds for record in records),
            _sum_of_costs(records),
        )
        for name, records in sorted(lines.items())
    ]


def _sum_of_costs(records: list[Record]) -> float | None:
    costs = [record.cost for record in records if record.cost is not None]
    return sum(costs) if costs else None
