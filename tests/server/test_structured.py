"""Structured outputs and tools through a real Triton Server and the real model.

The answers under every constraint are generated concurrently, beside unconstrained ones, before the
tests check them.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jsonschema
import pytest

from tritium.loadtests.harness import collect, complete, send, until

PROMPT = "Paris as a JSON object: "
FREE_PROMPTS = ["The capital of France is", "List five fruits:\n1."]
CITY = {
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 1, "maximum": 9999},
        "river": {"enum": ["Seine", "Thames", None]},
    },
    "required": ["city", "people"],
}
DATE = "[12][0-9]{3}-[01][0-9]-[0-3][0-9]"
COLOURS = ["red", "green", "blue and yellow"]
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


def is_city(text: str) -> bool:
    value = json.loads(text)
    jsonschema.validate(value, CITY)
    return isinstance(value, dict) and value.keys() <= CITY["properties"].keys()


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def is_date(text: str) -> bool:
    return bool(re.fullmatch(DATE, text))


def is_colour(text: str) -> bool:
    return text in COLOURS


def is_select(text: str) -> bool:
    return bool(re.fullmatch("SELECT [a-z]{1,6}(,[a-z]{1,6})? FROM [a-z]{1,6}", text))


def is_sum(text: str) -> bool:
    return bool(re.fullmatch(r"\([0-9]{1,3}\+[0-9]{1,3}\)", text))


CONSTRAINTS = {
    "json": ({"structured_outputs": {"json": CITY}}, is_city),
    "json text": ({"structured_outputs": {"json": json.dumps(CITY)}}, is_city),
    "regex": ({"structured_outputs": {"regex": DATE}}, is_date),
    "choice": ({"structured_outputs": {"choice": COLOURS}}, is_colour),
    "GBNF": (
        {
            "structured_outputs": {
                "grammar": 'root ::= "SELECT " n ("," n)? " FROM " n\nn ::= [a-z]{1,6}\n'
            }
        },
        is_select,
    ),
    "Lark": (
        {
            "structured_outputs": {
                "grammar": 'start: "(" NUMBER "+" NUMBER ")"\nNUMBER: /[0-9]{1,3}/\n'
            }
        },
        is_sum,
    ),
    "json_object": ({"structured_outputs": {"json_object": True}}, is_object),
    "response_format": ({"response_format": RESPONSE_FORMAT}, is_city),
    "response_format json_object": ({"response_format": {"type": "json_object"}}, is_object),
    "guided_decoding": ({"guided_decoding": {"regex": DATE, "backend": "auto"}}, is_date),
    "guided_json": ({"guided_json": CITY}, is_city),
    "guided_choice": ({"guided_choice": COLOURS}, is_colour),
    "sampled": (
        {
            "structured_outputs": {"json": CITY, "disable_any_whitespace": True},
            "temperature": 1.5,
            "seed": 7,
        },
        is_city,
    ),
}
ROUTES = ("grpc", "stream", "http")


@pytest.fixture(autouse=True, scope="module")
def server_stays_usable(server):
    """Checked once per module instead of after each test."""
    yield
    for gauge in ("kv_blocks_used", "requests_running", "requests_waiting"):
        until(lambda gauge=gauge: server.metric(gauge) == 0)
    assert complete(server, FREE_PROMPTS[0], sampling={"temperature": 0, "max_tokens": 1})


class Answer(NamedTuple):
    text: str
    finish_reason: str
    num_responses: int


@pytest.fixture(scope="module")
def alone(server):
    """Unconstrained answers, each generated alone."""
    return [complete(server, prompt) for prompt in FREE_PROMPTS]


@pytest.fixture(scope="module")
def answers(server, alone):
    """Answers by (constraint, route), and the unconstrained ones generated beside them ("free")."""
    plain = {"temperature": 0, "max_tokens": 100}

    def by_grpc(sampling, stream):
        responses = collect(
            server,
            PROMPT,
            stream=stream,
            exclude_input_in_output=True,
            return_finish_reason=True,
            sampling={**plain, **sampling},
        )
        assert not responses[-1].error, responses[-1]
        text = "".join(response.text for response in responses)
        return Answer(text, responses[-1].string("finish_reason"), len(responses))

    def by_http(sampling):
        # Triton Server accepts parameters that are numbers, booleans or strings.
        as_texts = {
            name: json.dumps(value) if isinstance(value, dict | list) else value
            for name, value in sampling.items()
        }
        flags = {"exclude_input_in_output": True, "return_finish_reason": True}
        body = {"text_input": PROMPT, **flags, **plain, **as_texts}
        status, generated = server.http("models/smollm2/generate", body)
        assert status == 200, generated
        outputs = json.loads(generated)
        return Answer(outputs["text_output"], outputs["finish_reason"], 1)

    with ThreadPoolExecutor(64) as pool:
        free = [pool.submit(complete, server, prompt) for prompt in FREE_PROMPTS * 2]
        constrained = {
            (name, route): pool.submit(by_http, sampling)
            if route == "http"
            else pool.submit(by_grpc, sampling, route == "stream")
            for name, (sampling, _) in CONSTRAINTS.items()
            for route in ROUTES
        }
    return {key: future.result() for key, future in constrained.items()} | {
        "free": [future.result() for future in free]
    }


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_answers_satisfy_their_constraint(answers, name, route):
    answer = answers[name, route]
    _, satisfies = CONSTRAINTS[name]
    assert answer.finish_reason == "stop", answer
    assert satisfies(answer.text), answer
    assert answer == answers[name, "grpc"] or route == "stream"
    assert answer.text == answers[name, "grpc"].text
    assert (answer.num_responses > 1) == (route == "stream") or len(answer.text) < 5


def test_unconstrained_neighbours_answer_as_when_alone(answers, alone):
    assert answers["free"] == alone * 2


def test_events_of_a_stream_over_http(server):
    body = {"text_input": PROMPT, "stream": True, "max_tokens": 20, "guided_regex": DATE}
    status, events = server.http("models/smollm2/generate_stream", body)
    texts = [json.loads(event)["text_output"] for event in re.findall(r"data: (.*)", events)]
    assert status == 200
    assert len(texts) > 1
    assert is_date("".join(texts))


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_n_answers_is_constrained(server, stream):
    sampling = {"n": 3, "seed": 1, "temperature": 1.2, "max_tokens": 20}
    responses = collect(
        server,
        PROMPT,
        stream=stream,
        exclude_input_in_output=True,
        return_finish_reason=True,
        sampling={**sampling, "structured_outputs": {"regex": DATE}},
    )
    assert not responses[-1].error, responses[-1]
    parts = [response.tensors["text_output"].tolist() for response in responses]
    texts = [b"".join(of_one).decode() for of_one in zip(*parts, strict=True)]
    assert len(set(texts)) == 3
    assert all(map(is_date, texts)), texts
    assert responses[-1].tensors["finish_reason"].tolist() == [b"stop"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_truncates_an_answer(server, stream):
    sampling = {"temperature": 0, "max_tokens": 5}
    responses = collect(
        server,
        PROMPT,
        stream=stream,
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_num_output_tokens=True,
        sampling={**sampling, "structured_outputs": {"regex": DATE}},
    )
    text = "".join(response.text for response in responses)
    assert re.fullmatch("[12][0-9]{3}-", text)
    assert responses[-1].string("finish_reason") == "length"
    assert sum(response.tensors["num_output_tokens"].item() for response in responses) == 5


# -- constraints that are refused --

REFUSED = [
    ({"structured_outputs": {"regex": "(?=a)ab"}}, ["'regex': '(?=a)ab'", "look-ahead"]),
    ({"structured_outputs": {"regex": "[a-"}}, ["'regex': '[a-'", "unclosed"]),
    ({"structured_outputs": {"json": {"type": "strng"}}}, ["'json'", "strng"]),
    ({"response_format": {"type": "xml"}}, ["'type': 'xml'", "json_schema"]),
    ({"structured_outputs": {"json": {"not": {"type": "null"}}}}, ["'json'", "not"]),
    ({"structured_outputs": {"grammar": "hello"}}, ["'grammar': 'hello'", "Lark", "GBNF"]),
    ({"structured_outputs": {"choice": []}}, ["'choice': []", "at least 1"]),
    ({"structured_outputs": {"regexp": "a"}}, ["unknown field 'regexp'", "regex", "choice"]),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, ["Exactly one", "regex, choice"]),
    ({"structured_outputs": {}}, ["Exactly one", "none"]),
    ({"structured_outputs": "{bad"}, ["'{bad'", "JSON"]),
    ({"guided_jsn": {}}, ["guided_", "unknown field 'jsn'", "json"]),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, ["only one"]),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("sampling", "words"), REFUSED)
def test_constraints_that_are_refused(server, sampling, words, stream):
    (response,) = collect(server, PROMPT, sampling=sampling, stream=stream)
    assert response.code == "INVALID_ARGUMENT"
    assert response.error.startswith("sampling parameter")
    assert all(word in response.error for word in words), response.error
    assert len(response.error) < 500


def test_same_errors_over_http(server):
    body = {"text_input": PROMPT, "guided_regex": "(?=a)ab"}
    status, message = server.http("models/smollm2/generate", body)
    assert status == 400
    assert json.loads(message)["error"] == (
        "sampling parameter 'structured_outputs': 'regex': '(?=a)ab' is not allowed. "
        "look-around, including look-ahead and look-behind, is not supported"
    )


def test_structural_tags_are_not_supported(server):
    sampling = {"structured_outputs": {"structural_tag": "{}"}}
    (response,) = collect(server, PROMPT, sampling=sampling)
    assert response.code == "UNIMPLEMENTED"
    assert "structural_tag" in response.error


@pytest.mark.parametrize("stream", [False, True])
def test_answer_that_cannot_continue(server, stream):
    """One parameter forbids every token that the other allows."""
    digits = {"structured_outputs": {"regex": "[0-9]+"}}
    sampling = {**digits, "allowed_token_ids": [1], "max_tokens": 4}
    (response,) = collect(server, PROMPT, sampling=sampling, stream=stream)
    assert response.code == "INVALID_ARGUMENT"
    assert response.error.startswith("sampling parameter 'structured_outputs': the answer can't")


# -- compiling --


def slow_grammar(name: str) -> str:
    """A grammar that takes one or two seconds to compile."""
    rules = [f'r{i} ::= "{name}{i}" r{i + 1}' for i in range(2000)]
    return "\n".join(["root ::= r0", *rules, 'r2000 ::= "x"'])


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_while_a_grammar_is_compiled(server, stream):
    cancelled = server.metric("requests_total", outcome="cancelled")
    grammar = {"grammar": slow_grammar(f"cancelled{stream:d}")}
    with send(server, PROMPT, sampling={"structured_outputs": grammar}, stream=stream) as compiling:
        until(lambda: server.metric("requests_waiting") == 1)
        # Other requests do not wait for the compilation.
        assert complete(server, PROMPT, sampling={"temperature": 0, "max_tokens": 1})
        compiling.cancel()
        assert [response.code for response in compiling] == ["CANCELLED"]
    for gauge in ("requests_waiting", "kv_blocks_used"):
        until(lambda gauge=gauge: server.metric(gauge) == 0, timeout=5)
    until(lambda: server.metric("requests_total", outcome="cancelled") == cancelled + 1)


# -- tools --

MESSAGES = json.dumps([{"role": "user", "content": "How is the weather in Paris?"}])
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOLS = json.dumps([WEATHER])


@pytest.mark.parametrize(
    ("text", "tensors", "message"),
    [
        (None, {"tools": TOOLS}, "tools: this model's chat template does not support them"),
        (
            None,
            {"tools": TOOLS, "tool_choice": "required"},
            "tools: this model's chat template does not support them",
        ),
        (
            PROMPT,
            {"tools": TOOLS},
            "tools: only messages may have tools; text_input has no chat template",
        ),
        (
            None,
            {"tool_choice": "required"},
            "tool_choice: 'required' is not allowed. The request has no tools",
        ),
        (
            None,
            {"tools": TOOLS, "tool_choice": "never"},
            "tool_choice: 'never' is not allowed. It is not valid JSON: Expecting value: line 1 "
            "column 1 (char 0)",
        ),
        (
            None,
            {"tools": "{}"},
            "tools: '{}' is not allowed. It is a JSON list with at least one tool",
        ),
    ],
)
def test_tools_that_are_refused(server, text, tensors, message):
    """SmolLM2's chat template does not support tools."""
    if text is None:
        tensors = {"messages": MESSAGES, **tensors}
    (response,) = collect(server, text, **tensors)
    assert (response.code, response.error) == ("INVALID_ARGUMENT", message)


def test_tool_choice_none_leaves_the_answer_unchanged(server):
    options = {"messages": MESSAGES, "sampling": {"temperature": 0, "max_tokens": 4}}
    plain = complete(server, None, **options)
    assert complete(server, None, tools=TOOLS, tool_choice="none", **options) == plain


def test_tools_over_http_are_json_text(server):
    body = {"messages": MESSAGES, "tools": TOOLS}
    status, message = server.http("models/smollm2/generate", body)
    assert status == 400
    assert json.loads(message)["error"].startswith(
        "tools: this model's chat template does not support"
    )
