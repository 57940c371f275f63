"""One Triton Server for all server tests, with two models: a roomy one and a cramped one."""

import pytest

from backend.serve import TritonServer
from tests.server.harness import Server, complete, free_ports, until, write_model

# Limits that tests can reach: 2 run, 4 wait, and the KV cache holds 256 tokens in fp32.
CRAMPED = {
    "max_num_seqs": 2,
    "max_queue_size": 4,
    "max_num_batched_tokens": 64,
    "max_output_tokens": 128,
    "kv_cache_memory": 16 * 16 * 46080,
}


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    repository = tmp_path_factory.mktemp("model_repository")
    # float32: the same greedy text alone and in any batch
    write_model(repository, "smollm2", dtype="float32", kv_cache_memory="1GiB")
    write_model(repository, "cramped", dtype="float32", **CRAMPED)
    return repository


@pytest.fixture(scope="session")
def server(repository, tmp_path_factory):
    """The running server. Models are loaded explicitly, so that tests can add their own."""
    http, grpc, metrics = free_ports(3)
    log = tmp_path_factory.mktemp("log") / "server.log"
    with (
        log.open("wb") as output,
        TritonServer(
            repository,
            http,
            grpc,
            metrics,
            arguments=[
                "--model-control-mode=explicit",
                "--load-model=smollm2",
                "--load-model=cramped",
                "--metrics-interval-ms=50",
            ],
            log=output,
        ) as running,
    ):
        yield Server(
            f"http://localhost:{http}",
            f"localhost:{grpc}",
            f"http://localhost:{metrics}",
            log,
            running.process.pid,
        )


@pytest.fixture(autouse=True)
def server_goes_on(server):
    """After each test both models must be idle, hold no block, and answer."""
    yield
    for model in ("smollm2", "cramped"):
        for gauge in ("kv_blocks_used", "requests_running", "requests_waiting"):
            until(lambda gauge=gauge, model=model: server.metric(gauge, model) == 0)
        one_token = {"temperature": 0, "max_tokens": 1}
        assert complete(server, "The capital of France is", model=model, sampling=one_token)
