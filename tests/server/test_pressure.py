"""Overload: refused requests, deadlines, request classes, and a KV cache that is far too small."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.grpc as grpcclient

from tritium.loadtests.harness import collect, send, until, write_model
from tritium.loadtests.volley import volley

LONG = {"max_tokens": 230, "ignore_eos": True, "temperature": 0}
SHORT = {"max_tokens": 1, "temperature": 0}
NUM_SLOTS = 6  # of the cramped model: 2 running, 4 waiting


@pytest.fixture
def busy(server):
    """Two streams that occupy the cramped model until they are cancelled."""
    streams = [send(server, f"Tell {i}", model="cramped", sampling=LONG, stream=True) for i in "ab"]
    for stream in streams:
        assert not stream.next().error
    yield streams
    for stream in streams:
        stream.cancel()


def counters(server, model="cramped") -> dict[str, float]:
    return {
        "tokenized": server.metric("prompts_tokenized_total", model),
        "full": server.metric("requests_refused_total", model, reason="queue_full"),
        "unmeetable": server.metric("requests_refused_total", model, reason="deadline_unmeetable"),
        "expired": server.metric("requests_total", model, outcome="expired"),
        "preemptions": server.metric("preemptions_total", model),
    }


def changes(server, before: dict[str, float], **expected: float) -> None:
    """Wait until the counters have grown by exactly `expected`; the others must be unchanged."""
    expected = {name: before[name] + expected.get(name, 0) for name in before}
    until(lambda: counters(server) == expected)


def test_burst_is_accepted_up_to_the_limit_and_the_rest_is_never_tokenised(server):
    before = counters(server)
    sampling = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
    streams = [
        send(server, f"Say {i}", model="cramped", sampling=sampling, return_num_output_tokens=True)
        for i in range(40)
    ]
    responses = [response for stream in streams for response in stream]
    refused = [response for response in responses if response.error]
    answered = [response for response in responses if not response.error]
    assert len(refused) + len(answered) == 40
    assert len(answered) >= NUM_SLOTS
    assert all(response.tensors["num_output_tokens"].item() == 6 for response in answered)
    assert {response.code for response in refused} == {"UNAVAILABLE"}
    assert all(
        response.error.startswith("queue_full: 6 interactive requests are running or waiting")
        and "; try again " in response.error
        for response in refused
    )
    changes(server, before, tokenized=len(answered), full=len(refused))


def test_volley_gets_the_same_answers_and_refusals_as_other_clients(server):
    before = counters(server)
    answers = volley(server.http_url, [f"Say {i}" for i in range(12)], 6, model="cramped")
    refused = [answer for answer in answers if answer.error]
    answered = [answer for answer in answers if not answer.error]
    assert len(answered) >= NUM_SLOTS
    assert all(sum(d.num_output_tokens for d in answer.deltas) == 6 for answer in answered)
    assert all(answer.error.startswith("UNAVAILABLE: queue_full") for answer in refused)
    assert all(answer.start < answer.first <= answer.end for answer in answers)
    changes(server, before, tokenized=len(answered), full=len(refused))


def test_request_that_waits_beyond_its_deadline_is_never_computed(server, busy):
    before = counters(server)
    (late,) = collect(server, "Wait", model="cramped", sampling=LONG, deadline_ms=200)
    assert late.code == "UNAVAILABLE"
    assert late.error == "deadline_ms: the answer was not complete within 200 ms"
    changes(server, before, tokenized=1, expired=1)


def test_running_request_ends_at_its_deadline(server):
    endless = {**LONG, "max_tokens": 2048}
    with send(server, "Tell", sampling=endless, stream=True, deadline_ms=1000) as stream:
        *answer, last = stream
    assert "".join(response.text for response in answer)
    assert last.error == "deadline_ms: the answer was not complete within 1000 ms"


def test_deadline_shorter_than_the_queue_is_refused_at_once(server, busy):
    waiting = [send(server, f"W{i}", model="cramped", sampling=SHORT) for i in range(3)]
    until(lambda: server.metric("requests_waiting", "cramped") == 3)
    before = counters(server)
    (refused,) = collect(server, "Late", model="cramped", sampling=SHORT, deadline_ms=1)
    assert refused.code == "UNAVAILABLE"
    assert refused.error.startswith("deadline_unmeetable: the request would wait for about ")
    changes(server, before, unmeetable=1)
    for stream in busy:
        stream.cancel()
    for stream in waiting:
        assert not list(stream)[-1].error


def test_interactive_requests_leave_the_queue_before_offline_ones(server, busy):
    order = []

    def finish(name: str, **options) -> None:
        responses = collect(server, name, model="cramped", **options)
        assert not responses[-1].error
        order.append(name)

    offline = {"request_class": "offline", "sampling": {**LONG, "max_tokens": 16}}
    with ThreadPoolExecutor(4) as pool:
        for name in ("offline 1", "offline 2"):
            pool.submit(finish, name, **offline)
        until(lambda: server.metric("requests_waiting", "cramped") == 2)
        for name in ("interactive 1", "interactive 2"):
            pool.submit(finish, name, sampling=SHORT)
        until(lambda: server.metric("requests_waiting", "cramped") == 4)
        for stream in busy:
            stream.cancel()
    assert sorted(order[:2]) == ["interactive 1", "interactive 2"]
    assert len(order) == 4


def test_interactive_request_preempts_a_running_offline_one(server):
    sampling = {**LONG, "max_tokens": 40}
    options = dict(model="cramped", sampling=sampling, stream=True, request_class="offline")
    alone = "".join(response.text for response in collect(server, "Tell me", **options))
    before = server.metric("preemptions_total", "cramped")
    streams = [send(server, "Tell me", return_usage=True, **options) for _ in range(2)]
    begun = [stream.next().text for stream in streams]
    (answer,) = collect(server, "Quick", model="cramped", sampling=SHORT, return_usage=True)
    assert not answer.error
    preemptions = []
    for text, stream in zip(begun, streams, strict=True):
        responses = list(stream)
        preemptions.append(json.loads(responses[-1].string("usage"))["preemptions"])
        assert text + "".join(response.text for response in responses) == alone
    assert sorted(preemptions) == [0, 1]
    until(lambda: server.metric("preemptions_total", "cramped") == before + 1)


def test_clients_that_do_not_read_delay_no_other_request_and_lose_nothing(server):
    options = dict(model="cramped", sampling=LONG, stream=True, return_num_output_tokens=True)
    silent = [send(server, f"Tell {i}", **options) for i in "ab"]  # both slots
    (answer,) = collect(server, "Quick", model="cramped", sampling=SHORT)
    assert not answer.error
    until(lambda: server.metric("kv_blocks_used", "cramped") == 0)
    for stream in silent:
        responses = list(stream)
        assert not responses[-1].error
        counts = [r.tensors["num_output_tokens"].item() for r in responses if r.tensors]
        assert sum(counts) == LONG["max_tokens"]


# -- a KV cache of a tenth of the blocks needed --

CAP = 2
NUM_BLOCKS = 26  # 64 requests need 276


@pytest.fixture(scope="module")
def tiny_pool(server, repository, tiny_weights):
    write_model(
        repository,
        "tiny_pool",
        model=tiny_weights,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=32,
        max_queue_size=64,
        max_preemptions=CAP,
        kv_cache_memory=NUM_BLOCKS * 16 * 2 * 2 * 2 * 16 * 4,
    )
    with grpcclient.InferenceServerClient(server.grpc_url) as control:
        control.load_model("tiny_pool")
        yield "tiny_pool"
        control.unload_model("tiny_pool")


def test_all_requests_finish_with_the_same_answers_with_a_tenth_of_the_blocks(server, tiny_pool):
    """No request is preempted more often than the cap; short ones do not wait for all long ones."""
    until(lambda: server.metric("kv_blocks", tiny_pool) == NUM_BLOCKS)
    ended: dict[int, float] = {}

    def answer(i: int) -> tuple[str, int]:
        sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": 8 if i % 4 == 3 else 72}
        responses = collect(
            server,
            f"{i} little words",
            model=tiny_pool,
            sampling=sampling,
            request_class="offline" if i % 2 else "interactive",
            exclude_input_in_output=True,
            return_usage=True,
        )
        assert not responses[-1].error
        ended[i] = time.monotonic()
        usage = json.loads(responses[-1].string("usage"))
        assert usage["output_tokens"] == sampling["max_tokens"]
        return "".join(response.text for response in responses), usage["preemptions"]

    with ThreadPoolExecutor(4) as pool:  # at most 4 * 6 blocks
        roomy = list(pool.map(answer, range(64)))
    assert [preemptions for _, preemptions in roomy] == [0] * 64
    with ThreadPoolExecutor(64) as pool:
        tight = list(pool.map(answer, range(64)))
    assert [text for text, _ in tight] == [text for text, _ in roomy]
    preemptions = [preemptions for _, preemptions in tight]
    assert 0 < max(preemptions) <= CAP
    until(lambda: server.metric("preemptions_total", tiny_pool) == sum(preemptions))
    last_short = max(ended[i] for i in range(3, 64, 4))
    assert last_short < max(ended.values())
