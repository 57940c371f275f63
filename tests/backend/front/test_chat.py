"""Conversations and their options as clients send them."""

import json

import numpy as np
import pytest

from tritium.backend.errors import InvalidArgument
from tritium.backend.front.chat import Chat
from tritium.backend.front.protocol import parse

HI = [{"role": "user", "content": "Hi"}]
THINKING = {"enable_thinking": False}


def text(value: str):
    return np.array([value.encode()], dtype=object)


def read(messages=HI, parameters=None, **inputs) -> Chat:
    chat = parse({"messages": text(json.dumps(messages)), **inputs}, json.dumps(parameters or {}))
    assert chat.chat
    return chat.chat


def refusal(messages=HI, parameters=None, **inputs) -> str:
    with pytest.raises(InvalidArgument) as refused:
        read(messages, parameters, **inputs)
    return str(refused.value)


def test_by_default_an_answer_starts():
    assert read() == Chat(HI, {}, add_generation_prompt=True, continue_final_message=False)


@pytest.mark.parametrize(
    ("inputs", "parameters"),
    [
        ({"chat_template_kwargs": text(json.dumps(THINKING))}, {}),
        ({}, {"chat_template_kwargs": json.dumps(THINKING)}),
        ({}, {"chat_template_kwargs": THINKING}),
        ({"sampling_parameters": text(json.dumps({"chat_template_kwargs": THINKING}))}, {}),
        ({"sampling_parameters": text("{}")}, {"chat_template_kwargs": THINKING}),
    ],
)
def test_ways_to_give_chat_template_kwargs(inputs, parameters):
    assert read(parameters=parameters, **inputs).template_kwargs == THINKING


@pytest.mark.parametrize(
    ("inputs", "parameters", "starts", "continues"),
    [
        ({"continue_final_message": np.array([True])}, {}, False, True),
        ({}, {"continue_final_message": True}, False, True),
        ({}, {"continue_final_message": "true", "add_generation_prompt": "false"}, False, True),
        ({}, {"add_generation_prompt": False}, False, False),
        ({"add_generation_prompt": np.array([False])}, {"continue_final_message": None}, False, 0),
        ({}, {"continue_final_message": False}, True, False),
    ],
)
def test_where_the_text_ends(inputs, parameters, starts, continues):
    chat = read(parameters=parameters, **inputs)
    assert (chat.add_generation_prompt, chat.continue_final_message) == (starts, continues)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message: true is not allowed while add_generation_prompt is true",
        ),
        ({"continue_final_message": "x"}, "continue_final_message: 'x' is not allowed"),
        ({"add_generation_prompt": 1}, "add_generation_prompt: 1 is not allowed; it is true or"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs: not valid JSON"),
        ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs: '[1]' is not allowed; it is a "),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: [1] is not allowed; it is a JSON"),
    ],
)
def test_options_that_are_refused(parameters, said):
    message = refusal(parameters=parameters)
    assert message.startswith(said)
    assert len(message) < 400


def test_a_plain_prompt_has_no_chat_options():
    with pytest.raises(InvalidArgument, match=r"^continue_final_message: only messages"):
        parse({"text_input": text("Hi")}, '{"continue_final_message": true}')


def test_text_parts():
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": ""}]
    [message] = read([{"role": "user", "content": parts}]).messages
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]


PART = "messages: element 0: part 1"


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, f"{PART} has the type 'image_url'; "),
        ({"type": "input_audio", "input_audio": {}}, f"{PART} has the type 'input_audio'; only"),
        ({"type": "refusal", "refusal": "no"}, f"{PART} has the type 'refusal'; only"),
        ({"text": "a"}, f"{PART} is {{'text': 'a'}}; only"),
        ("a", f"{PART} is 'a'; only"),
        ({"type": "text"}, f"{PART} has no 'text' string"),
        ({"type": "text", "text": 5}, f"{PART} has no 'text' string"),
        ({"type": 5 * "image"}, f"{PART} has the type"),
    ],
)
def test_parts_that_are_refused(part, said):
    first = {"type": "text", "text": "a"}
    message = refusal([{"role": "user", "content": [first, part]}])
    assert message.startswith(said)
    assert len(message) < 300


def test_content_without_parts_is_refused():
    message = refusal([{"role": "user", "content": []}])
    assert message == "messages: element 0 has no 'content': its list has no parts"
