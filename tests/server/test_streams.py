"""Many concurrent streams: each ends exactly once, cancelled or not, and frees its KV blocks."""

import json
import random
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.grpc as grpcclient

from tests.prompts import NUM_TOKENS, PROMPTS
from tritium.loadtests.harness import collect, complete, send, until, write_model

FORCED = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def texts(tokenizer, prompt_token_ids, greedy_token_ids):
    """(prompt, answer of transformers) as text."""
    detokenizer = tokenizer.detokenizer([], skip_special_tokens=False)
    prompts = [*PROMPTS[:-1], "".join(map(detokenizer.add, prompt_token_ids[-1]))]
    assert [tokenizer.encode(prompt) for prompt in prompts] == prompt_token_ids
    answers = []
    for token_ids, answer in zip(prompt_token_ids, greedy_token_ids, strict=True):
        detokenizer = tokenizer.detokenizer(token_ids, skip_special_tokens=True)
        answers.append("".join(map(detokenizer.add, answer)))
    return list(zip(prompts, answers, strict=True))


@pytest.fixture(scope="module")
def in_float32(server, repository):
    write_model(repository, "float32", dtype="float32", kv_cache_memory="640MiB")
    with grpcclient.InferenceServerClient(server.grpc_url) as control:
        control.load_model("float32")
        yield "float32"
        control.unload_model("float32")


@pytest.mark.parametrize("stream", [False, True])
def test_text_equals_that_of_transformers(server, in_float32, texts, stream):
    """24 concurrent prompts; each chunk is decoded strictly, so a split character would raise."""
    options = {"stream": stream, "exclude_input_in_output": True, "sampling": FORCED}

    def answer(prompt):
        return collect(server, prompt, model=in_float32, **options)

    with ThreadPoolExecutor(len(texts)) as pool:
        responses = list(pool.map(answer, [prompt for prompt, _ in texts]))
    answers = ["".join(response.text for response in each) for each in responses]
    assert answers == [answer for _, answer in texts]
    if stream:
        assert all(len(each) > 5 for each in responses)


def test_64_streams_of_which_a_third_are_cancelled(server):
    rng = random.Random(0)
    num_tokens = [rng.randint(5, 120) for _ in range(64)]
    cancelled_after = {i: rng.randint(0, 4) for i in rng.sample(range(64), 21)}
    ends: dict[int, list[str]] = {i: [] for i in range(64)}
    tokens = dict.fromkeys(range(64), 0)

    def run(i):
        sampling = {"max_tokens": num_tokens[i], "ignore_eos": True, "seed": i}
        with send(
            server,
            f"Story number {i}:",
            stream=True,
            sampling=sampling,
            return_num_output_tokens=True,
        ) as stream:
            for count, response in enumerate(stream):
                if response.error:
                    ends[i].append(response.code)
                    continue
                tokens[i] += response.tensors["num_output_tokens"].item()
                if response.final:
                    ends[i].append("final")
                elif count == cancelled_after.get(i):
                    stream.cancel()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()

    assert all(len(ended) == 1 for ended in ends.values()), ends
    for i in range(64):
        if i not in cancelled_after:
            assert ends[i] == ["final"]
            assert tokens[i] == num_tokens[i]
    until(lambda: server.metric("kv_blocks_used") == 0)


def test_cancelling_ends_generation_within_a_second(server):
    before = server.metric("requests_total", outcome="cancelled")
    streams = [
        send(
            server,
            f"Tell {i}",
            stream=stream,
            sampling={"max_tokens": 2000, "ignore_eos": True},
        )
        for i, stream in enumerate([True, True, False, False])
    ]
    until(lambda: server.metric("requests_running") == 4)
    for stream in streams:
        stream.cancel()
    until(lambda: server.metric("kv_blocks_used") == 0, timeout=5)  # 1 s on a quiet machine
    until(lambda: server.metric("requests_total", outcome="cancelled") == before + 4)
    log = server.log.read_text()
    assert "[vllm] Cancelling the request" in log
    assert "[vllm] Successfully cancelled the request" in log


