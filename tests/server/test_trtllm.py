"""The relay model through a real Triton Server: the tensors and clients of TensorRT-LLM."""

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.helpers import ROOT
from tests.server.test_bad_input import INVALID_BODIES, check_invalid_body
from tritium.backend.trtllm.contract import INPUTS, OUTPUTS
from tritium.loadtests.harness import Stream, add_tensor, complete, until, write_model

PROMPT = "The capital of France is"
CHAT = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"  # the answer ends with EOS
CONFIG = (ROOT / "model_repository/ensemble/config.pbtxt").read_text()
MODEL = (ROOT / "model_repository/ensemble/1/model.py").read_text()
_TYPES = {
    name: data_type.removeprefix("TYPE_").replace("STRING", "BYTES")
    for name, data_type, _ in INPUTS
}


def write_relay(repository: Path, name: str, main_model: str) -> None:
    write_model(repository, name, CONFIG, model=main_model)
    (repository / name / "1/model.py").write_text(MODEL)


@pytest.fixture(scope="module")
def control(server):
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def relays(repository, control):
    """A relay model for each of the server's two models."""
    names = {"ensemble": "smollm2", "cramped_relay": "cramped"}
    for name, main_model in names.items():
        write_relay(repository, name, main_model)
        control.load_model(name)
    yield
    for name in names:
        control.unload_model(name)


def ask(server, text, model="ensemble", **tensors) -> Stream:
    """Send a request as TensorRT-LLM's clients do: each tensor has shape [1, n]."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in {"text_input": text, "return_error_code": True, **tensors}.items():
        values = value if isinstance(value, list) else [value]
        add_tensor(request, name, _TYPES[name], values, [1, len(values)])
    return Stream(server.grpc_url, request)


def answer(server, text, **tensors):
    """All responses of one request."""
    with ask(server, text, **tensors) as stream:
        return list(stream)


def text_of(responses) -> str:
    assert not responses[-1].error, responses[-1]
    return "".join(response.text for response in responses)


def test_config(server):
    config = json.loads(server.http("models/ensemble/config")[1])
    inputs = {i["name"]: (i["data_type"], [int(n) for n in i["dims"]]) for i in config["input"]}
    outputs = {o["name"]: (o["data_type"], [int(n) for n in o["dims"]]) for o in config["output"]}
    assert inputs == {name: (data_type, dims) for name, data_type, dims in INPUTS}
    assert outputs == {name: (data_type, dims) for name, data_type, dims in OUTPUTS}
    assert all(tensor["optional"] for tensor in config["input"])
    assert config["max_batch_size"] == 1
    assert config["model_transaction_policy"]["decoupled"] is True


def test_stream_equals_the_main_model_s_answer(server):
    expected = complete(server, PROMPT, sampling={"temperature": 0, "max_tokens": 8})
    responses = answer(server, PROMPT, max_tokens=8, stream=True)
    assert text_of(responses) == expected
    assert len(responses) > 3
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    assert {response.tensors["text_output"].shape for response in responses} == {(1,)}


def test_without_streaming_the_answer_starts_with_the_prompt(server):
    expected = complete(server, PROMPT, sampling={"temperature": 0, "max_tokens": 8})
    for exclude in (None, False, True):
        flags = {} if exclude is None else {"exclude_input_in_output": exclude}
        (response,) = answer(server, PROMPT, max_tokens=8, **flags)
        assert response.final
        assert response.text == (expected if exclude else PROMPT + expected)


def test_generate_endpoints(server):
    """The request of TensorRT-LLM's documentation."""
    body = {"text_input": PROMPT, "max_tokens": 8, "bad_words": "", "stop_words": ""}
    status, generated = server.http("models/ensemble/generate", body)
    assert status == 200
    assert json.loads(generated)["text_output"].startswith(f"{PROMPT} Paris")
    stops = {"stop_words": ["never", "."], "exclude_input_in_output": True}
    _, generated = server.http("models/ensemble/generate", body | stops)
    assert json.loads(generated)["text_output"] == " Paris"
    _, events = server.http("models/ensemble/generate_stream", body | {"stream": True})
    deltas = [json.loads(event)["text_output"] for event in re.findall(r"data: (.*)", events)]
    assert len(deltas) > 3
    assert "".join(deltas).startswith(" Paris")


