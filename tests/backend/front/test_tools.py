"""Tools and tool_choice: what the chat template gets, and the constraint on the answer."""

import json

import jsonschema
import numpy as np
import pytest

from tritium.backend.errors import InvalidArgument
from tritium.backend.front.protocol import GenerationRequest, parse
from tritium.backend.front.tools import Tools, parse_tools


def tool(name: str, **parameters) -> dict:
    function = {"name": name, "description": f"Does {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


WEATHER = tool("weather", properties={"city": {"type": "string"}}, required=["city"])
STOP = {"type": "function", "function": {"name": "stop"}}
TOOLS = json.dumps([WEATHER, STOP])
NAMED = json.dumps({"type": "function", "function": {"name": "weather"}})


def schema(tools: Tools | None) -> dict:
    assert tools
    assert tools.constraint
    name, text = tools.constraint.given_field
    assert name == "json"
    return json.loads(text)


def fits(answer, schema: dict) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(answer)


@pytest.mark.parametrize("choice", ["", "auto"])
def test_model_may_choose(choice):
    tools = parse_tools(TOOLS, choice)
    assert tools
    assert tools.functions == [WEATHER, STOP]
    assert tools.constraint is None


@pytest.mark.parametrize(("tools", "choice"), [(TOOLS, "none"), ("", ""), ("", "none")])
def test_no_tools(tools, choice):
    assert parse_tools(tools, choice) is None


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ([{"name": "weather", "parameters": {"city": "Rome"}}], True),
        ([{"name": "stop", "parameters": {}}] * 2, True),
        ([{"name": "weather", "parameters": {}}], False),
        ([{"name": "other", "parameters": {}}], False),
        ([{"name": "stop", "parameters": 5}], False),
        ([{"name": "stop"}], False),
        ([], False),
    ],
)
def test_required_call(answer, right):
    assert fits(answer, schema(parse_tools(TOOLS, "required"))) == right


def test_named_function_arguments():
    arguments = schema(parse_tools(TOOLS, NAMED))
    assert fits({"city": "Rome"}, arguments)
    assert not fits({}, arguments)
    assert not fits("Rome", arguments)


def test_references_are_resolved_from_the_root():
    place = {"$ref": "#/$defs/place"}
    go = tool("go", properties={"to": place}, **{"$defs": {"place": {"enum": ["Rome"]}}})
    required = schema(parse_tools(json.dumps([go, STOP]), "required"))
    assert fits([{"name": "go", "parameters": {"to": "Rome"}}], required)
    assert not fits([{"name": "go", "parameters": {"to": "Oslo"}}], required)


@pytest.mark.parametrize("definitions", [[], 5, "a"])
def test_invalid_definitions(definitions):
    tools = json.dumps([tool("a", **{"$defs": definitions or [1]})])
    with pytest.raises(InvalidArgument, match=r"'a': \$defs"):
        parse_tools(tools, "required")


def test_two_tools_with_conflicting_definitions():
    tools = [
        tool(name, **{"$defs": {"place": {"enum": [name]}}}, properties={}) for name in ("a", "b")
    ]
    with pytest.raises(InvalidArgument, match=r"'b'.*'place'"):
        parse_tools(json.dumps(tools), "required")


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        ("{bad", "", ["tools:", "'{bad'", "not valid JSON"]),
        ("[" * 5000, "", ["tools:", "not valid JSON"]),
        ('["\\ud800"]', "", ["tools:", "surrogates"]),
        ("{}", "", ["tools:", "'{}'", "JSON list"]),
        ("[]", "", ["tools:", "at least one"]),
        ("[5]", "", ["tools: element 0", "5"]),
        ('[{"type": "function"}]', "", ["tools: element 0", "name"]),
        ('[{"function": {"name": "a", "parameters": 5}}]', "", ["tools: element 0"]),
        (TOOLS, "sometimes", ["tool_choice:", "'sometimes'"]),
        (TOOLS, "5", ["tool_choice:", "required", "weather, stop"]),
        (TOOLS, '{"function": {"name": "other"}}', ["tool_choice:", "other", "weather, stop"]),
        (TOOLS, '{"function": {"name": ["stop"]}}', ["tool_choice:"]),
        ("", "required", ["tool_choice:", "'required'", "no tools"]),
    ],
)
def test_refused_tools(tools, choice, said):
    with pytest.raises(InvalidArgument) as refused:
        parse_tools(tools, choice)
    assert all(part in str(refused.value) for part in said), refused.value


