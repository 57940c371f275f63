"""Requests that are too large in some part: refused by name, before anything is done with them."""

import json
from typing import Any

import numpy as np
import pytest

from tritium.backend.errors import InvalidArgument, RequestError
from tritium.backend.front.bounds import Bounds, check_name
from tritium.backend.front.protocol import parse
from tritium.backend.front.sampling_params import SamplingParams
from tritium.backend.front.structured_params import read_structured_outputs

BOUNDS = Bounds(max_model_len=100, max_token_bytes=10)


def tensor(*texts: str) -> Any:
    return np.array([text.encode() for text in texts], dtype=object)


@pytest.mark.parametrize(
    ("inputs", "parameters", "request_id", "message"),
    [
        (
            {"text_input": tensor("x" * 1001)},
            "",
            "",
            "at most 1000 .*max_model_len is 100",
        ),
        ({"text_input": tensor("\u4e2d" * 334)}, "", "", "text_input: has 1002 bytes"),
        ({"messages": tensor("x" * 1_100_000)}, "", "", "messages: has 1100000 bytes"),
        ({"tools": tensor("x" * 1_100_000)}, "", "", "tools: has 1100000 bytes"),
        ({"tool_choice": tensor("x" * 1_100_000)}, "", "", "tool_choice: has 1100000 bytes"),
        (
            {"sampling_parameters": tensor(" " * 1_100_000)},
            "",
            "",
            "sampling_parameters: has 110",
        ),
        ({"chat_template_kwargs": tensor(" " * 70_000)}, "", "", "chat_template_kwargs: has 70000"),
        ({"business_line": tensor("x" * 2000)}, "", "", "business_line: has 2000 bytes"),
        ({"stop": tensor(*["x"] * 257)}, "", "", "stop: has 257 elements; at most 256"),
        ({"stop": tensor("x" * 70_000)}, "", "", "stop: has 70000 bytes; at most 65536"),
        ({}, " " * 1_100_000, "", "request parameters: has 1100000 characters"),
        ({}, "", "x" * 257, "request id: has 257 characters; at most 256 are allowed"),
        ({}, "", "a\nb", r"request id: 'a\\nb' is not allowed; it is printable text"),
    ],
    ids=str,
)
def test_what_arrives(inputs: dict, parameters: str, request_id: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        BOUNDS.check(inputs, parameters, request_id)


def test_what_is_large_enough_for_anybody() -> None:
    inputs = {"text_input": tensor("x" * 1000), "stop": tensor(*["x" * 100] * 256)}
    BOUNDS.check(inputs, " " * 1_000_000, "\u4e2d\u6587 #1 " * 20)
    SamplingParams.parse(
        {
            "allowed_token_ids": list(range(100_000)),
            "logit_bias": {str(i): 1 for i in range(4000)},
            "bad_words": ["x" * 1000] * 1000,
        }
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stop", ["x"] * 257, "has 257 entries; at most 256"),
        ("stop", ["x" * 1025], "has 1025 characters in a text; at most 1024"),
        ("stop", "x" * 1025, "has 1025 characters in a text"),
        ("bad_words", ["x"] * 1025, "has 1025 entries"),
        ("bad_words", ["x" * 1025], "has 1025 characters in a text"),
        ("logit_bias", {str(i): 1 for i in range(4097)}, "has 4097 entries"),
        ("allowed_token_ids", [1] * 140_000, "has 140000 entries"),
        ("stop_token_ids", [1] * 4097, "has 4097 entries"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_sampling_parameters(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"sampling parameter '{name}': {message}"):
        SamplingParams.parse({name: value})


def test_the_number_of_sampling_parameters() -> None:
    with pytest.raises(InvalidArgument, match="sampling parameters: has 200 entries; at most 128"):
        SamplingParams.parse({f"x{i}": 1 for i in range(200)})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"choice": ["", *["x"] * 4096]}, "'choice' has 4097 entries; at most 4096"),
        ({"json_object": True, "whitespace_pattern": " " * 1025}, "at most 1024 characters"),
    ],
)
def test_every_part_of_a_form(fields: dict, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read_structured_outputs("structured_outputs", fields)


@pytest.mark.parametrize("name", ["_preemption", "_", "x" * 257, "a\0b"])
def test_business_lines_that_are_refused(name: str) -> None:
    inputs = {"text_input": tensor("Hi")}
    for given in (inputs | {"business_line": tensor(name)}, inputs):
        parameters = "" if len(given) == 2 else json.dumps({"business_line": name})
        with pytest.raises(InvalidArgument, match=r"business_line: .*allowed"):
            parse(given, parameters)
    check_name("business_line", "caf\u00e9, \u5ba2\u670d")


def test_no_message_is_longer_than_1000_characters() -> None:
    assert len(f"INVALID_ARGUMENT: {RequestError('x' * 10**6)}") <= 1000
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams.parse({"x" * 10**6: 1})
    assert str(caught.value).startswith(f"unknown sampling parameter '{'x' * 100}'")
    functions = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(200)]
    inputs = {"messages": tensor("[]"), "tools": tensor(json.dumps(functions))}
    with pytest.raises(InvalidArgument) as caught:
        parse(inputs | {"tool_choice": tensor(json.dumps({"function": {"name": "g" * 1000}}))}, "")
    assert len(str(caught.value)) < 400
