"""Requests that name LoRA adapters, through a real Triton Server."""

import json

import pytest
import tritonclient.grpc as grpcclient

from tests.adapters import write_adapter
from tests.conftest import SMOLLM2
from tritium.backend.runner.models.loader import load_config, resolve
from tritium.loadtests.harness import collect, complete, send, write_model

PROMPT = "Once upon a time there was a little robot, who lived alone in a house by the sea. One day"


def sampling(lora: str | None, max_tokens: int = 12) -> dict[str, object]:
    return {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "lora_name": lora}


@pytest.fixture(scope="module")
def model(server, repository, tmp_path_factory):
    """A model with two adapters."""
    directory = tmp_path_factory.mktemp("adapters")
    shapes = load_config(resolve(SMOLLM2))
    adapters = {
        "first": write_adapter(directory / "first", shapes, ("q_proj", "v_proj"), 8, std=0.1),
        "second": write_adapter(directory / "second", shapes, ("down_proj",), 4, std=0.1, seed=1),
    }
    write_model(
        repository,
        "adapted",
        dtype="float32",
        kv_cache_memory="64MiB",
        max_model_len=512,
        prefix_cache="on",
        lora_modules=json.dumps({name: str(path) for name, path in adapters.items()}),
    )
    with grpcclient.InferenceServerClient(server.grpc_url) as control:
        control.load_model("adapted")
        yield "adapted"
        control.unload_model("adapted")


def test_adapters_answer_the_same_alone_and_concurrently(server, model):
    names = [None, "first", "second"]
    alone = [complete(server, PROMPT, model=model, sampling=sampling(name)) for name in names]
    assert len(set(alone)) == 3
    assert alone[0] == complete(server, PROMPT, sampling=sampling(None))
    streams = [
        send(server, PROMPT, model=model, sampling=sampling(name), stream=True)
        for name in names * 2
    ]
    texts = ["".join(response.text for response in stream) for stream in streams]
    assert texts == alone * 2


def test_adapters_do_not_share_kv(server, model):
    prompt = "The kv of an adapter is " + PROMPT

    def num_cached_tokens(name: str | None) -> int:
        [response] = collect(
            server, prompt, model=model, sampling=sampling(name, 1), return_usage=True
        )
        return json.loads(response.string("usage"))["cached_tokens"]

    names = [None, "first", "second"]
    assert [num_cached_tokens(name) for name in names] == [0, 0, 0]
    assert all(num_cached_tokens(name) >= 16 for name in names)


def test_unknown_adapters_get_the_error_of_vllm_s_backend(server, model):
    message = "LoRA unavailable is not supported, we currently support ['first', 'second']"
    [response] = collect(server, PROMPT, model=model, sampling=sampling("unavailable"))
    assert (response.code, response.error) == ("INVALID_ARGUMENT", message)
    body = {"text_input": PROMPT, "parameters": sampling("unavailable")}
    status, answer = server.http(f"models/{model}/generate", body)
    assert (status, json.loads(answer)["error"]) == (400, message)
    [response] = collect(server, PROMPT, sampling=sampling("first"))
    assert (response.code, response.error) == ("INVALID_ARGUMENT", "LoRA feature is not enabled.")