OF_VLLM = {"regex": "a+", "json": None, "_backend": None, "_backend_was_auto": False}


@pytest.mark.parametrize("tools", ["", TOOLS])
def test_choice_that_is_a_constraint(tools):
    """As NVIDIA's OpenAI frontend sends it: vLLM's StructuredOutputsParams as JSON."""
    parsed = parse_tools(tools, json.dumps(OF_VLLM))
    assert parsed
    assert parsed.functions == (json.loads(tools) if tools else [])
    assert parsed.constraint
    assert parsed.constraint.given_field == ("regex", "a+")


def test_constraint_of_a_plain_prompt():
    inputs = {"text_input": np.array([b"Hi"], dtype=object)}
    constraint = parse(inputs, json.dumps({"tool_choice": json.dumps(OF_VLLM)})).constraint
    assert constraint
    assert constraint.given_field == ("regex", "a+")


def test_choice_that_is_a_wrong_constraint():
    with pytest.raises(InvalidArgument, match=r"^tool_choice: unknown field 'regexp'"):
        parse_tools("", '{"regexp": "a"}')


# -- in requests --


def request(parameters=None, messages=None, **texts) -> GenerationRequest:
    messages = messages or [{"role": "user", "content": "Hi"}]
    texts = {"messages": json.dumps(messages)} | texts
    inputs = {name: np.array([text.encode()], dtype=object) for name, text in texts.items()}
    return parse(inputs, json.dumps(parameters or {}))


def test_tools_as_tensors_or_parameters():
    as_tensors = request(tools=TOOLS, tool_choice="required")
    as_parameters = request({"tools": TOOLS, "tool_choice": "required"})
    assert as_tensors == as_parameters
    assert as_tensors.tools == parse_tools(TOOLS, "required")
    assert as_tensors.constraint is not None


def test_only_messages_have_tools():
    inputs = {"text_input": np.array([b"Hi"], dtype=object)}
    with pytest.raises(InvalidArgument, match=r"^tools: only messages"):
        parse(inputs, json.dumps({"tools": TOOLS}))


def test_two_constraints_in_one_request():
    choice = {"structured_outputs": {"choice": ["a"]}}
    assert request(choice, tools=TOOLS).constraint
    with pytest.raises(InvalidArgument, match=r"^tool_choice: "):
        request(choice, tools=TOOLS, tool_choice="required")


CALL = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": '{"city": 1}'}}


def test_conversation_with_tool_calls():
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    parsed = request(messages=messages).chat.messages
    assert parsed
    assert parsed[1]["tool_calls"][0]["function"]["arguments"] == {"city": 1}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "assistant", "content": None}, "'content'"),
        ({"role": "assistant", "content": 5, "tool_calls": [CALL]}, "'content'"),
        ({"role": "assistant", "tool_calls": []}, "'content'"),
        ({"role": "assistant", "tool_calls": 5}, "'tool_calls'"),
        ({"role": "assistant", "tool_calls": [{"name": "x"}]}, "'tool_calls'"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{bad"}}]},
            "arguments: not valid JSON",
        ),
    ],
)
def test_messages_that_are_refused(message, said):
    with pytest.raises(InvalidArgument) as refused:
        request(messages=[message])
    assert str(refused.value).startswith("messages: element 0")
    assert said in str(refused.value)
