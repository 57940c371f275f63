"""Traces: public formats, statistics, synthesis."""

import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from tritium.backend.accounts.trace import TraceRequest
from tritium.loadtests.statistics import dispersion, ks_distance, percentile
from tritium.loadtests.traces.convert import convert, guess_source
from tritium.loadtests.traces.describe import PrefixCache, describe
from tritium.loadtests.traces.format import TraceError, check, read_trace, write_trace
from tritium.loadtests.traces.synthesize import Lengths, Shape, synthesize

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319610,3180,8
2023-11-16 18:17:04.0319610,110,27
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,API log
"""
MOONCAKE = """{"timestamp": 100, "input_length": 513, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 3100, "input_length": 600, "output_length": 3, "hash_ids": [0, 2], "type": "text"}
"""
SERVER = """{"timestamp":1700000000500,"input_length":20,"output_length":3,"hash_ids":[7,8],\
"hash_block_size":16,"business_line":"search"}
{"timestamp":1700000000250,"input_length":16,"output_length":9,"hash_ids":[7],"hash_block_size":16}
"""


def converted(tmp_path, text, source=None, **options):
    path, output, messages = tmp_path / "in", tmp_path / "out.jsonl", []
    path.write_text(text)
    source = source or guess_source(path)
    counts = convert(path, output, source, report=messages.append, **options)
    return list(read_trace(output)), counts, messages


def refused(tmp_path, text, source=None, **options):
    """The messages about bad rows; checks that nothing was written."""
    messages = []
    path, output = tmp_path / "in", tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match="nothing was written"):
        convert(path, output, source or guess_source(path), report=messages.append, **options)
    assert list(tmp_path.iterdir()) == [path]
    return [message.removeprefix(f"{path}, ") for message in messages]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AZURE, [(0, 4808, 10), (52.001, 3180, 8), (52.001, 110, 27)]),
        (AZURE_2024, [(0, 2162, 5), (990.07, 2399, 6)]),
        (BURSTGPT, [(0, 472, 18), (40500, 1087, 230)]),
        (MOONCAKE, [(0, 513, 500), (3000, 600, 3)]),
    ],
)
def test_public_formats(tmp_path, text, expected):
    requests, counts, messages = converted(tmp_path, text)
    assert [(r.timestamp, r.input_length, r.output_length) for r in requests] == expected
    assert (counts, messages) == ((len(expected), 0), [])


def test_hash_ids_are_kept(tmp_path):
    requests, _, _ = converted(tmp_path, MOONCAKE)
    assert [(r.hash_ids, r.hash_block_size) for r in requests] == [([0, 1], 512), ([0, 2], 512)]


def test_records_of_the_server_are_sorted(tmp_path):
    requests, _, _ = converted(tmp_path, SERVER)
    assert [(r.timestamp, r.hash_ids, r.business_line) for r in requests] == [
        (0, [7], ""),
        (250, [7, 8], "search"),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:17:05.1", "has 1 columns instead of 3"),
        ("2023-11-16 18:17:05.1,12,0", "GeneratedTokens: '0' is not a number of tokens"),
        ("2023-11-16 18:17:05.1,-3,1", "ContextTokens: '-3' is not"),
        ("2023-11-16 18:17:05.1,1e3,1", "ContextTokens: '1e3' is not"),
        ("yesterday,1,1", "TIMESTAMP: 'yesterday' is not like"),
        ("2023-13-16 18:17:05.1,1,1", "month must be in 1..12"),
        ("2023-11-16 18:17:04.0000000,1,1", "is 31.961 ms earlier than a row before it"),
    ],
)
def test_bad_rows_of_azure(tmp_path, row, reason):
    [message] = refused(tmp_path, AZURE + row + "\n")
    assert message.startswith("line 5: ")
    assert reason in message
    requests, counts, _ = converted(tmp_path, AZURE + row + "\n", skip_bad_rows=True)
    assert (len(requests), counts) == (3, (3, 1))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("NaN,GPT-4,1,1,2,API log", "Timestamp: 'NaN' is not a number of seconds"),
        ("soon,GPT-4,1,1,2,API log", "Timestamp: 'soon' is not"),
        ("50,GPT-4,1,0,1,API log", "Response tokens: '0' is not"),
    ],
)
def test_bad_rows_of_burstgpt(tmp_path, row, reason):
    [message] = refused(tmp_path, BURSTGPT + row)
    assert reason in message


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"timestamp": 4000, "input_length": 5', "truncated"),
        ('{"timestamp": 4000, "input_length": 5}', "`output_length`"),
        ('{"timestamp": 4000, "input_length": "5", "output_length": 1}', "$.input_length"),
        ('{"timestamp": 4000, "input_length": 0, "output_length": 1}', ">= 1"),
        ("[1]", "Expected `object`"),
        (
            '{"timestamp": 4000, "input_length": 1025, "output_length": 1, "hash_ids": [0, 1]}',
            "2 hash_ids of 512 tokens cover 1024, but input_length is 1025",
        ),
    ],
)
def test_bad_rows_of_mooncake(tmp_path, row, reason):
    [message] = refused(tmp_path, MOONCAKE + row)
    assert message.startswith("line 3: ")
    assert reason in message


def test_rows_in_any_order(tmp_path):
    lines = MOONCAKE.splitlines(keepends=True)
    shuffled = "".join(reversed(lines))
    [message] = refused(tmp_path, shuffled)
    assert message == "line 2: is 3000.000 ms earlier than a row before it"
    requests, _, _ = converted(tmp_path, shuffled, sort=True)
    assert [request.timestamp for request in requests] == [0, 3000]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\xff\xfe"])
def test_unknown_format(tmp_path, text):
    path = tmp_path / "in"
    path.write_text(text)
    with pytest.raises(TraceError, match="looks like none of azure, burstgpt, mooncake"):
        guess_source(path)


def test_missing_column(tmp_path):
    path = tmp_path / "in"
    path.write_text("Timestamp,Request tokens\n1,2\n")
    with pytest.raises(TraceError, match="line 1: no column Response tokens; the columns are"):
        convert(path, tmp_path / "out", "burstgpt")


def test_reading_names_the_first_bad_row(tmp_path):
    path = tmp_path / "trace"
    path.write_text(MOONCAKE)
    with pytest.raises(TraceError, match=r"trace, line 2: .*`type`"):
        list(read_trace(path))


@pytest.mark.slow
def test_million_rows_in_little_memory(tmp_path):
    """Runs in a subprocess to measure its peak memory."""
    path, output = tmp_path / "in", tmp_path / "out"
    with path.open("w") as file:
        file.write(BURSTGPT.splitlines()[0] + "\n")
        file.writelines(f"{i}.5,GPT-4,{i % 999 + 1},7,0,API log\n" for i in range(1_000_000))
    peaks = []
    for source in (tmp_path / "empty", path):
        source.exists() or source.write_text(BURSTGPT)
        code = f"""
