"""Requests at the edges of a model: tokens it does not have, hidden stops, chat templates."""

import json
import shutil

import pytest
import tritonclient.grpc as grpcclient

from tritium.loadtests.harness import collect, complete, send, write_model

PROMPT = "The quick brown fox"
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(server, repository, tiny_weights, tmp_path_factory):
    """A tiny model whose tokenizer has two tokens more than the embedding."""
    weights = shutil.copytree(tiny_weights, tmp_path_factory.mktemp("edges") / "weights")
    path = weights / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": 49152 + i, "content": text, "special": True, **flags}
        for i, text in enumerate(("[PAD]", "[MORE]"))
    ]
    path.write_text(json.dumps(tokenizer))
    write_model(repository, "edges", model=weights, dtype="float32", kv_cache_memory="16MiB")
    with grpcclient.InferenceServerClient(server.grpc_url) as control:
        control.load_model("edges")
        yield "edges"
        control.unload_model("edges")


@pytest.mark.parametrize(
    ("text", "sampling", "words"),
    [
        ("a [PAD] b", {}, ["text_input", "'[PAD]' (49152)", "0 to 49151"]),
        ("a", {"logit_bias": {"49152": 1}}, ["logit_bias", "49152", "0 to 49151"]),
        ("a", {"allowed_token_ids": [49153]}, ["allowed_token_ids", "49153"]),
        ("a", {"stop_token_ids": [49152]}, ["stop_token_ids", "49152"]),
        ("a", {"bad_words": ["[MORE]"]}, ["bad_words", "'[MORE]' (49153)"]),
    ],
)
def test_tokens_beyond_the_model(server, model, text, sampling, words):
    """The one who sends them gets an error; nobody else notices, however often they come."""
    alone = complete(server, PROMPT, model=model, sampling=GREEDY)
    with send(server, PROMPT, model=model, sampling=GREEDY, stream=True) as neighbour:
        pieces = [neighbour.next().text]
        for _ in range(4):
            (response,) = collect(server, text, model=model, sampling=sampling)
            assert response.code == "INVALID_ARGUMENT"
            assert all(word in response.error for word in words), response.error
        pieces += [response.text for response in neighbour]
    assert "".join(pieces) == alone


def test_a_hidden_stop(server, model, tokenizer):
    """<|im_end|> ends the answer, although it has no text there."""
    sampling = {**GREEDY, "logit_bias": {str(tokenizer.special_token_id("<|im_end|>")): 100}}
    (response,) = collect(
        server,
        PROMPT,
        model=model,
        sampling={**sampling, "stop": ["<|im_end|>"]},
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_num_output_tokens=True,
    )
    assert response.text == ""
    assert response.string("finish_reason") == "stop"
    assert response.tensors["num_output_tokens"].item() == 1
    included = {**sampling, "stop": ["<|im_end|>"], "include_stop_str_in_output": True}
    assert complete(server, PROMPT, model=model, sampling=included) == "<|im_end|>"


# -- chat templates --

ANSWER = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure, "}]


def chat(server, model, messages, **options):
    return collect(server, None, model=model, messages=json.dumps(messages), **options)[0]


def num_tokens(server, model, messages, **options) -> int:
    response = chat(server, model, messages, return_num_input_tokens=True, **options)
    assert not response.error, response.error
    return response.tensors["num_input_tokens"].item()


def test_chat_options(server, model, tokenizer):
    plain = num_tokens(server, model, ANSWER)
    # "<|im_end|>" and the line break after it are missing.
    assert num_tokens(server, model, ANSWER, sampling={"continue_final_message": True}) == plain - 2
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    assert num_tokens(server, model, ANSWER, sampling=kwargs) == plain
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert num_tokens(server, model, parts) == num_tokens(server, model, ANSWER[:1])


def test_chat_options_that_are_refused(server, model):
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    response = chat(server, model, image)
    assert response.code == "UNIMPLEMENTED"
    assert "'image_url'" in response.error
    wrong = {"chat_template_kwargs": {"messages": []}}
    response = chat(server, model, ANSWER, sampling=wrong)
    assert response.code == "INVALID_ARGUMENT"
    assert "chat_template_kwargs: 'messages'" in response.error
    (response,) = collect(server, "Hi", model=model, sampling={"continue_final_message": True})
    assert response.code == "INVALID_ARGUMENT"
    assert "continue_final_message" in response.error
