"""The load tests' arithmetic and workload."""

import time

import pytest

from client import Delta, GenerationError, GenerationStream
from loadtests.summary import ProtocolStats, percentile
from loadtests.workload import Workload


def stream(*deltas: Delta) -> GenerationStream:
    def slowly():
        for delta in deltas:
            time.sleep(0.05)
            yield delta

    return GenerationStream(slowly(), lambda: None)


def test_times_count_tokens_not_chunks():
    stats = ProtocolStats()
    start = time.perf_counter()
    timing = stats.measure(
        stream(
            Delta("", num_output_tokens=1),  # half a character: no text yet
            Delta("ü", num_output_tokens=1),
            Delta(" and more", "length", num_output_tokens=3),
        ),
        start,
    )
    assert timing.num_tokens == stats.num_tokens == 5
    assert 100 <= timing.ttft < timing.e2e
    assert timing.tpot == pytest.approx((timing.e2e - timing.ttft) / 4)
    assert stats.timings == [timing]


def test_single_token_has_no_time_per_output_token():
    timing = ProtocolStats().measure(stream(Delta("x", "length", num_output_tokens=1)), 0.0)
    assert timing.tpot is None


def test_tokens_of_a_broken_stream_count():
    stats = ProtocolStats()
    start = time.perf_counter()
    with pytest.raises(GenerationError):
        stats.measure(stream(Delta("x", num_output_tokens=2)), start)
    assert stats.num_tokens == 2
    assert stats.timings == []
    assert 0 < stats.tokens_per_second() < 2 / 0.05


@pytest.mark.parametrize(("percent", "expected"), [(50, 2.0), (95, 4.0), (100, 4.0), (25, 1.0)])
def test_percentile(percent, expected):
    assert percentile([4.0, 2.0, 1.0, 3.0], percent) == expected


def test_workload_is_repeatable():
    first, second, other = Workload("0"), Workload("0"), Workload("1")
    requests = [first.next_request() for _ in range(50)]
    assert requests == [second.next_request() for _ in range(50)]
    assert requests != [other.next_request() for _ in range(50)]
    assert len({request.sampling["max_tokens"] for request in requests}) == 3
    assert all(request.sampling["ignore_eos"] for request in requests)
