"""Token ids are checked against the model, whatever the tokenizer knows; what ends an answer."""

import json
import random

import numpy as np
import pytest

from tritium.backend.config import EngineConfig
from tritium.backend.errors import InvalidArgument
from tritium.backend.front.input_processor import Arrival, InputProcessor
from tritium.backend.front.protocol import parse
from tritium.backend.front.tokenizer import Tokenizer
from tritium.backend.front.vocabulary import Vocabulary

EMBEDDING = 49152  # rows
TOKENS = "with the ids 0 to 49151"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# The reasoning ends like the answer: this token does not end both.
THINKS_BEFORE_IT_ANSWERS = (
    "{% set m = messages[1] %}"
    "{% if m.reasoning_content %}{{ m.reasoning_content }}<|im_start|>{% endif %}"
    "{{ m.content }}<|im_start|>"
)


@pytest.fixture(scope="module")
def larger(tokenizer, tmp_path_factory):
    """SmolLM2's tokenizer with two tokens more than the model."""
    folder = tmp_path_factory.mktemp("larger")
    write_tokenizer(folder, tokenizer)
    return Tokenizer(folder)


def write_tokenizer(folder, tokenizer, **config) -> None:
    content = json.loads(tokenizer.to_json())
    for i, text in enumerate(["[PAD]", "[IMG]"]):
        flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
        content["added_tokens"].append(
            {"id": EMBEDDING + i, "content": text, "special": True, **flags}
        )
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def processor(larger):
    vocabulary = Vocabulary(larger, EMBEDDING, (2,))
    return InputProcessor(EngineConfig(model="x"), larger, 1000, vocabulary)


def translate(processor, parameters=None, **texts):
    texts = texts or {"text_input": "Hi"}
    inputs = {name: np.array([text.encode()], dtype=object) for name, text in texts.items()}
    request = parse(inputs, json.dumps(parameters or {}))
    token_ids = processor.encode(request)
    return processor.engine_requests(request, token_ids, None, Arrival(0.0, 0))


def refusal(processor, parameters=None, **texts) -> str:
    with pytest.raises(InvalidArgument) as refused:
        translate(processor, parameters, **texts)
    return str(refused.value)


# -- tokens that the model lacks --


@pytest.mark.parametrize(
    ("texts", "field"),
    [
        ({"text_input": "a [PAD] b"}, "text_input"),
        ({"messages": '[{"role": "user", "content": "[PAD]"}]'}, "messages"),
    ],
)
def test_prompts(processor, texts, field):
    assert refusal(processor, **texts) == (
        f"{field}: the token '[PAD]' (id 49152) is not allowed; the model's vocabulary has 49152 "
        "tokens, with the ids 0 to 49151"
    )


def test_token_that_is_cut_off_is_not_missed(processor):
    [request] = translate(processor, {"truncate_prompt_tokens": 1}, text_input="[PAD] b")
    assert len(request.prompt_token_ids) == 1


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"logit_bias": {"49153": 1}}, "the token '[IMG]' (id 49153)"),
        ({"logit_bias": {"-1": 1}}, "the token id -1"),
        ({"allowed_token_ids": [5, 49152]}, "the token '[PAD]' (id 49152)"),
        ({"allowed_token_ids": [10**9]}, "the token id 1000000000"),
        ({"stop_token_ids": [49154]}, "the token id 49154"),
        ({"stop_token_ids": 2**63}, "the token id 9223372036854775808"),
        ({"stop_token_ids": [10**4000]}, "the token id 1" + 99 * "0"),
        ({"bad_words": ["no [PAD]"]}, "the token '[PAD]' (id 49152)"),
    ],
)
def test_sampling_parameters(processor, parameters, said):
    [name] = parameters
    message = refusal(processor, parameters)
    assert message.startswith(f"sampling parameter '{name}': {said} is not allowed; ")
    assert message.endswith(TOKENS)
    assert len(message) < 300


@pytest.mark.parametrize(
    "parameters",
    [
        '{"stop_token_ids": ["%s"]}',
        '{"logit_bias": {"%s": 1}}',
        '{"allowed_token_ids": ["%s"]}',
        '{"stop_token_ids": [%s]}',
        '{"allowed_token_ids": [-%s]}',
    ],
)
def test_ids_of_5000_digits(parameters):
    with pytest.raises(InvalidArgument) as refused:
        parse({"text_input": np.array([b"Hi"], dtype=object)}, parameters % ("9" * 5000))
    assert len(str(refused.value)) < 400


def test_any_invented_id_is_refused_or_within_the_embedding(processor):
    """Across all fields and sizes: nothing beyond the embedding reaches the engine."""
    rng = random.Random(1)
    for _ in range(300):
        token_id = rng.choice([1, -1]) * rng.randrange(2 ** rng.randrange(1, 70))
        field = rng.choice(["stop_token_ids", "allowed_token_ids", "logit_bias"])
        value = {str(token_id): 1} if field == "logit_bias" else [token_id]
        if 0 <= token_id < EMBEDDING:
            translate(processor, {field: value})
        else:
            refusal(processor, {field: value})


def test_tokens_that_only_the_model_has(tokenizer):
    """Models have more rows than texts, for speed; such tokens have ids, but no text."""
    vocabulary = Vocabulary(tokenizer, EMBEDDING + 128, ())
    processor = InputProcessor(EngineConfig(model="x"), tokenizer, 1000, vocabulary)
    ids = [EMBEDDING, EMBEDDING + 127]
    bias = {str(token_id): 1 for token_id in ids}
    parameters = {"stop_token_ids": ids, "allowed_token_ids": ids, "logit_bias": bias}
    [request] = translate(processor, parameters)
    assert request.allowed_token_ids == tuple(ids)
    assert "the token id 49280 " in refusal(processor, {"stop_token_ids": [EMBEDDING + 128]})
    assert tokenizer.detokenizer([1], True).add(EMBEDDING) == ""
    assert tokenizer.decode_token(EMBEDDING) == ""


# -- ends --


@pytest.mark.parametrize(
    ("configured", "config", "right"),
    [
        ((7,), {"eos_token": "<|im_end|>"}, {7, 2}),
        ((), {"eos_token": "<|endoftext|>", "chat_template": None}, {0}),
        ((), {"eos_token": "<|endoftext|>"}, {0, 2}),
        ((0,), {}, {0, 2}),
        ((0, 49152, 10**9, -1), {"eos_token": "[PAD]"}, {0, 2}),
        ((0,), {"chat_template": "{{ messages[1].content }}</s>"}, {0}),
        ((0,), {"chat_template": "{{ messages[1].content }} <|im_start|>"}, {0, 1}),
        ((0,), {"chat_template": "{{ messages[1].content }}[PAD]"}, {0}),
        ((0,), {"chat_template": "{{ raise_exception('no') }}"}, {0}),
        ((0,), {"chat_template": THINKS_BEFORE_IT_ANSWERS}, {0}),
    ],
)
def test_tokens_that_end_an_answer(tokenizer, tmp_path, configured, config, right):
    write_tokenizer(tmp_path, tokenizer, **config)
    assert set(Vocabulary(Tokenizer(tmp_path), EMBEDDING, configured).eos_token_ids) == right


def test_ends_reach_the_engine(processor, tokenizer):
    [request] = translate(processor, {"stop_token_ids": [9]})
    assert request.stop_token_ids == {2, 9}
    [request] = translate(processor, {"stop_token_ids": [9], "ignore_eos": True})
    assert request.stop_token_ids == {9}
