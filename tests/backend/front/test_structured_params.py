"""The ways to give a constraint on an answer, and the messages for invalid ones."""

import json

import pytest

from tritium.backend.errors import InvalidArgument, Unsupported
from tritium.backend.front.sampling_params import SamplingParams
from tritium.backend.front.structured_params import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
# vLLM's own object with all of its fields, as NVIDIA's OpenAI frontend sends it.
OF_VLLM = {
    "json": None,
    "regex": "a",
    "choice": None,
    "grammar": None,
    "json_object": None,
    "disable_fallback": False,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "structural_tag": None,
    "_backend": None,
    "_backend_was_auto": False,
}


def demanded(**parameters) -> StructuredOutputs | None:
    return SamplingParams.parse(parameters).structured_outputs


def refusal(**parameters) -> str:
    with pytest.raises(InvalidArgument) as refused:
        demanded(**parameters)
    return str(refused.value)


@pytest.mark.parametrize(
    ("parameters", "demand"),
    [
        ({"structured_outputs": {"regex": "a"}}, ("regex", "a")),
        ({"structured_outputs": '{"regex": "a"}'}, ("regex", "a")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ("choice", ("a", "b"))),
        ({"structured_outputs": {"grammar": "root ::= x"}}, ("grammar", "root ::= x")),
        ({"structured_outputs": {"json_object": True}}, ("json_object", True)),
        ({"structured_outputs": {"json_object": "true"}}, ("json_object", True)),
        ({"structured_outputs": {"json": SCHEMA}}, ("json", json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ("json", json.dumps(SCHEMA))),
        ({"structured_outputs": {"regex": "", "json": None}}, ("regex", "")),
        ({"structured_outputs": {"regex": "a", "json_object": False}}, ("regex", "a")),
        ({"guided_decoding": {"regex": "a", "backend": "outlines"}}, ("regex", "a")),
        ({"guided_decoding": '{"choice": ["a"]}'}, ("choice", ("a",))),
        ({"guided_regex": "a", "guided_decoding_backend": "xgrammar"}, ("regex", "a")),
        ({"guided_json": SCHEMA}, ("json", json.dumps(SCHEMA))),
        ({"structured_outputs": OF_VLLM}, ("regex", "a")),
        ({"guided_decoding": json.dumps(OF_VLLM)}, ("regex", "a")),
        ({"response_format": RESPONSE_FORMAT}, ("json", json.dumps(SCHEMA))),
        ({"response_format": json.dumps(RESPONSE_FORMAT)}, ("json", json.dumps(SCHEMA))),
        ({"response_format": {"type": "json_object"}}, ("json_object", True)),
    ],
)
def test_ways_to_give_a_constraint(parameters, demand):
    constraint = demanded(**parameters)
    assert constraint
    assert constraint.given_field == demand


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"structured_outputs": None},
        {"guided_decoding": None, "guided_json": None},
        {"response_format": {"type": "text"}},
    ],
)
def test_no_constraint(parameters):
    assert demanded(**parameters) is None


def test_options():
    constraint = demanded(
        structured_outputs={
            "json": SCHEMA,
            "disable_any_whitespace": "true",
            "disable_additional_properties": True,
            "whitespace_pattern": " ?",
            "disable_fallback": True,
        }
    )
    assert constraint
    assert constraint.disable_any_whitespace
    assert constraint.whitespace_pattern == " ?"


def test_list_of_choices_may_be_text():
    assert demanded(guided_choice='["a", "b"]') == demanded(guided_choice=["a", "b"])


def test_equal_constraints_are_equal():
    assert demanded(structured_outputs={"json": SCHEMA}) == demanded(
        response_format=json.dumps(RESPONSE_FORMAT, indent=2)
    )
    assert len({demanded(structured_outputs={"choice": ["a"]}) for _ in range(3)}) == 1


def test_the_order_of_properties_counts():
    first, second = ({"properties": {a: {}, b: {}}} for a, b in ("ab", "ba"))
    assert demanded(guided_json=first) != demanded(guided_json=second)


ONE_OF = "Exactly one of json, regex, choice, grammar and json_object is allowed"


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"structured_outputs": {}}, ["structured_outputs", ONE_OF, "none"]),
        ({"structured_outputs": {"json_object": False}}, [ONE_OF, "none"]),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            ["structured_outputs", ONE_OF, "regex, choice"],
        ),
        ({"structured_outputs": {"regexp": "a"}}, ["unknown field 'regexp'", "regex", "choice"]),
        ({"structured_outputs": {"regex": 5}}, ["'regex': 5", "string"]),
        ({"structured_outputs": {"choice": []}}, ["'choice': []", "at least 1"]),
        ({"structured_outputs": {"choice": "a"}}, ["'choice': 'a'", "list of strings"]),
        ({"structured_outputs": {"choice": [1]}}, ["'choice': [1]", "string"]),
        ({"structured_outputs": {"json": "{bad"}}, ["'json': '{bad'", "line 1"]),
        ({"structured_outputs": {"json": [1]}}, ["'json': [1]", "JSON schema"]),
        ({"structured_outputs": {"json": "[" * 5000}}, ["'json'", "nested"]),
        ({"structured_outputs": {"regex": "a" * 70_000}}, ["'regex' has 70000", "65536"]),
        ({"structured_outputs": {"choice": ["ab"] * 40_000}}, ["'choice' has 80000", "65536"]),
        ({"structured_outputs": "{bad"}, ["structured_outputs", "'{bad'", "not valid JSON"]),
        ({"structured_outputs": "[" * 5000}, ["structured_outputs", "not valid JSON"]),
        ({"structured_outputs": [1]}, ["structured_outputs", "[1]", "JSON object"]),
        ({"guided_decoding": 5}, ["guided_decoding", "5", "JSON object"]),
        ({"guided_foo": 5}, ["guided_", "unknown field 'foo'"]),
        ({"guided_regex": "a", "guided_choice": ["b"]}, [ONE_OF, "regex, choice"]),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            ["structured_outputs and response_format", "only one"],
        ),
        ({"response_format": "json"}, ["response_format", "'json'", "not valid JSON"]),
        ({"response_format": {"type": "xml"}}, ["'type': 'xml'", "text, json_object or json_s"]),
        ({"response_format": {}}, ["'type': None"]),
        ({"response_format": {"type": "json_schema"}}, ["'json_schema': None", '{"schema": ...}']),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            ["response_format", "'json': 5"],
        ),
    ],
)
def test_constraints_that_are_refused(parameters, said):
    message = refusal(**parameters)
    assert message.startswith("sampling parameter")
    assert all(part in message for part in said), message
    assert len(message) < 500


@pytest.mark.parametrize(
    "parameters",
    [
        {"structured_outputs": {"structural_tag": "{}"}},
        {"response_format": {"type": "structural_tag"}},
    ],
)
def test_structural_tags_are_not_supported(parameters):
    with pytest.raises(Unsupported, match="structural_tag"):
        demanded(**parameters)