@pytest.mark.parametrize("disable_ignore_eos", [False, True])
def test_sglang_s_bench_serving(server, disable_ignore_eos):
    """The requests of `bench_serving --backend trt`, and its reading of the responses."""
    payload = {
        "accumulate_tokens": True,
        "text_input": CHAT,
        "temperature": 0.000001,
        "top_p": 1.0,
        "max_tokens": 60,
        "stream": True,
        "min_length": 60,
        "end_id": 1048576,
        "return_num_output_tokens": True,  # added by this test
    }
    if disable_ignore_eos:
        del payload["min_length"], payload["end_id"]
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/ensemble/generate_stream", json.dumps(payload).encode()
    )
    text, num_tokens = "", 0
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if line.strip():
                data = json.loads(line.strip().decode().removeprefix("data:"))
                text += data["text_output"]
                num_tokens += data["num_output_tokens"]
    assert text
    assert (num_tokens < 60) == disable_ignore_eos


def test_log_probs_and_counts(server):
    whole = {}
    for stream in (False, True):
        responses = answer(
            server,
            PROMPT,
            max_tokens=6,
            stream=stream,
            return_log_probs=True,
            return_num_input_tokens=True,
            return_num_output_tokens=True,
        )
        assert {response.tensors["num_input_tokens"].item() for response in responses} == {5}
        counts = [response.tensors["num_output_tokens"].item() for response in responses]
        assert sum(counts) == 6
        logprobs = [response.tensors["output_log_probs"] for response in responses]
        assert [array.shape for array in logprobs] == [(1, 1, count) for count in counts]
        whole[stream] = [value for array in logprobs for value in array.reshape(-1).tolist()]
        cumulated = responses[-1].tensors["cum_log_probs"]
        assert cumulated.shape == (1, 1)
        assert cumulated.item() == pytest.approx(sum(whole[stream]), rel=1e-3)
    assert whole[True] == pytest.approx(whole[False], rel=1e-3)
    (plain,) = answer(server, PROMPT, max_tokens=6)
    assert set(plain.tensors) == {"text_output"}


