"""Unmodified third-party clients: each gets an answer through a real server.

litellm, llama-index and aiperf need other versions of some packages than the engine. They are
installed in a separate environment (`make clients`, `make test-aiperf`) and run as its processes.
"""

import asyncio
import json
import os
import queue
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcclient_aio
import tritonclient.http as httpclient
from transformers import AutoTokenizer
from tritonclient.utils import InferenceServerException

from tests.conftest import SMOLLM2
from tests.server.test_trtllm import write_relay
from tritium.backend.runner.models.loader import resolve
from tritium.loadtests.harness import complete

PROMPT = "The capital of France is"
NUM_TOKENS = 12
CLIENTS = Path(f"{sys.prefix}-clients/bin")  # next to this environment


@pytest.fixture(scope="module", autouse=True)
def relay(server, repository):
    """The relay model for clients of TensorRT-LLM's backend."""
    write_relay(repository, "ensemble", "smollm2")
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.load_model("ensemble")
        yield
        client.unload_model("ensemble")


@pytest.fixture(scope="module")
def expected(server) -> str:
    return complete(server, PROMPT, sampling={"temperature": 0, "max_tokens": NUM_TOKENS})


# -- tritonclient --


def inputs(module, **tensors):
    """Inputs of vLLM's contract, created as in its own client."""
    made = []
    for name, value in tensors.items():
        datatype = "BOOL" if isinstance(value, bool) else "BYTES"
        tensor = module.InferInput(name, [1], datatype)
        tensor.set_data_from_numpy(
            np.array([value], dtype=bool if datatype == "BOOL" else np.object_)
        )
        made.append(tensor)
    return made


SAMPLING = json.dumps({"temperature": "0", "max_tokens": str(NUM_TOKENS)})


def test_tritonclient_http(server):
    """Every call that this client has; it has none for streams."""
    with httpclient.InferenceServerClient(server.http_url.removeprefix("http://")) as client:
        assert client.is_server_live()
        assert client.is_model_ready("smollm2")
        names = [tensor["name"] for tensor in client.get_model_metadata("smollm2")["inputs"]]
        assert {"text_input", "stream", "sampling_parameters"} <= set(names)
        assert client.get_model_config("smollm2")["max_batch_size"] == 0
        (statistics,) = client.get_inference_statistics("smollm2")["model_stats"]
        assert statistics["name"] == "smollm2"
        with pytest.raises(InferenceServerException, match="decoupled"):
            client.infer("smollm2", inputs(httpclient, text_input=PROMPT))


def test_tritonclient_grpc(server, expected):
    answers = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            "smollm2",
            inputs(grpcclient, text_input=PROMPT, stream=True, sampling_parameters=SAMPLING),
            request_id="1",
            outputs=[grpcclient.InferRequestedOutput("text_output")],
            enable_empty_final_response=True,
        )
        text, final = "", False
        while not final:
            result, error = answers.get(timeout=60)
            assert error is None
            text += result.as_numpy("text_output")[0].decode()
            response = result.get_response()
            assert response.id == "1"
            final = response.parameters["triton_final_response"].bool_param
        client.stop_stream()
    assert text == expected


def test_tritonclient_grpc_aio(server, expected):
    async def answer():
        async def requests():
            yield {
                "model_name": "smollm2",
                "inputs": inputs(
                    grpcclient_aio, text_input=PROMPT, stream=True, sampling_parameters=SAMPLING
                ),
            }

        async with grpcclient_aio.InferenceServerClient(server.grpc_url) as client:
            chunks = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                chunks.append(result.as_numpy("text_output")[0].decode())
            return chunks

    chunks = asyncio.run(answer())
    assert len(chunks) > 3
    assert "".join(chunks) == expected


# -- clients in a separate environment --


def run(program: str, *arguments: str, timeout: float = 120) -> str:
    """The output of a program of the clients' environment."""
    path = CLIENTS / program
    if not path.exists():
        pytest.skip(f"{path} is missing; run `make clients` (aiperf: `make test-aiperf`)")
    process = subprocess.run(
        [path, *arguments],
        check=False,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # no download
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout


def run_script(script: str, *arguments: str) -> Any:
    """The JSON value that a Python script prints as its last line."""
    return json.loads(run("python", "-c", script, *arguments).splitlines()[-1])


LITELLM = """
import json, sys
import litellm

def complete(model, stream):
    return litellm.completion(
        model=f"triton/{model}",
        api_base=f"{url}/v2/models/{model}/generate",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=int(max_tokens),
        top_k=1,
        exclude_input_in_output=True,
        stream=stream,
    )

url, prompt, max_tokens, *models = sys.argv[1:]
answers = {}
for model in models:
    whole = complete(model, stream=False).choices[0].message.content
    deltas = [chunk.choices[0].delta.content or "" for chunk in complete(model, stream=True)]
    answers[model] = [whole, deltas]
print(json.dumps(answers))
"""


def test_litellm(server, expected):
    """The `triton/` provider, whole and streamed, with the main model and the relay model."""
    models = ("smollm2", "ensemble")
    answers = run_script(LITELLM, server.http_url, PROMPT, str(NUM_TOKENS), *models)
    for model in models:
        whole, deltas = answers[model]
        assert whole == expected
        assert "".join(deltas) == expected
        assert len(deltas) > 3


LLAMA_INDEX = """
import json, sys
from llama_index.llms.nvidia_triton import NvidiaTriton

url, prompt, tokens = sys.argv[1:]
client = NvidiaTriton(server_url=url, tokens=int(tokens))
whole = client.complete(prompt).text
chunks = [response.delta for response in client.stream_complete(prompt)]
print(json.dumps([whole, chunks]))
"""


def test_llama_index(server, expected):
    """Its defaults: model `ensemble`, top_k 1, top_p 0, beam_width 1, a seed."""
    whole, chunks = run_script(LLAMA_INDEX, server.grpc_url, PROMPT, str(NUM_TOKENS))
    assert len(chunks) > 3
    assert "".join(chunks) == whole
    # This client omits the last response.
    assert whole
    assert expected.startswith(whole)


def test_aiperf(server, tmp_path):
    """NVIDIA's load generator with its template endpoint."""
    path = resolve(SMOLLM2)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    payload = {
        "payload_template": '{"text_input": {{ text|tojson }}}',
        "response_field": "text_output",
        "stream": True,
        "max_tokens": 8,
        "ignore_eos": True,
    }
    run(
        "aiperf",
        "profile",
        "--model=smollm2",
        f"--url={server.http_url}",
        "--endpoint-type=template",
        "--endpoint=/v2/models/smollm2/generate_stream",
        "--streaming",
        f"--extra-inputs={json.dumps(payload)}",
        f"--tokenizer={tmp_path / 'tokenizer'}",
        "--synthetic-input-tokens-mean=16",
        "--request-count=8",
        "--concurrency=2",
        "--ui=none",
        f"--artifact-dir={tmp_path}",
        timeout=300,
    )
    (report,) = tmp_path.rglob("profile_export_aiperf.json")
    results = json.loads(report.read_text())
    assert results["request_count"]["avg"] == 8
    assert results["time_to_first_token"]["avg"] > 0
    assert results["output_sequence_length"]["avg"] > 1
