"""Messages and the parameters of chat templates: what is read, what is refused, by name."""

import json

import pytest

from tritium.backend.errors import InvalidArgument, RequestError, Unsupported
from tritium.backend.front.chat_template import ChatOptions
from tritium.backend.front.messages import read_chat_options, read_messages, take_chat_settings


def user(content) -> str:
    return json.dumps([{"role": "user", "content": content}])


def test_text_parts():
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": ""}]
    [message] = read_messages(user(parts))
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "refusal"])
def test_other_parts_are_refused_by_their_type(kind):
    with pytest.raises(Unsupported, match=f"element 0: parts of type '{kind}' are not supported"):
        read_messages(user([{"type": "text", "text": "a"}, {"type": kind}]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "element 0 has no 'content': a string, or a list of text parts"),
        (7, "element 0 has no 'content'"),
        (["a"], "element 0: 'a' is not a part of 'content'"),
        ([{"text": "a"}], "is not a part of 'content'"),
        ([{"type": "text"}], "a part of type text has no 'text' string"),
        ([{"type": "text", "text": 7}], "a part of type text has no 'text' string"),
    ],
)
def test_contents_that_are_refused(content, message):
    with pytest.raises(InvalidArgument, match=message):
        read_messages(user(content))


def options(**settings) -> ChatOptions:
    return read_chat_options(take_chat_settings(settings))


def test_chat_options():
    assert options() == ChatOptions(True, False, {})
    assert options(continue_final_message=True) == ChatOptions(False, True, {})
    assert options(add_generation_prompt="False") == ChatOptions(False, False, {})
    kwargs = {"enable_thinking": False}
    assert options(chat_template_kwargs=kwargs).template_kwargs == kwargs
    assert options(chat_template_kwargs=json.dumps(kwargs)).template_kwargs == kwargs
    assert options(chat_template_kwargs=None, continue_final_message=None) == ChatOptions()


def test_taking_leaves_the_others():
    settings = {"temperature": 0, "add_generation_prompt": False, "continue_final_message": None}
    assert take_chat_settings(settings) == {"add_generation_prompt": False}
    assert settings == {"temperature": 0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"add_generation_prompt": "maybe"}, "add_generation_prompt: 'maybe' is not allowed"),
        ({"continue_final_message": 1}, "continue_final_message: 1 is not allowed"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message: true is not allowed beside add_generation_prompt",
        ),
        ({"chat_template_kwargs": []}, r"chat_template_kwargs: \[\] is not allowed"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs: not valid JSON"),
        ({"chat_template_kwargs": {"messages": []}}, "'messages' is not allowed"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "'chat_template' is not allowed"),
    ],
)
def test_chat_options_that_are_refused(settings, message):
    with pytest.raises(RequestError, match=message):
        options(**settings)
