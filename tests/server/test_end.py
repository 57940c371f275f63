"""Open streams when a model is unloaded, the server is stopped, or a process is killed."""

import sqlite3
import time

import psutil
import pytest
import tritonclient.grpc as grpcclient

from tritium.backend.host.serve import TritonServer
from tritium.client import GenerationError, GrpcClient
from tritium.loadtests.faults import BREAKS, MODEL_PY, OUTPUT_PY
from tritium.loadtests.harness import free_ports, until, write_model

ENDLESS = {"max_tokens": 2000, "ignore_eos": True, "temperature": 0}
PARAMETERS = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "kv_cache_memory": "64MiB",
    "drain_seconds": 0.5,
}


@pytest.fixture
def models(tmp_path):
    return tmp_path / "models"


@pytest.fixture
def start(models, tmp_path):
    """Starts a separate server with these models; returns it and its gRPC address."""
    servers = []

    def start(*names: str) -> tuple[TritonServer, str]:
        ports = free_ports(3)
        with (tmp_path / "server.log").open("wb") as log:
            arguments = ["--model-control-mode=explicit", *(f"--load-model={n}" for n in names)]
            servers.append(TritonServer(models, *ports, arguments, log=log))
            servers[-1].start()
        servers[-1].wait_until_ready(timeout=60)
        time.sleep(1)  # its models must have seen that it is ready
        return servers[-1], f"localhost:{ports[1]}"

    yield start
    for server in servers:
        server.stop(timeout=5)


def streams(address: str, model: str, number: int = 3):
    found = [GrpcClient(address, model).stream("Go on", sampling=ENDLESS) for _ in range(number)]
    for stream in found:
        next(stream)
    return found


def error_of(stream) -> GenerationError:
    with pytest.raises(GenerationError) as caught:
        list(stream)
    return caught.value


def test_stopped_server_ends_streams_with_an_error_after_drain_seconds(
    start, models, tiny_weights, tmp_path
):
    ledger = tmp_path / "ledger"
    write_model(models, "m", model=tiny_weights, ledger_path=ledger, **PARAMETERS)
    server, address = start("m")
    running = streams(address, "m")
    server.process.terminate()
    for stream in running:
        error = error_of(stream)
        assert (error.code, error.message) == ("UNAVAILABLE", "the model is shutting down")
    assert server.process.wait(20) == 0
    (file,) = ledger.glob("*.ledger")
    rows = sqlite3.connect(file).execute("SELECT outcome FROM requests").fetchall()
    assert rows == [("shutdown",)] * 3


def test_unloaded_model_ends_its_streams_with_an_error_after_drain_seconds(
    start, models, tiny_weights
):
    for name in ("leaves", "stays"):
        write_model(models, name, model=tiny_weights, **PARAMETERS)
    _, address = start("leaves", "stays")
    staying = streams(address, "stays", 1)[0]
    running = streams(address, "leaves")
    with grpcclient.InferenceServerClient(address) as control:
        control.unload_model("leaves")
    for stream in running:
        assert error_of(stream).message == "the model is shutting down"
    assert next(staying)
    staying.cancel()


def stub_of(server: TritonServer, model: str) -> psutil.Process:
    processes = psutil.Process(server.process.pid).children()
    (stub,) = [p for p in processes if any(f"/{model}/" in word for word in p.cmdline())]
    return stub


def test_server_whose_stub_is_killed_exits_and_ends_its_streams(start, models, tiny_weights):
    write_model(models, "m", model=tiny_weights, **PARAMETERS)
    server, address = start("m")
    running = streams(address, "m")
    stub_of(server, "m").kill()
    for stream in running:
        assert error_of(stream).code == "UNAVAILABLE"
    assert server.process.wait(20) != 0


@pytest.mark.parametrize("thread", ["output", "engine"])
def test_server_exits_when_a_thread_of_the_model_fails(
    start, models, tiny_weights, tmp_path, thread
):
    """All open requests get an error, and a bill."""
    ledger = tmp_path / "ledger"
    write_model(models, "m", model=tiny_weights, ledger_path=ledger, **PARAMETERS)
    (models / "m/1/model.py").write_text(MODEL_PY if thread == "engine" else OUTPUT_PY)
    server, address = start("m")
    running = streams(address, "m")
    if thread == "engine":
        with pytest.raises(GenerationError):
            GrpcClient(address, "m").generate("Go", sampling=ENDLESS | {"seed": BREAKS})
    (models / "m/1/fails").touch()
    errors = [error_of(stream) for stream in running]
    assert {error.code for error in errors} <= {"UNAVAILABLE", "INTERNAL"}
    if thread != "engine":
        reason = "the model's thread 'output' has failed: RuntimeError('injected')"
        assert {error.message for error in errors} == {reason}
    server.process.wait(20)
    (file,) = ledger.glob("*.ledger")
    (number,) = sqlite3.connect(file).execute("SELECT count(*) FROM requests").fetchone()
    assert number == (4 if thread == "engine" else 3)


def test_server_without_exit_on_crash_serves_its_other_models(start, models, tiny_weights):
    for name in ("killed", "other"):
        write_model(models, name, model=tiny_weights, exit_on_crash="false", **PARAMETERS)
    server, address = start("killed", "other")
    stub_of(server, "killed").kill()
    client = GrpcClient(address, "other")
    assert client.generate("Go on", sampling={"max_tokens": 4, "ignore_eos": True}).text
    with grpcclient.InferenceServerClient(address) as control:
        control.load_model("killed")
    client = GrpcClient(address, "killed")
    assert client.generate("Go on", sampling={"max_tokens": 4, "ignore_eos": True}).text
    until(lambda: server.process.poll() is None)