def test_closed_http_connection_cancels(server):
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/smollm2/generate_stream",
        data=json.dumps(
            {"text_input": "Tell me", "stream": True, "max_tokens": 2000, "ignore_eos": True}
        ).encode(),
    )
    responses = [urllib.request.urlopen(request, timeout=60) for _ in range(3)]
    for response in responses:
        assert response.readline().startswith(b"data: ")
    before = server.metric("requests_total", outcome="cancelled")
    for response in responses:
        response.close()
    until(lambda: server.metric("requests_total", outcome="cancelled") == before + 3)
    until(lambda: server.metric("kv_blocks_used") == 0)


def test_waiting_requests_can_be_cancelled(server, tokenizer):
    """Two requests fill the cramped model; those that wait are never computed."""
    computed = server.metric("prompt_tokens_total", "cramped")
    long = {"max_tokens": 230, "ignore_eos": True}
    running = [send(server, f"Tell {i}", model="cramped", sampling=long) for i in range(2)]
    until(lambda: server.metric("requests_running", "cramped") == 2)
    waiting = [send(server, f"Wait {i}", model="cramped", sampling=long) for i in range(4)]
    until(lambda: server.metric("requests_waiting", "cramped") == 4)
    for stream in waiting:
        stream.cancel()
    until(lambda: server.metric("requests_waiting", "cramped") == 0)
    for stream in running:
        stream.cancel()
    until(lambda: server.metric("requests_running", "cramped") == 0)
    prompts = 2 * len(tokenizer.encode("Tell 0"))
    until(lambda: server.metric("prompt_tokens_total", "cramped") == computed + prompts)


def test_requests_beyond_the_queue_are_refused(server):
    """Two run and four wait: six of ten requests are answered, four get an error with the limit."""
    sampling = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
    streams = [
        send(server, f"Tell {i}", model="cramped", sampling=sampling, return_num_output_tokens=True)
        for i in range(10)
    ]
    responses = [list(stream) for stream in streams]
    refused = [response for (response,) in responses if response.error]
    answered = [response for (response,) in responses if not response.error]
    assert len(refused) == 4
    assert {response.code for response in refused} == {"UNAVAILABLE"}
    assert all("max_queue_size" in response.error for response in refused)
    assert all(r.tensors["num_output_tokens"].item() == 60 for r in answered)


def test_request_that_waits_longer_than_its_timeout_is_refused(server):
    """tensorrtllm_backend#255: a timeout ends waiting requests only, not the two running ones."""
    long = {"max_tokens": 128, "ignore_eos": True}
    running = [
        send(server, f"Tell {i}", model="cramped", sampling=long, timeout=5, stream=True)
        for i in range(2)
    ]
    for stream in running:
        assert not stream.next().error
    patient = send(server, "Wait", model="cramped", sampling=long)
    started = time.monotonic()
    (refused,) = collect(server, "Wait", model="cramped", sampling=long, timeout=0.3)
    assert refused.code == "UNAVAILABLE"
    assert refused.error == "timeout: the request has waited 0.3 s for its first token"
    assert time.monotonic() - started < 5
    for stream in [*running, patient]:
        assert not list(stream)[-1].error


def test_requests_beyond_the_kv_cache_are_preempted(server):
    """Requests that fit only one after the other are preempted and still complete."""
    before = server.metric("preemptions_total", "cramped")
    sampling = {"max_tokens": 48, "ignore_eos": True, "temperature": 0}
    prompt = "One two three four five six seven eight nine ten. " * 20
    alone = complete(server, prompt, model="cramped", sampling=sampling)
    with ThreadPoolExecutor(6) as pool:
        answers = [
            pool.submit(complete, server, prompt, model="cramped", sampling=sampling)
            for _ in range(4)
        ]
        assert [answer.result() for answer in answers] == [alone] * 4
    until(lambda: server.metric("preemptions_total", "cramped") > before)


def test_max_output_tokens_caps_the_answer(server):
    (response,) = collect(
        server,
        "Tell me",
        model="cramped",
        sampling={"max_tokens": 300, "ignore_eos": True},
        return_finish_reason=True,
        return_num_output_tokens=True,
    )
    assert response.tensors["num_output_tokens"].item() == 240
    assert response.string("finish_reason") == "length"


def test_200_short_requests_at_once(server):
    sampling = {"temperature": 0, "max_tokens": 4}
    with ThreadPoolExecutor(200) as pool:
        answers = [
            pool.submit(complete, server, "The capital of France is", sampling=sampling)
            for _ in range(200)
        ]
        assert len({answer.result() for answer in answers}) == 1
