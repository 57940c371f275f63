"""Replay of traces: plans, prompts, the open loop, the figures and the page."""

import csv
import json
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import msgspec
import pytest

from tests.backend.accounts.test_ledger import ROW, make_ledger
from tritium.backend.accounts.trace import TraceRequest
from tritium.client import ConnectionLost, Delta, GenerationError, GenerationStream
from tritium.client.types import Usage
from tritium.loadtests.replay.dispatch import Dispatcher
from tritium.loadtests.replay.metrics import read_ledger
from tritium.loadtests.replay.plan import Plan, Planned
from tritium.loadtests.replay.prompts import JsonVocabulary, Prompts
from tritium.loadtests.replay.run import Health, Record, Run, Sample, Slo, load_run
from tritium.loadtests.report.page import write_page, write_report
from tritium.loadtests.report.summary import Distribution, summarize
from tritium.loadtests.roundtrip import compare
from tritium.loadtests.traces.describe import describe
from tritium.loadtests.traces.format import check, write_trace

TRACE = [
    TraceRequest(0, 700, 20, [1, 2], session_id="a"),
    TraceRequest(1000, 512, 30, [1], business_line="search", request_class="offline"),
    TraceRequest(1000, 1030, 1, [1, 2, 3]),
    TraceRequest(5000, 40, 64),
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, TRACE)
    return path


# -- plan --


def test_plan_as_recorded(trace):
    planned = list(Plan(trace).requests())
    assert [p.due for p in planned] == [0, 1, 1, 5]
    assert [(p.input_length, p.output_length) for p in planned] == [
        (700, 20),
        (512, 30),
        (1030, 1),
        (40, 64),
    ]
    assert [p.index for p in planned] == [0, 1, 2, 3]
    assert (planned[1].business_line, planned[1].request_class) == ("search", "offline")


def test_scaled_plan(trace):
    plan = Plan(trace, start=0.5, window=4, rate=2, input_scale=1 / 30, output_scale=1 / 7)
    planned = list(plan.requests())
    assert [p.due for p in planned] == [0.25, 0.25]
    # 512 / 30 is 17.07, so blocks have 17 tokens and lengths are scaled by 17 / 512.
    assert [(p.block_size, p.input_length, p.output_length) for p in planned] == [
        (17, 17, 4),
        (17, 34, 1),
    ]
    for p in planned:
        check(p.as_trace())


@pytest.mark.parametrize(
    ("field", "value"), [("rate", 0), ("input_scale", -1), ("start", -1), ("window", float("nan"))]
)
def test_invalid_plan(trace, field, value):
    with pytest.raises(ValueError, match=f"{field} can't be {value}; it is"):
        list(Plan(trace, **{field: value}).requests())


# -- prompts --


def planned(index=0, due=0.0, input_length=40, output_length=4, hash_ids=(), block_size=16):
    return Planned(index, due, input_length, output_length, list(hash_ids), block_size, "", "")


def test_prompts_have_exact_lengths_and_shared_prefixes(tokenizer):
    prompts = Prompts(JsonVocabulary(tokenizer.to_json()), "seed")
    one, other, third, alone, again = (
        tokenizer.encode(prompts.write(request))
        for request in (
            planned(input_length=40, hash_ids=[5, 6, 7]),
            planned(1, input_length=48, hash_ids=[5, 6, 8]),
            planned(2, input_length=20, hash_ids=[9, 6]),
            planned(3, input_length=33),
            planned(4, input_length=33),
        )
    )
    assert [len(ids) for ids in (one, other, third, alone)] == [40, 48, 20, 33]
    assert one[:32] == other[:32]
    assert one[32:40] != other[32:40]
    assert third[:16] != one[:16]
    assert alone != again
    added = json.loads(tokenizer.to_json())["added_tokens"]
    specials = {token["id"] for token in added if token["special"]}
    assert not specials & set(one + other + third + alone)


def test_seed_determines_the_words(tokenizer):
    request = planned(hash_ids=[1, 2, 3])
    first, same, other = (Prompts(tokenizer, seed).write(request) for seed in "aab")
    assert first == same != other