def test_stop_words_seeds_and_end_id(server, tokenizer):
    whole = text_of(answer(server, "List five fruits:\n1.", max_tokens=30, stream=True))
    stop = whole[9:14]
    options = {"max_tokens": 30, "stream": True, "stop_words": ["never", stop]}
    cut = text_of(answer(server, "List five fruits:\n1.", **options))
    assert cut == whole[: whole.index(stop)]
    sampled = {"max_tokens": 16, "top_k": 50, "temperature": 1.0, "stream": True}
    texts = [text_of(answer(server, "Once", random_seed=s, **sampled)) for s in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    (period,) = tokenizer.encode(".")
    assert text_of(answer(server, PROMPT, max_tokens=30, stream=True, end_id=period)) == " Paris"


@pytest.mark.parametrize(
    ("kind", "guide", "regex"),
    [
        ("regex", "[0-9]{3}", "[0-9]{3}"),
        ("json_schema", '{"enum": [1, "b"]}', '1|"b"'),
        ("ebnf_grammar", "root ::= [a-c]{4}", "[a-c]{4}"),
        ("json", "", r"(?s)\{.*\}"),
    ],
)
def test_guided_decoding(server, kind, guide, regex):
    guides = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    options = {"max_tokens": 60, "end_id": 2, **guides}
    text = text_of(answer(server, "A JSON object: ", stream=True, **options))
    assert re.fullmatch(regex, text)
    (whole,) = answer(server, "A JSON object: ", exclude_input_in_output=True, **options)
    assert whole.text == text


@pytest.mark.parametrize(
    ("tensors", "code", "words"),
    [
        ({"beam_width": 3}, "UNIMPLEMENTED", ["beam_width", "3"]),
        ({"return_context_logits": True}, "UNIMPLEMENTED", ["return_context_logits"]),
        ({"min_length": -1}, "INVALID_ARGUMENT", ["'min_length'", "-1"]),
        ({"temperature": -0.5, "top_k": 2}, "INVALID_ARGUMENT", ["temperature", "-0.5"]),
        ({"top_p": 1.2}, "INVALID_ARGUMENT", ["top_p", "1.2"]),
        ({"max_tokens": 0}, "INVALID_ARGUMENT", ["max_tokens", "0"]),
        ({"end_id": 2**19}, "INVALID_ARGUMENT", ["end_id", str(2**19)]),
        ({"stop_words": [b"\xff"]}, "INVALID_ARGUMENT", ["stop_words", "UTF-8"]),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(?=a)b"},
            "INVALID_ARGUMENT",
            ["'guided_decoding_guide': 'regex': '(?=a)b'", "look-ahead"],
        ),
        (
            {"guided_decoding_guide_type": "structural_tag", "guided_decoding_guide": "a"},
            "INVALID_ARGUMENT",
            ["guided_decoding_guide_type", "'structural_tag'", "ebnf_grammar"],
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(server, tensors, code, words, stream):
    (response,) = answer(server, PROMPT, stream=stream, **tensors)
    assert response.code == code
    assert all(word in response.error for word in words), response.error


def test_errors_over_http(server):
    body = {"text_input": PROMPT, "max_tokens": 8, "temprature": 1}
    status, message = server.http("models/ensemble/generate", body)
    assert status == 400
    assert "temprature" in message
    assert "temperature" in message
    _, message = server.http("models/ensemble/generate", {"max_tokens": 8})
    assert "text_input" in message


def test_relay_is_unavailable_without_its_main_model(server, repository, control):
    write_relay(repository, "early_relay", "late")
    control.load_model("early_relay")
    (response,) = answer(server, PROMPT, model="early_relay", stream=True)
    assert response.code == "UNAVAILABLE"
    assert "late" in response.error
    write_model(repository, "late", dtype="float32", kv_cache_memory="64MiB", max_model_len=512)
    control.load_model("late")
    options = {"model": "early_relay", "max_tokens": 4, "stream": True}
    assert text_of(answer(server, PROMPT, **options)).startswith(" Paris")
    for model in ("late", "early_relay"):
        control.unload_model(model)
    with pytest.raises(InferenceServerException, match="early_relay"):
        control.infer("early_relay", [])


def test_more_concurrent_requests_than_bls_threads(server):
    expected = text_of(answer(server, PROMPT, max_tokens=4, exclude_input_in_output=True))
    with ThreadPoolExecutor(80) as pool:
        answers = pool.map(
            lambda stream: text_of(
                answer(server, PROMPT, max_tokens=4, stream=stream, exclude_input_in_output=True)
            ),
            [False, True] * 40,
        )
        assert set(answers) == {expected}


def test_requests_beyond_the_main_model_s_queue_are_refused_at_once(server):
    """The cramped model has six slots: 44 of 50 requests are refused before the first one ends."""
    options = {"model": "cramped_relay", "max_tokens": 40, "end_id": -1}
    streams = [ask(server, f"Tell {i}", **options) for i in range(50)]
    ends = []

    def wait(stream):
        (response,) = stream
        ends.append(response)

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(wait, streams))
    assert all(response.error for response in ends[:44])
    assert {response.code for response in ends[:44]} == {"UNAVAILABLE"}
    assert all("max_queue_size" in response.error for response in ends[:44])
    assert not any(response.error for response in ends[44:])


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling(server, stream):
    """Running and waiting requests are cancelled."""
    before = server.metric("requests_total", "cramped", outcome="cancelled")
    options = {"model": "cramped_relay", "max_tokens": 230, "end_id": -1, "stream": stream}
    streams = [ask(server, f"Tell {i}", **options) for i in range(6)]
    until(lambda: server.metric("requests_running", "cramped") == 2)
    until(lambda: server.metric("requests_waiting", "cramped") == 4)
    for each in streams:
        each.cancel()
    until(lambda: server.metric("kv_blocks_used", "cramped") == 0, timeout=5)
    until(lambda: server.metric("requests_total", "cramped", outcome="cancelled") == before + 6)


def test_closed_http_connection_cancels(server):
    body = {"text_input": "Tell me", "stream": True, "max_tokens": 2000, "end_id": -1}
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/ensemble/generate_stream", json.dumps(body).encode()
    )
    before = server.metric("requests_total", outcome="cancelled")
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.readline().startswith(b"data: ")
    until(lambda: server.metric("requests_total", outcome="cancelled") == before + 1)


def test_relay_is_unloaded_while_a_stream_runs(server, repository, control):
    write_relay(repository, "passing", "smollm2")
    control.load_model("passing")
    options = {"model": "passing", "max_tokens": 60, "end_id": -1, "stream": True}
    with ask(server, "Tell me", return_num_output_tokens=True, **options) as stream:
        first = stream.next()
        control.unload_model("passing")
        responses = [first, *stream]
    assert sum(response.tensors["num_output_tokens"].item() for response in responses) == 60
    until(lambda: not control.is_model_ready("passing"))


def test_relay_is_a_small_process(server):
    stubs = psutil.Process(server.process_id).children(recursive=True)
    (relay,) = [stub for stub in stubs if "/ensemble/1/model.py" in " ".join(stub.cmdline())]
    assert not any("torch" in mapped.path for mapped in relay.memory_maps())
    assert relay.memory_info().rss < 80 * 2**20


@pytest.mark.parametrize(("body", "words"), INVALID_BODIES)
@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_invalid_text_over_http(server, endpoint, body, words):
    check_invalid_body(server, "ensemble", endpoint, body, words)
    assert text_of(answer(server, PROMPT, max_tokens=1))
