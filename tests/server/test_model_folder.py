"""Where a server finds its model: in its own folder, by the name on the Hub; and broken files."""

import os
import shutil
import subprocess
import sys

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.adapters import write_adapter
from tests.backend.test_files import POINTER
from tests.local_hub import local_hub
from tritium.backend.runner.models.loader import load_config
from tritium.client import GrpcClient
from tritium.loadtests.harness import complete, free_ports, until, write_model

LIMITS = {"kv_cache_memory": "1MiB", "max_model_len": 256}


@pytest.fixture
def control(server):
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        yield client


@pytest.fixture
def place(repository, tiny_weights):
    """Puts the weights into a model's folder; returns them."""
    return lambda name: shutil.copytree(tiny_weights, repository / name / "weights")


@pytest.mark.parametrize(
    ("name", "start"), [("relative", ""), ("marked", "$$TRITON_MODEL_DIRECTORY/")]
)
def test_paths_start_at_the_model_s_folder(server, repository, control, place, name, start):
    weights = place(name)
    write_adapter(repository / name / "adapter", load_config(weights), ("q_proj",))
    write_model(
        repository,
        name,
        model=f"{start}weights",
        lora_modules=f'{{"mine": "{start}adapter"}}',
        ledger_path=f"{start}ledger",
        trace_path=f"{start}trace.jsonl",
        **LIMITS,
    )
    control.load_model(name)
    complete(server, "Hello", model=name)
    control.unload_model(name)
    until(lambda: not control.is_model_ready(name))
    until(lambda: (repository / name / "trace.jsonl").is_file())
    assert list((repository / name / "ledger").glob("*.ledger"))


def test_broken_files_are_load_errors_that_name_them(server, repository, control, place):
    weights = place("broken")
    write_model(repository, "broken", model="weights", **LIMITS)
    for file, content, cause in [
        ("model.safetensors", POINTER.encode(), "is a git-lfs pointer, not the file itself"),
        ("config.json", b'{\n"a" 1}', "is not valid JSON: line 2, column 5"),
    ]:
        (weights / file).write_bytes(content)
        with pytest.raises(InferenceServerException) as refused:
            control.load_model("broken")
        assert f"{weights / file} {cause}" in refused.value.message()


def test_a_model_by_its_name_on_the_hub(server, tiny_weights, tmp_path):
    ports = free_ports(3)
    options = [
        word
        for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)
        for word in (f"--{name}-port", str(port))
    ]
    log = tmp_path / "log"
    with local_hub({"org/tiny": tiny_weights}) as hub, log.open("wb") as output:
        settings = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
        process = subprocess.Popen(
            [sys.executable, "-m", "tritium", "serve", "--model", "org/tiny", *options],
            env={**os.environ, **settings, "no_proxy": "127.0.0.1,localhost"},
            stdout=output,
            stderr=output,
        )
        try:
            until(lambda: b"Ready. Models: tiny." in log.read_bytes(), timeout=120)
            client = GrpcClient(f"localhost:{ports[1]}", model="tiny")
            assert client.generate("Hello", sampling={"max_tokens": 2})
        finally:
            process.terminate()
            process.wait(60)
    assert "org/tiny: downloading " in log.read_text()
