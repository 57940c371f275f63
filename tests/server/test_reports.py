"""Faults that users of similar servers reported, as far as no other test covers them."""

import json
import random
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tritium.loadtests.harness import collect, complete, send, until

PROMPT = "The capital of France is"
FORCED = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}


def test_single_response_calls_of_a_decoupled_model_explain_the_error(server):
    """server#8021: ModelInfer over gRPC, and /generate with stream = true."""
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        text = grpcclient.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([PROMPT.encode()], dtype=np.object_))
        with pytest.raises(InferenceServerException, match="decoupled"):
            client.infer("smollm2", [text])
    body = {"text_input": PROMPT, "stream": True, "max_tokens": 4}
    # Triton Server 2.51 answers with status 200.
    _, message = server.http("models/smollm2/generate", body)
    assert "exactly 1 response" in json.loads(message)["error"]


@pytest.mark.parametrize("token", ["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
def test_special_tokens_in_a_prompt_are_one_token_each(server, token):
    """vllm PR#16976: they are not split into characters."""

    def num_tokens(text):
        (response,) = collect(
            server, text, sampling={"max_tokens": 1}, return_num_input_tokens=True
        )
        return response.tensors["num_input_tokens"].item()

    assert num_tokens(f"Hello{token * 3}") == num_tokens("Hello") + 3


@pytest.mark.parametrize(
    "text",
    [
        "😀😀😀😀😀",
        "👍🏽👍🏽👍🏽👍🏽",
        "👩‍👩‍👧‍👦 👩‍👩‍👧‍👦 👩‍👩‍👧‍👦",
        "你好,请介绍一下北京。",
        "日本の首都は",
    ],
)
def test_characters_are_neither_split_nor_replaced(server, text):
    """server#8039, tensorrtllm_backend#493: every chunk is whole characters."""
    with ThreadPoolExecutor(2) as pool:
        streamed = pool.submit(collect, server, text, stream=True, sampling=FORCED)
        whole = pool.submit(complete, server, text, sampling=FORCED)
    chunks = [response.text for response in streamed.result()]  # decoded strictly
    assert "".join(chunks) == whole.result()
    assert not any("\N{REPLACEMENT CHARACTER}" in chunk for chunk in chunks[:-1])


def test_many_cancellations(server):
    """TensorRT-LLM#10810: 50 streams with logprobs and a common prefix, cancelled at any time."""
    rng = random.Random(0)
    prompt = "Once upon a time there was a server that had many clients. " * 8
    before = complete(server, prompt)
    delays = [rng.uniform(0, 3) for _ in range(50)]

    def run(delay):
        sampling = {"max_tokens": 500, "ignore_eos": True, "logprobs": 3}
        with send(server, prompt, stream=True, sampling=sampling, return_logprobs=True) as stream:
            timer = threading.Timer(delay, stream.cancel)
            timer.start()
            (*_, last) = stream
            return last.code

    with ThreadPoolExecutor(len(delays)) as pool:
        assert set(pool.map(run, delays)) == {"CANCELLED"}
    until(lambda: server.metric("kv_blocks_used") == 0, timeout=5)
    assert complete(server, prompt) == before


def resources(process_id):
    """(resident bytes, file descriptors) of the server and the stubs of its models."""
    processes = [psutil.Process(process_id)]
    processes += processes[0].children(recursive=True)
    return sum(p.memory_info().rss for p in processes), sum(p.num_fds() for p in processes)


def test_memory_and_descriptors_do_not_grow(server):
    """server#6270, server#6660: short requests with stop strings, and many streams."""

    def request(i):
        sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
        if i % 2:
            sampling["stop"] = ["never there", "!"]
        responses = collect(server, f"Number {i}", stream=i % 3 == 0, sampling=sampling)
        return not responses[-1].error

    measured = []
    for _ in range(4):
        with ThreadPoolExecutor(20) as pool:
            assert all(pool.map(request, range(60)))
        time.sleep(0.5)  # until the connections are closed
        measured.append(resources(server.process_id))
    (memory, descriptors), (last_memory, last_descriptors) = measured[1], measured[-1]
    assert last_memory < memory + 2**24, measured
    assert last_descriptors <= descriptors + 8, measured


def test_metrics_count_exactly(server):
    """server#7583: known requests, alone and concurrently."""

    def counters():
        names = ("prompt_tokens_total", "output_tokens_total")
        return [server.metric(name) for name in names] + [
            server.metric("requests_total", outcome="length")
        ]

    before = counters()
    sampling = {"temperature": 0, "max_tokens": 7, "ignore_eos": True}
    for _ in range(2):
        complete(server, PROMPT, sampling=sampling)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: complete(server, PROMPT, sampling=sampling), range(4)))
    expected = [value + grown for value, grown in zip(before, (30, 42, 6), strict=True)]
    until(lambda: counters() == expected)


def test_orca_header(server):
    """A response header has the KV cache's load, if the server supports it (2.51 does not)."""
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/smollm2/generate",
        json.dumps({"text_input": PROMPT, "max_tokens": 1}).encode(),
        {"endpoint-load-metrics-format": "text"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        load = response.headers.get("endpoint-load-metrics")
    if load is None:
        pytest.skip("this Triton Server has no ORCA header")
    assert "kv_cache_utilization" in load