class Words:
    """A vocabulary of words; `merges`: the first two words become one token."""

    vocab_size = 200

    def __init__(self, merges=False):
        self._merges = merges

    def decode_token(self, token_id):
        letters = "abcdefghijklmnopqrst"
        return f" {letters[token_id // 20]}{letters[token_id % 20]}" if token_id < 200 else ""

    def encode(self, text):
        return [0] + [1] * max(len(text.split()) - self._merges, 0)


def test_special_tokens_count_and_merged_words_are_refused():
    assert len(Prompts(Words(), "s").write(planned(input_length=7)).split()) == 6
    with pytest.raises(ValueError, match="request 0: the prompt has 6 tokens instead of 7"):
        Prompts(Words(merges=True), "s").write(planned(input_length=7))


# -- the open loop --


class SlowClient:
    """Answers two tokens, the first after `delay` seconds."""

    def __init__(self, delay=0.3, error=None):
        self.delay = delay
        self.error = error
        self.in_flight = self.most = 0
        self.connected = False
        self.lock = threading.Lock()

    def connect(self, timeout):
        self.connected = True

    def stream(self, prompt, **options):
        assert self.connected  # the first request must not wait for a connection

        def deltas():
            with self.lock:
                self.in_flight += 1
                self.most = max(self.most, self.in_flight)
            time.sleep(self.delay)
            if self.error:
                raise self.error
            yield Delta("", num_output_tokens=1)  # half a character
            yield Delta("ü", num_output_tokens=1)
            time.sleep(0.05)
            usage = Usage(len(prompt.split()) + 1, 16, 4)
            yield Delta("x", "length", usage, num_output_tokens=2)
            with self.lock:
                self.in_flight -= 1

        return GenerationStream(deltas(), lambda: None)


def dispatched(client, requests):
    records = []
    dispatcher = Dispatcher(requests, Prompts(Words(), "s"), client, 10, records.append)
    dispatcher.wait_until_ready()
    health = dispatcher.run(time.perf_counter() + 0.1)
    return sorted(records, key=lambda record: record.index), health


def test_requests_are_sent_on_time_with_others_in_flight():
    client = SlowClient(delay=0.5)
    records, health = dispatched(client, [planned(i, i * 0.02) for i in range(20)])
    assert client.most == 20
    assert [record.due for record in records] == [i * 0.02 for i in range(20)]
    assert all(record.sent >= record.due for record in records)
    assert max(record.lag for record in records) < 0.25  # sequential requests would lag by 10 s
    assert health.stall_p99 >= 0


def test_record_of_a_request():
    [record], _ = dispatched(SlowClient(), [planned(7, 0.05, input_length=5, output_length=4)])
    assert (record.index, record.outcome, record.finish_reason) == (7, "completed", "length")
    assert (record.num_input_tokens, record.num_cached_tokens) == (5, 16)
    assert record.num_output_tokens == 4  # tokens, not responses
    assert 0.3 <= record.ttft < record.e2e
    assert len(record.gaps) == 1
    assert record.tpot == pytest.approx((record.e2e - record.ttft) / 3)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (GenerationError("UNAVAILABLE", "the queue is full (max_queue_size 4)"), "rejected"),
        (GenerationError("INTERNAL", "oops"), "failed"),
        (ConnectionLost("localhost:1: failed to connect"), "failed"),
        (TimeoutError("no complete answer"), "failed"),
        (RuntimeError("a bug"), "failed"),
    ],
)
def test_rejected_and_failed_are_distinguished(error, outcome):
    [record], _ = dispatched(SlowClient(delay=0, error=error), [planned()])
    assert record.outcome == outcome
    assert str(error) in record.error


def test_broken_plan_ends_the_run():
    def broken():
        yield planned()
        raise ValueError("line 2: bad")

    with pytest.raises(ValueError, match="line 2: bad"):
        dispatched(SlowClient(delay=0), broken())


# -- figures --


def record(index, due, ttft=0.2, tpot=0.05, tokens=5, cached=0, **fields):
    fields = {"sent": due + 0.001, "num_input_tokens": 100, "input_length": 100} | fields
    first = fields["sent"] + ttft
    return Record(
        index=index,
        due=due,
        output_length=5,
        business_line="",
        request_class="",
        first=first,
        end=first + tpot * (tokens - 1),
        num_output_tokens=tokens,
        num_cached_tokens=cached,
        **fields,
    )


