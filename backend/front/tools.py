"""Tools that an answer may call: the inputs `tools` and `tool_choice`, in OpenAI's format."""

import json
from dataclasses import dataclass
from typing import Any, NoReturn

from tritium.backend.errors import InvalidArgument
from tritium.backend.front.structured_params import StructuredOutputs, read_structured_outputs

_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions for the chat template, and the constraint that `tool_choice` puts on the answer.

    Answers look as in vLLM. A named function: its arguments, a JSON object. A required call:
    [{"name": ..., "parameters": {...}}, ...]. Otherwise the model answers freely, and the caller
    parses the answer.
    """

    functions: list[dict[str, Any]]  # empty: tool_choice was a constraint by itself
    constraint: StructuredOutputs | None


def parse_tools(tools: str, tool_choice: str) -> Tools | None:
    """Read both inputs, "" if absent. None: no tool may be called.

    Raises:
        InvalidArgument: names the field, its value and what is allowed.
    """
    if constraint := _structured_outputs(tool_choice):
        return Tools(_functions(tools) if tools else [], constraint)
    if not tools:
        if tool_choice not in ("", "none", "auto"):
            _refuse("tool_choice", tool_choice, "The request has no tools")
        return None
    functions = _functions(tools)
    by_name = {tool["function"]["name"]: tool["function"] for tool in functions}
    choice: Any = tool_choice or "auto"
    if choice not in _CHOICES:
        choice = _json("tool_choice", tool_choice)
    if choice == "none":
        return None
    if choice == "auto":
        return Tools(functions, None)
    if choice == "required":
        return Tools(functions, read_structured_outputs("tools", {"json": _calls(by_name)}))
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in by_name:
        allowed = ", ".join([*_CHOICES, '{"type": "function", "function": {"name": ...}}'])
        names = ", ".join(by_name)
        _refuse("tool_choice", tool_choice, f"It is {allowed}, of {names:.100}")
    return Tools(functions, read_structured_outputs("tools", {"json": _parameters(by_name[name])}))


def _structured_outputs(tool_choice: str) -> StructuredOutputs | None:
    """The constraint in a `tool_choice` that is the JSON text of vLLM's StructuredOutputsParams."""
    choice = _json("tool_choice", tool_choice) if tool_choice.lstrip().startswith("{") else {}
    if choice.keys() & {"type", "function"} or not choice:
        return None
    return read_structured_outputs("tool_choice", choice)


def _functions(tools: str) -> list[dict[str, Any]]:
    functions = _json("tools", tools)
    if not isinstance(functions, list) or not functions:
        _refuse("tools", tools, "It is a JSON list with at least one tool")
    for i, tool in enumerate(functions):
        _check_tool(i, tool)
    return functions


def _calls(by_name: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The JSON schema of a list of calls of these functions."""
    calls = []
    definitions: dict[str, Any] = {}
    for name, function in by_name.items():
        parameters = dict(_parameters(function))
        # References are resolved from the root, so definitions move there.
        own = parameters.pop("$defs", None) or {}
        if not isinstance(own, dict):
            _refuse(f"tools: '{name:.100}': $defs", own, "It is an object")
        for key, definition in own.items():
            if definitions.setdefault(key, definition) != definition:
                _refuse(f"tools: '{name:.100}': $defs", key, "Another tool defines it differently")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": parameters},
                "required": ["name", "parameters"],
            }
        )
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a function's arguments; `type` is added where it is omitted."""
    return {"type": "object", "properties": {}, **(function.get("parameters") or {})}


def _check_tool(i: int, tool: Any) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    function = function if isinstance(function, dict) else {}
    name = function.get("name")
    if not isinstance(name, str) or not isinstance(function.get("parameters") or {}, dict):
        _refuse(
            f"tools: element {i}",
            tool,
            'It is {"type": "function", "function": {"name": ..., "parameters": {...}}}',
        )


def _json(name: str, text: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # fails on escaped lone surrogates
        return value
    except (ValueError, RecursionError) as error:
        _refuse(name, text, f"It is not valid JSON: {error}")


def _refuse(name: str, value: Any, reason: str) -> NoReturn:
    raise InvalidArgument(f"{name}: {value!r:.100} is not allowed. {reason}")
