"""Conversations as clients send them: OpenAI's messages, and how the template is applied."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritium.backend.errors import InvalidArgument

OPTIONS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, validated."""

    messages: list[dict[str, Any]]  # at least one; content: a string, a list of parts, or none
    template_kwargs: dict[str, Any]  # further values for the chat template
    add_generation_prompt: bool  # the text ends where an answer begins
    continue_final_message: bool  # the text ends inside the last message, which goes on


def parse_chat(messages: str, options: Mapping[str, Any]) -> Chat:
    """Read a conversation.

    Args:
        messages: A JSON list.
        options: Those of `OPTIONS` that the client sent.

    Raises:
        InvalidArgument: names the field, its value and what is allowed.
    """
    continues = _flag("continue_final_message", options, False)
    starts = _flag("add_generation_prompt", options, not continues)
    if continues and starts:
        raise InvalidArgument(
            "continue_final_message: true is not allowed while add_generation_prompt is true; an "
            "answer either goes on with the last message or starts after it"
        )
    return Chat(_messages(messages), _template_kwargs(options), starts, continues)


def _flag(name: str, options: Mapping[str, Any], default: bool) -> bool:
    value = options.get(name)
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower(), value)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name}: {value!r:.100} is not allowed; it is true or false")
    return value


def _template_kwargs(options: Mapping[str, Any]) -> dict[str, Any]:
    name = "chat_template_kwargs"
    value = options.get(name)
    if isinstance(value, str):
        return read_object(name, value)
    if value is not None and not isinstance(value, dict):
        raise InvalidArgument(f"{name}: {value!r:.100} is not allowed; it is a JSON object")
    return value or {}


def read_json(name: str, text: str, what: str) -> Any:
    """The value in a JSON text.

    Args:
        what: The kind of value that is allowed, for the error.

    Raises:
        InvalidArgument: the message starts with `name`.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # fails on escaped lone surrogates
        return value
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name}: has a lone surrogate, which is not a character") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{name}: not valid JSON: {error}; it is {what}") from None


def read_object(name: str, text: str) -> dict[str, Any]:
    """The object in a JSON text; errors as those of `read_json`."""
    value = read_json(name, text, "a JSON object")
    if not isinstance(value, dict):
        raise InvalidArgument(f"{name}: {text!r:.100} is not allowed; it is a JSON object")
    return value


def _messages(text: str) -> list[dict[str, Any]]:
    messages = read_json("messages", text, "a JSON list")
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
        if isinstance(content, list) and (content or not calls):
            message["content"] = _parts(i, content)
        elif not isinstance(content, str) and (content or not calls):
            raise InvalidArgument(
                f"messages: element {i} has no 'content': a string or a list of text parts"
            )
    return messages


def _parts(i: int, parts: list[Any]) -> list[dict[str, str]]:
    """A message's content in parts, all of them text."""
    if not parts:
        raise InvalidArgument(f"messages: element {i} has no 'content': its list has no parts")
    return [_part(f"messages: element {i}: part {j}", part) for j, part in enumerate(parts)]


def _part(name: str, part: Any) -> dict[str, str]:
    allowed = 'only {"type": "text", "text": "..."} is allowed'
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise InvalidArgument(f"{name} is {part!r:.100}; {allowed}")
    if kind != "text":
        raise InvalidArgument(f"{name} has the type {kind!r:.100}; {allowed}")
    if not isinstance(part.get("text"), str):
        raise InvalidArgument(f"{name} has no 'text' string")
    return {"type": kind, "text": part["text"]}


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
            call["function"]["arguments"] = read_object(name, arguments or "{}")
    return calls
