"""Bad input gets the right code and a message that names the field; the server stays usable."""

import json

import pytest
import tritonclient.grpc as grpcclient

from tritium.loadtests.harness import collect, complete, write_model

PROMPT = "The capital of France is"
MESSAGES = json.dumps([{"role": "user", "content": "Hi"}])


def error_of(server, text, **options):
    (response,) = collect(server, text, **options)
    assert response.error
    return response.code, response.error


@pytest.mark.parametrize(
    ("text", "tensors", "words"),
    [
        (None, {}, ["text_input", "messages"]),
        (PROMPT, {"messages": MESSAGES}, ["both", "text_input", "messages"]),
        ("", {}, ["text_input", "empty"]),
        (b"caf\xe9", {}, ["text_input", "UTF-8"]),
        ([PROMPT, PROMPT], {}, ["text_input"]),
        (None, {"messages": "[]"}, ["messages", "at least one"]),
        (None, {"messages": "{}"}, ["messages", "list"]),
        (None, {"messages": "[1]"}, ["messages", "role"]),
        (None, {"messages": '[{"role": "user"}]'}, ["messages", "content"]),
        (None, {"messages": '[{"role": "user", "content": "\\ud800"}]'}, ["messages"]),
        (None, {"messages": "[[["}, ["messages", "JSON"]),
        (PROMPT, {"stop": [b"\xff"]}, ["stop", "UTF-8"]),
        (PROMPT, {"stop": [""]}, ["stop", "empty"]),
        (PROMPT, {"request_class": "express"}, ["request_class", "express", "interactive"]),
    ],
)
def test_tensors(server, text, tensors, words):
    status, message = error_of(server, text, **tensors)
    assert status == "INVALID_ARGUMENT" or "unexpected shape" in message, message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ("{broken", ["sampling_parameters", "JSON"]),
        ("[1, 2]", ["sampling_parameters", "object"]),
        ("7", ["sampling_parameters", "object"]),
        ({"temprature": 1}, ["temprature", "temperature"]),
        ({"temperature": -1}, ["temperature", "-1", "0"]),
        ({"temperature": "hot"}, ["temperature", "hot"]),
        ({"top_p": 0}, ["top_p", "0"]),
        ({"top_p": 2}, ["top_p", "2"]),
        ({"top_k": -2}, ["top_k", "-2"]),
        ({"min_p": 1.5}, ["min_p", "1.5"]),
        ({"max_tokens": 0}, ["max_tokens", "0", "1"]),
        ({"max_tokens": -1}, ["max_tokens", "-1"]),
        ({"max_tokens": "abc"}, ["max_tokens", "abc"]),
        ({"seed": "abc"}, ["seed", "abc"]),
        ({"seed": [1]}, ["seed", "[1]"]),
        ({"stop": [1]}, ["stop", "1"]),
        ({"stop_token_ids": [10**9]}, ["stop_token_ids", str(10**9)]),
        ({"min_tokens": 9, "max_tokens": 8}, ["min_tokens", "9", "8"]),
        ({"ignore_eos": "maybe"}, ["ignore_eos", "maybe"]),
        ({"n": 0}, ["'n'", "0"]),
        ({"n": 65}, ["'n'", "65", "64"]),
        ({"presence_penalty": 3}, ["presence_penalty", "3", "2"]),
        ({"logit_bias": {"99999": 1}}, ["logit_bias", "99999", "49151"]),
        ({"allowed_token_ids": [-1]}, ["allowed_token_ids", "-1"]),
        ({"repetition_detection": {"min_count": 0}}, ["repetition_detection", "0"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_sampling_parameters(server, sampling, words, stream):
    status, message = error_of(server, PROMPT, sampling=sampling, stream=stream)
    assert status == "INVALID_ARGUMENT"
    assert all(word in message for word in words), message


def test_same_errors_over_http(server):
    status, body = server.http("models/smollm2/generate", {"text_input": PROMPT, "temperature": -1})
    assert status == 400
    assert "temperature" in json.loads(body)["error"]


# JSON for /generate with invalid text: bytes that are not UTF-8, and lone surrogates.
INVALID_BODIES = [
    (b'{"text_input": "caf\xe9"}', ["text_input", "UTF-8"]),
    (b'{"text_input": "a\xed\xa0\x80"}', ["text_input", "UTF-8"]),  # U+D800
    (b'{"text_input": "a", "lora_name": "\xff"}', ["parameters", "UTF-8"]),
    (b'{"text_input": "a", "see\xe9d": 1}', ["parameters", "UTF-8"]),
    (b'{"text_input": "a", "\xed\xa0\x80": "b"}', ["parameters", "UTF-8"]),
    (b'{"text_input": "\\ud800"}', ["surrogate"]),
    (b'{"text_input": "a", "\\ud800": 1}', ["surrogate"]),
    (b'{"text_input": "a", "lora_name": "\\udfff"}', ["parameters", "UTF-8"]),
]


def check_invalid_body(server, model, endpoint, body, words):
    status, message = server.http(f"models/{model}/{endpoint}", body)
    # Triton Server 2.51 answers 500 to JSON that it cannot parse itself.
    assert status == 400 or (status == 500 and "parse the request JSON" in message), message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("body", "words"), INVALID_BODIES)
@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_invalid_text_over_http(server, endpoint, body, words):
    check_invalid_body(server, "smollm2", endpoint, body, words)


@pytest.mark.parametrize("sampling", ['{"stop": "\\ud800"}', '{"\\udfff": 1}'])
def test_lone_surrogate_in_sampling_parameters(server, sampling):
    body = {"text_input": PROMPT, "sampling_parameters": sampling}
    status, message = server.http("models/smollm2/generate", body)
    assert status == 400
    assert "sampling_parameters" in message
    assert "lone surrogate" in message


@pytest.mark.parametrize("tensors", [{"image": "aGk="}, {"embedding_request": "{}"}])
def test_unsupported_tensors(server, tensors):
    status, message = error_of(server, PROMPT, **tensors)
    assert status == "UNIMPLEMENTED"
    assert next(iter(tensors)) in message


def test_unsupported_sampling_parameter(server):
    status, message = error_of(server, PROMPT, sampling={"best_of": 3})
    assert status == "UNIMPLEMENTED"
    assert "best_of" in message


@pytest.fixture(scope="module")
def long_model(server, repository, tiny_weights):
    """A tiny model with the max_model_len of SmolLM2, whose longest prefill takes a minute."""
    write_model(repository, "long", model=tiny_weights, kv_cache_memory="16MiB")
    with grpcclient.InferenceServerClient(server.grpc_url) as control:
        control.load_model("long")
        yield "long"
        control.unload_model("long")


@pytest.mark.parametrize("over", [-1, 0, 1, 50])
def test_prompts_around_max_model_len(server, long_model, tokenizer, over):
    text = " hello" * (8192 + over)
    assert len(tokenizer.encode(text)) == 8192 + over
    if over == -1:
        # A prefill of 8,191 tokens, which leaves room for an answer of one token.
        (response,) = collect(
            server,
            text,
            model=long_model,
            exclude_input_in_output=True,
            sampling={"max_tokens": 100, "ignore_eos": True},
            return_finish_reason=True,
            return_num_output_tokens=True,
        )
        assert not response.error
        assert response.tensors["num_output_tokens"].item() == 1
    else:
        status, message = error_of(server, text, model=long_model)
        assert status == "INVALID_ARGUMENT"
        assert str(8192 + over) in message
        assert "8192" in message


def test_prompt_of_2_mb(server):
    status, message = error_of(server, "hello " * 350_000)
    assert status == "INVALID_ARGUMENT"
    assert "8192" in message


def test_request_larger_than_the_kv_cache(server):
    status, message = error_of(
        server, " hello" * 450, model="cramped", sampling={"max_tokens": 100}
    )
    assert status == "INVALID_ARGUMENT"
    assert "KV cache" in message
    assert "549" in message
    assert "512" in message


def test_tensor_of_the_wrong_type(server):
    _, message = error_of(server, None, text_input=True)
    assert "text_input" in message


def test_server_still_answers(server):
    assert complete(server, PROMPT).startswith(" Paris")
