"""Requests against the model's own vocabulary, and stop strings that are special tokens."""

import json

import numpy as np
import pytest

from tests.conftest import SMOLLM2
from tritium.backend.config import EngineConfig
from tritium.backend.engine.request import EngineOutput, EngineRequest, FinishReason, SampledToken
from tritium.backend.errors import InvalidArgument
from tritium.backend.front.input_processor import Arrival, InputProcessor
from tritium.backend.front.protocol import parse
from tritium.backend.front.tokenizer import Tokenizer

VOCAB_SIZE = 49150  # two tokens fewer than the tokenizer has
LAST = 49151  # the tokenizer's last token
IM_END = 2


@pytest.fixture(scope="module")
def processor(tokenizer: Tokenizer) -> InputProcessor:
    return InputProcessor(EngineConfig(model=SMOLLM2), tokenizer, 1000, (0,), VOCAB_SIZE)


def submit(processor: InputProcessor, text: str = "Hi", **sampling) -> EngineRequest:
    tensors = {"text_input": np.array([text.encode()], dtype=object)}
    request = parse(tensors, json.dumps(sampling))
    token_ids = processor.encode(request)
    return processor.engine_requests(request, token_ids, None, Arrival(0.0, 0))[0]


def refusal(processor: InputProcessor, text: str = "Hi", **sampling) -> str:
    with pytest.raises(InvalidArgument) as refused:
        submit(processor, text, **sampling)
    return str(refused.value)


def test_a_prompt_of_tokens_that_the_model_lacks(processor, tokenizer):
    text = tokenizer.decode_token(LAST)
    assert tokenizer.encode(text) == [LAST]
    assert refusal(processor, text) == (
        f"text_input: has the token {text!r} (49151), which the model does not know; token ids are "
        "0 to 49149"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [VOCAB_SIZE]),
        ("stop_token_ids", [-1]),
        ("allowed_token_ids", [5, VOCAB_SIZE]),
        ("logit_bias", {str(VOCAB_SIZE): 1.0}),
        ("logit_bias", {"-1": 1.0}),
    ],
)
def test_token_ids_that_the_model_lacks(processor, name, value):
    message = refusal(processor, **{name: value})
    assert message.startswith(f"sampling parameter '{name}': ")
    assert message.endswith("is not allowed; token ids are 0 to 49149")


def test_the_last_token_of_the_model_is_allowed(processor):
    submit(processor, stop_token_ids=[VOCAB_SIZE - 1], logit_bias={str(VOCAB_SIZE - 1): 1.0})


def test_bad_words_of_tokens_that_the_model_lacks(processor, tokenizer):
    word = tokenizer.decode_token(LAST)
    message = refusal(processor, bad_words=[word])
    assert message.startswith(f"sampling parameter 'bad_words': has the token {word.strip()!r} (")


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids_of_many_digits(processor, name):
    message = refusal(processor, **{name: ["9" * 5000]})
    assert message.startswith(f"sampling parameter '{name}': ")
    assert len(message) < 400


# -- stop strings --


def answer(processor: InputProcessor, token_ids: list[int], **sampling) -> tuple[str, object]:
    """The text and finish reason of an answer of these tokens, if the engine generates them."""
    tensors = {"text_input": np.array([b"Hi"], dtype=object)}
    request = parse(tensors, json.dumps(sampling))
    [first] = processor.engine_requests(request, [1], None, Arrival(0.0, 0))
    output = processor.output(request, [1], Arrival(0.0, 0))
    for i, token_id in enumerate(token_ids):
        stops = token_id in first.stop_token_ids
        reason = FinishReason.STOP if stops else None
        output.add(EngineOutput(0, [SampledToken(token_id, None)], reason, num_cached_tokens=i))
        if stops:
            break
    delta = output.take()
    return delta.text.removeprefix("Hi"), delta.finish_reason


def test_a_stop_string_that_is_a_special_token(processor, tokenizer):
    hello = tokenizer.encode(" Hello")
    tokens = [*hello, IM_END, *hello]
    # Special tokens are hidden, so the string never appears in the text.
    assert answer(processor, tokens, stop=["<|im_end|>"]) == (" Hello", FinishReason.STOP)
    shown = {"include_stop_str_in_output": True}
    text = " Hello<|im_end|>"
    assert answer(processor, tokens, stop=["<|im_end|>"], **shown) == (text, FinishReason.STOP)
    visible = {"skip_special_tokens": False}
    assert answer(processor, tokens, stop=["<|im_end|>"], **visible) == (
        " Hello",
        FinishReason.STOP,
    )
    assert answer(processor, tokens) == (" Hello Hello", None)


def test_a_stop_string_that_only_holds_a_special_token(processor):
    request = submit(processor, stop=["a<|im_end|>", "word"])
    assert request.stop_token_ids == {0}
    assert submit(processor, stop=["<|im_end|>"]).stop_token_ids == {0, IM_END}


# -- ends --


def test_ends_of_answers(tokenizer):
    """<|im_end|> is both the tokenizer's end and the template's."""
    assert tokenizer.all_eos_token_ids([7, 49151, 60000], 49152)[:2] == (7, 49151)
    assert IM_END in tokenizer.all_eos_token_ids([], 49152)
    assert IM_END not in tokenizer.all_eos_token_ids([], IM_END)