def refused(index, due, error="UNAVAILABLE: the queue is full"):
    return msgspec.structs.replace(
        record(index, due, num_input_tokens=0, tokens=0),
        first=0.0,
        error=error,
        rejected=error.startswith("UNAVAILABLE"),
    )


def run_of(records, **fields):
    found = describe(TraceRequest(r.due * 1000, r.input_length, r.output_length) for r in records)
    fields = {"slo": Slo(ttft=0.3, tpot=0.1), "healths": [Health(0.0001, 0.5)]} | fields
    return Run(
        name="run",
        url="localhost:1",
        plan=Plan(Path("trace.jsonl")),
        source=found,
        planned=found,
        max_lag=0.05,
        records=records,
        **fields,
    )


def test_rates_count_all_sent_requests():
    slow_start, slow_rest = record(2, 2, ttft=0.4), record(3, 3, tpot=0.2)
    records = [record(0, 0, cached=50), record(1, 1), slow_start, slow_rest]
    records += [refused(4, 4), refused(5, 5, "INTERNAL: oops")]
    found = summarize(run_of(records))
    assert (found.sent, found.completed, found.rejected, found.failed) == (6, 4, 1, 1)
    assert found.attainment == pytest.approx(2 / 6)
    assert found.goodput == pytest.approx(2 / found.duration)
    assert found.cached_ratio == 50 / 400
    assert found.exact_lengths == 4
    assert (found.ttft.num, found.tpot.num, found.lag.num) == (4, 4, 6)
    assert found.ttft.p50 == pytest.approx(200)
    assert found.tpot.max == pytest.approx(200)
    assert found.invalid == []


def test_empty_distribution_is_valid_json():
    assert msgspec.json.encode(Distribution.of([])).startswith(b'{"num":0,"mean":null')


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"healths": [Health(0.2, 0.5)]}, "bottleneck: its threads waited up to 200 ms"),
        ({"healths": [Health(0, 0.2), Health(0, 0.99)]}, "a process took 99% of a core"),
        ({"interrupted": True}, "interrupted"),
        ({"max_lag": 0.0005}, "bottleneck: requests left up to 1 ms late"),
    ],
)
def test_run_limited_by_the_client_is_invalid(change, reason):
    run = msgspec.structs.replace(run_of([record(i, i) for i in range(5)]), **change)
    [found] = summarize(run).invalid
    assert reason in found


def test_missing_record_makes_a_run_invalid():
    run = run_of([record(i, i) for i in range(5)])
    run.records.pop()
    assert summarize(run).invalid == ["only 4 of 5 requests ended"]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"num_input_tokens": 120}, "input lengths"),
        ({"num_output_tokens": 9}, "output lengths"),
        ({"sent": 2.5}, "time between arrivals"),
    ],
)
def test_traffic_that_differs_from_its_source_is_reported(changed, name):
    records = [record(i, i) for i in range(20)]
    assert summarize(run_of(records)).is_like_its_source
    for i in range(4):
        records[i] = msgspec.structs.replace(records[i], **changed)
    checks = {check.name: check.holds for check in summarize(run_of(records)).checks}
    assert not checks[f"{name}, KS distance"]


def test_burst_across_a_bin_border_is_the_same_burst():
    dues = [0.995] * 5 + [1.2] * 5 + [9.0]
    records = [record(i, due, sent=due + 0.01) for i, due in enumerate(dues)]
    assert summarize(run_of(records)).is_like_its_source


def test_counts_are_compared_with_server_and_ledger():
    samples = [
        Sample(0, {"output_tokens_total": 100, "prompt_tokens_total": 300}),
        Sample(
            5, {"output_tokens_total": 110, "prompt_tokens_total": 300, "ledger_output_tokens": 9}
        ),
    ]
    found = summarize(run_of([record(0, 0), record(1, 1)], samples=samples)).counts
    assert [(c.name, c.here, c.server, c.ledger, c.agrees) for c in found] == [
        ("prompt_tokens", 200, 0, None, False),
        ("cached_tokens", 0, None, None, True),
        ("output_tokens", 10, 10, 9, False),
    ]


