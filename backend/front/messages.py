"""Chat messages and how they are rendered, as clients send them."""

from typing import Any

from tritium.backend.errors import InvalidArgument, Unsupported
from tritium.backend.front.chat_template import RESERVED, ChatOptions
from tritium.backend.front.json_text import json_object, parse_json

_CHAT_SETTINGS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_FLAGS = {"true": True, "false": False}


def read_messages(text: str) -> list[dict[str, Any]]:
    """The messages of a conversation, at least one.

    A content that is a list has parts {"type": "text", "text": ...} only. Arguments of tool calls
    are objects, as chat templates expect them.

    Raises:
        InvalidArgument: names the message and what is allowed.
        Unsupported: a part is no text; names its type.
    """
    messages = parse_json("messages", text, "a JSON list")
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument(
            f"messages: {text!r:.100} is not allowed; it is a JSON list with at least one message"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidArgument(f"messages: element {i} is not an object with a 'role' string")
        calls = message.get("tool_calls")
        if calls is not None:
            message["tool_calls"] = _tool_calls(i, calls)
        content = message.get("content")
        if isinstance(content, list) and content:
            message["content"] = [_text_part(i, part) for part in content]
        elif not isinstance(content, str) and (content or not calls):
            raise InvalidArgument(
                f"messages: element {i} has no 'content': a string, or a list of text parts"
            )
    return messages


def _text_part(i: int, part: Any) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise InvalidArgument(
            f"messages: element {i}: {part!r:.100} is not a part of 'content'; it is "
            '{"type": "text", "text": ...}'
        )
    if kind != "text":
        raise Unsupported(
            f"messages: element {i}: parts of type {kind!r:.50} are not supported; only text is"
        )
    if not isinstance(part.get("text"), str):
        raise InvalidArgument(f"messages: element {i}: a part of type text has no 'text' string")
    return {"type": "text", "text": part["text"]}


def _tool_calls(i: int, calls: Any) -> list[dict[str, Any]]:
    """An earlier answer's tool calls, their arguments parsed, as chat templates expect."""
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise InvalidArgument(f"messages: element {i}: 'tool_calls' is not a list of calls")
    for call in calls:
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            name = f"messages: element {i}: arguments"
            call["function"]["arguments"] = json_object(name, arguments or "{}")
    return calls


def take_chat_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Remove the parameters of chat templates from a request's and return them; null is absent."""
    taken = {name: settings.pop(name, None) for name in _CHAT_SETTINGS}
    return {name: value for name, value in taken.items() if value is not None}


def read_chat_options(settings: dict[str, Any]) -> ChatOptions:
    """Read what `take_chat_settings` took.

    Raises:
        InvalidArgument: names the parameter, its value and what is allowed.
    """
    continues = _flag(settings, "continue_final_message", default=False)
    begins = _flag(settings, "add_generation_prompt", default=not continues)
    if continues and begins:
        raise InvalidArgument(
            "continue_final_message: true is not allowed beside add_generation_prompt true"
        )
    kwargs = settings.get("chat_template_kwargs", {})
    if isinstance(kwargs, str):
        kwargs = json_object("chat_template_kwargs", kwargs)
    if not isinstance(kwargs, dict):
        raise InvalidArgument(
            f"chat_template_kwargs: {kwargs!r:.100} is not allowed; it is a JSON object"
        )
    if reserved := sorted(RESERVED & kwargs.keys()):
        raise InvalidArgument(
            f"chat_template_kwargs: {reserved[0]!r} is not allowed; the server sets it"
        )
    return ChatOptions(begins, continues, kwargs)


def _flag(settings: dict[str, Any], name: str, default: bool) -> bool:
    value = settings.get(name, default)
    value = _FLAGS.get(value.lower(), value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name}: {value!r:.100} is not allowed; it is true or false")
    return value