from pathlib import Path; from resource import RUSAGE_SELF, getrusage
from tritium.loadtests.traces.convert import convert
print(convert(Path({str(source)!r}), Path({str(output)!r}), "burstgpt"))
print(getrusage(RUSAGE_SELF).ru_maxrss)
"""
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        counts, peak = result.stdout.splitlines()
        peaks.append(int(peak) * 1024)
    assert counts == "(1000000, 0)"
    assert output.stat().st_size > 50e6
    assert peaks[1] - peaks[0] < 2**24
    with output.open() as file:
        *_, last = file
    assert json.loads(last)["timestamp"] == 999_999_000


def test_large_trace_is_sorted_on_disk(tmp_path):
    rng = np.random.default_rng(0)
    times = rng.permutation(60_000)
    path, output = tmp_path / "in", tmp_path / "out"
    write_trace(path, (TraceRequest(float(time), 1, 1) for time in times))
    assert convert(path, output, "server") == (60_000, 0)
    assert [r.timestamp for r in read_trace(output)] == list(range(60_000))


# -- statistics --


@pytest.mark.parametrize(
    ("percent", "expected"), [(50, 2.0), (95, 4.0), (100, 4.0), (25, 1.0), (0, 1.0)]
)
def test_percentile(percent, expected):
    assert percentile([4.0, 2.0, 1.0, 3.0], percent) == expected


def test_ks_distance():
    assert ks_distance([1, 2, 3, 4], [1, 2, 3, 4]) == 0
    assert ks_distance([1, 2], [3, 4]) == 1
    assert ks_distance([1, 2, 3, 4], [1, 2, 3, 9]) == 0.25
    assert ks_distance([], [1]) == 1
    assert ks_distance([], []) == 0


def test_dispersion():
    assert dispersion([0.1, 1.5, 2.9, 3.0]) == 0  # one in each second
    assert dispersion([0.0, 0.1, 0.2, 3.5]) == pytest.approx(1.5)  # 3, 0, 0, 1
    poisson = np.random.default_rng(0).random(20_000) * 2000
    assert dispersion(poisson) == pytest.approx(1, abs=0.1)


# -- describe --


def request(hash_ids, length=None, timestamp=0.0):
    return TraceRequest(timestamp, length or 16 * len(hash_ids), 1, hash_ids, hash_block_size=16)


def test_prefix_hits():
    cache = PrefixCache()
    for hash_ids, length in (([1, 2, 3], 48), ([1, 2, 4], 40), ([1, 2, 3], 48), ([9, 2], 32)):
        cache.add(request(hash_ids, length))
    # The last token is always computed, so two of three equal blocks are reused. [9, 2] has
    # another first block, so it shares nothing.
    assert (cache.hit_tokens, cache.tokens) == (32 + 32, 168)


def test_small_cache_evicts_least_recently_used_and_tails_first():
    cache = PrefixCache(48)
    for hash_ids in ([1, 2], [3, 4], [1, 2]):
        cache.add(request(hash_ids))
    assert cache.hit_tokens == 16  # block 1 was cached; block 2, the tail, was evicted
    for hash_ids in ([5, 6, 7], [1, 2]):
        cache.add(request(hash_ids))
    assert cache.hit_tokens == 16


def test_description():
    requests = [request([1, 2], timestamp=500.0), request([1, 2], timestamp=2500.0)]
    found = describe(requests)
    assert (found.num_requests, found.duration, found.rate, found.peak_rate) == (2, 2, 1, 1)
    assert found.input_length["p50"] == 32
    assert (found.input_tokens, found.output_tokens) == (64, 2)
    assert found.hit_ratio["endless"] == 0.25
    with pytest.raises(ValueError, match="no requests"):
        describe([])


# -- synthesize --

SHAPE = Shape(4000, 8.0, Lengths(200, 800), Lengths(50, 150), dispersion=4.0, hit_ratio=0.4)


def test_synthetic_trace_has_the_requested_statistics():
    requests = list(synthesize(SHAPE))
    found = describe(requests)
    assert found.num_requests == 4000
    assert found.rate == pytest.approx(8, rel=0.1)
    assert found.dispersion == pytest.approx(4, rel=0.2)
    assert found.input_length["p50"] == pytest.approx(200, rel=0.1)
    assert found.input_length["p95"] == pytest.approx(800, rel=0.1)
    assert found.output_length["p50"] == pytest.approx(50, rel=0.1)
    assert found.hit_ratio["endless"] == pytest.approx(0.4, abs=0.02)
    assert requests[0].timestamp == 0
    assert all(a.timestamp <= b.timestamp for a, b in pairwise(requests))
    for one in requests:
        check(one)


def test_seed_determines_the_trace():
    first, again, other = (list(synthesize(SHAPE, seed)) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_requests", 0, "num_requests can't be 0; it is at least 1"),
        ("rate", 0, "rate can't be 0"),
        ("dispersion", 0.5, "dispersion can't be 0.5; it is at least 1"),
        ("hit_ratio", 1.0, "hit_ratio can't be 1.0"),
        ("input_length", Lengths(0, 1), "input_length can't have median 0"),
        ("output_length", Lengths(10, 5), "output_length can't have median 10 and p95 5"),
    ],
)
def test_invalid_shape(field, value, message):
    with pytest.raises(ValueError, match=message):
        list(synthesize(SHAPE._replace(**{field: value})))