def test_ledger_tokens_exclude_requests_that_never_ran(tmp_path):
    ledger = make_ledger(tmp_path)
    ledger.add(ROW)
    ledger.add(replace(ROW, key="s/1", cached_tokens=2))
    ledger.add(replace(ROW, key="s/2", outcome="expired", prompt_tokens=100, output_tokens=0))
    ledger.close()
    assert read_ledger(tmp_path) == {
        "ledger_prompt_tokens": 14,
        "ledger_cached_tokens": 2,
        "ledger_output_tokens": 6,
    }


def test_bill_by_business_line():
    billed = [
        msgspec.structs.replace(record(i, i, cached=i), business_line=line, device_ms=ms, cost=cost)
        for i, (line, ms, cost) in enumerate(
            [("search", 10, 0.5), ("ads", 20, None), ("search", 5, 0.25)]
        )
    ]
    found = summarize(run_of([*billed, refused(3, 3)]))
    assert [(b.business_line, b.requests, b.device_seconds, b.cost) for b in found.bill] == [
        ("ads", 1, 0.02, None),
        ("search", 2, 0.015, 0.75),
    ]
    assert [(b.input_tokens, b.cached_tokens, b.output_tokens) for b in found.bill] == [
        (100, 1, 5),
        (200, 2, 10),
    ]


# -- the round trip of a capture --


def capture(shift=0.0, **changed):
    """A capture of 200 requests; each five share their first block."""
    return [
        TraceRequest(
            **{
                "timestamp": i * 100.0 + (shift if i else 0),
                "input_length": 40 + i,
                "output_length": 4,
                "hash_ids": [i // 5, *range(1000 * i, 1000 * i + (40 + i) // 16)],
                "hash_block_size": 16,
            }
            | (changed if i < 20 else {})
        )
        for i in range(200)
    ]


def test_faithful_round_trip():
    # All requests but the first differ by one constant, the offset of the clocks.
    assert all(check.holds for check in compare(capture(), capture(shift=300)))


@pytest.mark.parametrize(
    ("again", "name"),
    [
        (capture()[:-1], "requests"),
        (capture(output_length=5), "requests of other lengths"),
        (capture(hash_ids=list(range(10**6, 10**6 + 16))), "prefix hits of an endless cache"),
        (
            [
                msgspec.structs.replace(r, timestamp=r.timestamp + (21 if i % 60 == 9 else 0))
                for i, r in enumerate(capture())
            ],
            "time of arrival, p99 ms",
        ),
    ],
)
def test_unfaithful_round_trip(again, name):
    assert name in [check.name for check in compare(capture(), again) if not check.holds]


# -- files --


def test_files_of_a_report(tmp_path):
    run = run_of([record(0, 0), record(1, 1), refused(2, 2)])
    write_report(run, tmp_path)
    assert load_run(tmp_path) == run
    assert json.loads((tmp_path / "summary.json").read_text())["completed"] == 2
    rows = list(csv.DictReader((tmp_path / "requests.csv").open()))
    assert [row["outcome"] for row in rows] == ["completed", "completed", "rejected"]
    assert float(rows[0]["tpot"]) == pytest.approx(0.05)


def test_page_in_a_browser(tmp_path):
    """The page needs no other file, draws all plots, and marks an invalid run."""
    names = count()
    samples = [Sample(float(i), {"kv_blocks": 9, "kv_blocks_used": i}) for i in range(3)]
    runs = [
        msgspec.structs.replace(
            run_of([record(i, i) for i in range(20)], samples=samples), name=f"run-{next(names)}"
        )
        for _ in range(2)
    ]
    runs[1].healths = [Health(0.3, 0.1)]
    runs[1].name = "<b>run"
    page = tmp_path / "report.html"
    write_page(runs, page, "side by side")
    text = page.read_text()
    assert "src=" not in text.split("</script>")[0][:200]
    assert "&lt;b&gt;run" in text
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("no chromium on PATH")
    result = subprocess.run(
        [
            *(
                chromium,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--virtual-time-budget=9000",
            ),
            *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path}/profile"),
            *("--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert result.stdout.count('class="main-svg"') >= 4
    assert "INVALID: the client was the bottleneck" in result.stdout
