"""What a stranger sends in excess: refused at once, by name, while a neighbour's stream goes on."""

import json
import urllib.error
import urllib.request

import pytest
from tritonclient.grpc import service_pb2

from tritium.loadtests.harness import Stream, collect, complete, send

GREEDY = {"temperature": 0, "max_tokens": 16}
PROMPT = "The capital of France is"

MANY = 1_000_000


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("word " * 2 * MANY, {}, "text_input: has 10000000 bytes; at most"),
        (PROMPT, {"stop": ["x"] * MANY}, "stop: has 1000000 elements; at most 256 are allowed"),
        (PROMPT, {"sampling": {"stop": ["x"] * MANY}}, "sampling_parameters: has"),
        (PROMPT, {"sampling": {"x" * MANY: 1}}, "unknown sampling parameter 'xxx"),
        (PROMPT, {"sampling": {"deadline_ms": "9" * 5000}}, "unknown sampling parameter"),
        (PROMPT, {"business_line": "_preemption"}, "business_line: '_preemption' is not allowed"),
        (PROMPT, {"business_line": "x" * MANY}, "business_line: has 1000000 bytes; at most 1024"),
    ],
    ids=["text", "stop", "list", "name", "digits", "system", "line"],
)
def test_excess_is_refused_by_name(server, prompt, fields, message):
    alone = complete(server, PROMPT, sampling=GREEDY)
    with send(server, PROMPT, sampling=GREEDY, stream=True) as beside:
        (response,) = collect(server, prompt, **fields)
        assert (response.code, response.final) == ("INVALID_ARGUMENT", True)
        assert response.error.startswith(message)
        assert len(response.error) <= 1000
        assert "".join(answer.text for answer in beside) == alone


@pytest.mark.parametrize("request_id", [b"\xff\xfe", b"x" * 1000])
def test_ids_that_are_refused(server, request_id):
    data = json.dumps({"text_input": PROMPT, "id": "?"}).encode()
    data = data.replace(b'"?"', b'"' + request_id + b'"')
    request = urllib.request.Request(f"{server.http_url}/v2/models/smollm2/generate", data)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert b"request id" in caught.value.read()
    assert complete(server, PROMPT, sampling=GREEDY)


@pytest.mark.parametrize("request_id", ["tritium-request-1", "tritium-cancel-x"])
def test_ids_that_look_like_those_between_our_own_models(server, request_id):
    request = service_pb2.ModelInferRequest(model_name="smollm2", id=request_id)
    tensor = request.inputs.add(name="text_input", shape=[1], datatype="BYTES")
    tensor.contents.bytes_contents.append(PROMPT.encode())
    with Stream(server.grpc_url, request) as stream:
        assert [response.text for response in stream if response.text]
