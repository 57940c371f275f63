"""Random requests of every kind: each gets an answer, or an error that names its fault.

The environment variable FUZZ_REQUESTS sets their number; one number always gives the same requests.
"""

import json
import math
import os
import urllib.error
import urllib.request
import warnings
from dataclasses import fields
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from hypothesis import HealthCheck, given, settings

from tests.server import strategies
from tests.server.strategies import GrpcRequest, HttpRequest
from tritium.backend.front.protocol import INPUTS
from tritium.backend.front.sampling_params import SamplingParams
from tritium.client.types import GenerationError
from tritium.loadtests.harness import Response, Stream, complete, send, until, write_model

NUM_REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "300"))
TIMEOUT = 30  # seconds per request
LIMITS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_queue_size": 8,
    "max_output_tokens": 16,
    "default_max_tokens": 4,
    "kv_cache_memory": 64 * 16 * 512,  # 1,024 tokens
    "prefix_cache": "on",
}
# "": errors by Triton Server itself have no code.
ALLOWED = {"INVALID_ARGUMENT", "UNIMPLEMENTED", "UNAVAILABLE", ""}
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def model(server, repository, tiny_weights):
    write_model(repository, "fuzzed", model=tiny_weights, dtype="float32", **LIMITS)
    with grpcclient.InferenceServerClient(server.grpc_url) as control:
        control.load_model("fuzzed")
        yield "fuzzed"
        control.unload_model("fuzzed")


def test_strategies_cover_every_input_and_parameter():
    assert {*strategies.TEXTS, *strategies.NUMBERS, *strategies.FLAGS} == {
        spec.name for spec in INPUTS
    }
    assert {field.name for field in fields(SamplingParams)} <= set(strategies.SAMPLING)


def test_each_request_gets_its_own_answer_or_error(server, model):
    """A valid request that runs beside each of them gets the same answer as alone."""
    greedy = {"temperature": 0, "max_tokens": 8}
    alone = complete(server, PROMPT, model=model, sampling=greedy)

    @settings(
        max_examples=NUM_REQUESTS,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategies.grpc_requests() | strategies.http_requests())
    def run(request):
        with send(server, PROMPT, model=model, sampling=greedy, stream=True) as beside:
            if isinstance(request, GrpcRequest):
                check_grpc(server, model, request)
            else:
                check_http(server, model, request)
            texts = [response.text for response in beside]
            assert "".join(texts) == alone, texts

    run()
    for gauge in ("requests_running", "requests_waiting", "kv_blocks_used"):
        until(lambda gauge=gauge: server.metric(gauge, model) == 0)
    for outcome in ("internal", "error", "shutdown"):
        assert server.metric("requests_total", model, outcome=outcome) == 0
    assert complete(server, PROMPT, model=model, sampling=greedy) == alone


def check_grpc(server, model: str, request: GrpcRequest) -> None:
    responses = ask(server, model, request)
    if responses[-1].code == "DEADLINE_EXCEEDED":
        # Seen once in thousands of streams, for a request that is answered at the next attempt.
        warnings.warn(f"no answer within {TIMEOUT} s to {request}", stacklevel=1)
        responses = ask(server, model, request)
    for response in responses:
        if response.error:
            check_error(response.code, response.error)
        else:
            assert response.text is not None  # decodes as UTF-8
            check_outputs({name: t.tolist() for name, t in response.tensors.items()})


def ask(server, model: str, request: GrpcRequest) -> list[Response]:
    with Stream(server.grpc_url, request.message(model), TIMEOUT) as stream:
        return list(stream)  # asserts that exactly the last one is final


def check_http(server, model: str, request: HttpRequest) -> None:
    url = f"{server.http_url}/v2/models/{model}/{request.endpoint}"
    try:
        with urllib.request.urlopen(url, request.body, TIMEOUT) as response:
            body = response.read().decode()
    except urllib.error.HTTPError as error:
        # Triton Server quotes parts of the request unchanged.
        body = error.read().decode(errors="replace")
    for event in body.split("\n\n"):
        if event.strip():
            outputs = json.loads(event.removeprefix("data: "), strict=False)
            if "error" in outputs:
                error = GenerationError.from_message(outputs["error"], "")
                check_error(error.code, error.message)
            else:
                check_outputs({k: v if isinstance(v, list) else [v] for k, v in outputs.items()})


def check_error(code: str, message: str) -> None:
    assert code in ALLOWED, (code, message)
    assert "internal" not in message.lower(), message
    assert "Traceback" not in message, message


def check_outputs(outputs: dict[str, list[Any]]) -> None:
    assert "text_output" in outputs
    assert all(map(math.isfinite, outputs.get("cumulative_logprob", [])))
    for name in ("logprobs", "prompt_logprobs", "usage"):
        for text in outputs.get(name, []):
            json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
