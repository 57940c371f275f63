"""A tokenizer that knows more tokens than the model: one request's error, nobody else's."""

import json
import shutil

import pytest
import tritonclient.grpc as grpcclient

from tritium.loadtests.harness import collect, complete, send, until, write_model

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 64, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes, "}]
TEMPLATE = (
    "{{ mood }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(server, repository, tiny_weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "larger"
    shutil.copytree(tiny_weights, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    for i, text in enumerate(["[PAD]", "[IMG]"]):
        token = {"id": 49152 + i, "content": text, "special": True, **flags}
        tokenizer["added_tokens"].append(token)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_model(repository, "larger", model=folder, kv_cache_memory="16MiB")
    with grpcclient.InferenceServerClient(server.grpc_url) as control:
        control.load_model("larger")
        yield "larger"
        control.unload_model("larger")


POISONED = [
    ("a [PAD] b", {}, "text_input: the token '[PAD]' (id 49152)"),
    (PROMPT, {"logit_bias": {"49153": 5}}, "'logit_bias': the token '[IMG]' (id 49153)"),
    (PROMPT, {"allowed_token_ids": [49152]}, "'allowed_token_ids': the token '[PAD]'"),
    (PROMPT, {"stop_token_ids": [60000]}, "'stop_token_ids': the token id 60000"),
    (PROMPT, {"bad_words": ["[PAD]"]}, "'bad_words': the token '[PAD]'"),
]


def test_only_the_request_with_such_a_token_ends(server, model):
    expected = complete(server, PROMPT, model=model, sampling=GREEDY)
    with send(server, PROMPT, model=model, stream=True, sampling=GREEDY) as neighbour:
        texts = [neighbour.next().text]
        for prompt, parameters, said in POISONED:
            (response,) = collect(server, prompt, model=model, sampling=GREEDY | parameters)
            assert response.code == "INVALID_ARGUMENT"
            assert said in response.error
            assert "has 49152 tokens" in response.error
        texts += [response.text for response in neighbour]
    assert "".join(texts) == expected
    assert complete(server, PROMPT, model=model, sampling=GREEDY) == expected


def test_constraint_still_holds(server, model):
    sampling = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 16}
    assert complete(server, PROMPT, model=model, sampling=sampling) in ("yes", "no")


@pytest.mark.parametrize(("include", "text"), [(False, ""), (True, "<|im_end|>")])
def test_stop_string_that_is_a_special_token(server, include, text):
    sampling = {
        "allowed_token_ids": [2],
        "ignore_eos": True,
        "stop": ["<|im_end|>"],
        "include_stop_str_in_output": include,
        "max_tokens": 9,
    }
    (response,) = collect(
        server,
        PROMPT,
        sampling=sampling,
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_num_output_tokens=True,
    )
    assert (response.text, response.string("finish_reason")) == (text, "stop")
    assert response.tensors["num_output_tokens"].item() == 1
    until(lambda: server.metric("kv_blocks_used") == 0)


def test_chat_options_over_http(server, model):
    """As tensors and as parameters; the same tokens as the rendered text."""
    rendered = "happy<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes, "
    greedy = {"temperature": 0, "max_tokens": 8}
    expected = complete(server, rendered, model=model, sampling=greedy)
    chat = {
        "messages": json.dumps(MESSAGES),
        "chat_template_kwargs": '{"mood": "happy"}',
        "continue_final_message": True,
    }
    status, body = server.http(f"models/{model}/generate", {**chat, **greedy})
    assert (status, json.loads(body)["text_output"]) == (200, expected)
    options = {"chat_template_kwargs": {"mood": "happy"}, "continue_final_message": True}
    sampled = {"messages": chat["messages"], "sampling": greedy | options}
    assert complete(server, None, model=model, **sampled) == expected
    status, body = server.http(
        f"models/{model}/generate", {**chat, "add_generation_prompt": True, **greedy}
    )
    assert status == 400
    assert "continue_final_message" in json.loads(body)["error"]
