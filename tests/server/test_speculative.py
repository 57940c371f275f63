"""Speculative decoding through a real Triton Server: the same answers in fewer steps."""

import json
import time

import pytest
import tritonclient.grpc as grpcclient

from tritium.loadtests.harness import collect, complete, write_model

TEXT = "Lindau lies on an island in the east of the lake, and its lighthouse is from 1856."
PROMPT = f"{TEXT}\n{TEXT}\n{TEXT}\nLindau"
NUM_TOKENS = 24
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 0.7, "top_p": 0.9, "seed": 5}


@pytest.fixture(scope="module")
def model(server, repository):
    write_model(
        repository,
        "speculating",
        dtype="float32",
        kv_cache_memory="64MiB",
        max_model_len=512,
        speculative_config=json.dumps({"method": "ngram", "num_speculative_tokens": 4}),
        REPORT_CUSTOM_METRICS="true",
    )
    with grpcclient.InferenceServerClient(server.grpc_url) as control:
        control.load_model("speculating")
        yield "speculating"
        control.unload_model("speculating")


def num_draft_tokens(server, model) -> float:
    """The counter once it is stable: the engine publishes its counters a few times per second."""
    before = -1.0
    while (now := server.metric("draft_tokens_total", model)) != before:
        before = now
        time.sleep(1)
    return now


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answers_equal_those_without_drafts(server, model, sampling):
    before = num_draft_tokens(server, model)
    expected = complete(server, PROMPT, sampling=sampling)
    assert complete(server, PROMPT, model=model, sampling=sampling) == expected
    responses = collect(
        server,
        PROMPT,
        model=model,
        sampling=sampling,
        stream=True,
        return_num_output_tokens=True,
    )
    assert "".join(response.text for response in responses) == expected
    counts = [int(response.tensors["num_output_tokens"].sum()) for response in responses]
    assert sum(counts) == NUM_TOKENS
    assert len(counts) < NUM_TOKENS  # a response has all tokens of its step
    assert num_draft_tokens(server, model) > before


def test_request_can_switch_drafts_off(server, model):
    before = num_draft_tokens(server, model)
    off = {**GREEDY, "speculative": False}
    expected = complete(server, PROMPT, sampling=GREEDY)
    assert complete(server, PROMPT, model=model, sampling=off) == expected
    assert num_draft_tokens(server, model) == before


def test_draft_tokens_are_counted_under_vllm_s_names(server, model):
    complete(server, PROMPT, model=model, sampling=GREEDY)

    def counted(name: str) -> float:
        lines = [line for line in server.metrics() if line.startswith(f"vllm:spec_decode_{name}")]
        (line,) = [line for line in lines if f'model="{model}"' in line]
        return float(line.rsplit(" ", 1)[1])

    assert num_draft_tokens(server, model) == counted("num_draft_tokens_total")
    assert 8 <= counted("num_accepted_tokens_total") <= counted("num_draft_tokens_total")


def test_drafts_need_speculative_config(server):
    [response] = collect(server, PROMPT, sampling={**GREEDY, "speculative": True})
    assert response.code == "INVALID_ARGUMENT"
    assert response.error == (
        "sampling parameter 'speculative': true is not allowed; this server has no "
        "speculative_config"
    )
    complete(server, PROMPT, sampling={**GREEDY, "max_tokens": 1, "speculative": False})
