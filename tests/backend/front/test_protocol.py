"""The contract: tensors and parameters to requests, deltas to tensors."""

import json

import numpy as np
import pytest

from tritium.backend.engine.request import FinishReason, RequestClass, SampledToken, TokenLogprobs
from tritium.backend.errors import InvalidArgument, RequestError, Unsupported
from tritium.backend.front.output import Delta
from tritium.backend.front.protocol import (
    INPUTS,
    OUTPUTS,
    GenerationRequest,
    parse,
    response_tensors,
)


def text(*values: str | bytes) -> np.ndarray:
    """A STRING tensor as the Python backend passes it."""
    encoded = [value.encode() if isinstance(value, str) else value for value in values]
    return np.array(encoded, dtype=np.object_)


def flag(*values: bool) -> np.ndarray:
    return np.array(values, dtype=np.bool_)


def read(parameters: dict | str = "", **inputs: np.ndarray) -> GenerationRequest:
    """Parse a request, with the prompt 'Hi' unless another one is given."""
    if not {"text_input", "messages"} & inputs.keys():
        inputs["text_input"] = text("Hi")
    return parse(inputs, json.dumps(parameters) if isinstance(parameters, dict) else parameters)


def refusal(parameters: dict | str = "", **inputs: np.ndarray) -> str:
    with pytest.raises(InvalidArgument) as refused:
        read(parameters, **inputs)
    return str(refused.value)


def messages(value) -> np.ndarray:
    return text(json.dumps(value))


# -- what the model declares --


def test_declared_inputs():
    assert {spec.name: (spec.data_type, spec.dims) for spec in INPUTS} == {
        "text_input": ("TYPE_STRING", [1]),
        "messages": ("TYPE_STRING", [1]),
        "tools": ("TYPE_STRING", [1]),
        "tool_choice": ("TYPE_STRING", [1]),
        "chat_template_kwargs": ("TYPE_STRING", [1]),
        "add_generation_prompt": ("TYPE_BOOL", [1]),
        "continue_final_message": ("TYPE_BOOL", [1]),
        "stream": ("TYPE_BOOL", [1]),
        "sampling_parameters": ("TYPE_STRING", [1]),
        "exclude_input_in_output": ("TYPE_BOOL", [1]),
        "return_finish_reason": ("TYPE_BOOL", [1]),
        "return_cumulative_logprob": ("TYPE_BOOL", [1]),
        "return_logprobs": ("TYPE_BOOL", [1]),
        "return_num_input_tokens": ("TYPE_BOOL", [1]),
        "return_num_output_tokens": ("TYPE_BOOL", [1]),
        "return_usage": ("TYPE_BOOL", [1]),
        "return_error_code": ("TYPE_BOOL", [1]),
        "stop": ("TYPE_STRING", [-1]),
        "image": ("TYPE_STRING", [-1]),
        "embedding_request": ("TYPE_STRING", [1]),
        "business_line": ("TYPE_STRING", [1]),
        "cache_salt": ("TYPE_STRING", [1]),
        "request_class": ("TYPE_STRING", [1]),
        "deadline_ms": ("TYPE_INT64", [1]),
    }


def test_declared_outputs():
    assert {spec.name: (spec.data_type, spec.dims) for spec in OUTPUTS} == {
        "text_output": ("TYPE_STRING", [-1]),
        "finish_reason": ("TYPE_STRING", [-1]),
        "cumulative_logprob": ("TYPE_FP32", [-1]),
        "logprobs": ("TYPE_STRING", [-1]),
        "num_input_tokens": ("TYPE_UINT32", [1]),
        "num_output_tokens": ("TYPE_UINT32", [-1]),
        "usage": ("TYPE_STRING", [1]),
        "prompt_logprobs": ("TYPE_STRING", [1]),
    }


# -- prompts --


def test_plain_request():
    request = read(text_input=text("Grüße 你好"))
    assert (request.text_input, request.chat) == ("Grüße 你好", None)
    assert (request.stream, request.echo) == (False, True)
    assert request.sampling.max_tokens is None
    assert (request.business_line, request.cache_salt) == ("", "")
    assert request.request_class is RequestClass.INTERACTIVE
    assert request.returned == frozenset()


def test_messages():
    conversation = [{"role": "system", "content": "S"}, {"role": "user", "content": ""}]
    request = read(messages=messages(conversation))
    assert (request.text_input, request.chat and request.chat.messages) == (None, conversation)
    assert not request.echo  # messages are not echoed


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"role": "user", "content": "x"}, "it is a JSON list with at least one message"),
        ([], "it is a JSON list with at least one message"),
        ("hello", "it is a JSON list with at least one message"),
        (None, "it is a JSON list with at least one message"),
        (["hello"], "element 0 is not an object with a 'role' string"),
        ([{"content": "x"}], "element 0 is not an object with a 'role' string"),
        ([{"role": 1, "content": "x"}], "element 0 is not an object with a 'role' string"),
        (
            [{"role": "user", "content": "x"}, {"role": "user"}],
            "element 1 has no 'content': a string or a list of text parts",
        ),
        (
            [{"role": "user", "content": None}],
            "element 0 has no 'content': a string or a list of text parts",
        ),
    ],
)
def test_malformed_messages(value, reason):
    message = refusal(messages=messages(value))
    assert message.startswith("messages: ")
    assert message.endswith(reason)


@pytest.mark.parametrize("value", ["[{", "", "nope", "[" * 100_000])
def test_messages_that_are_not_json(value):
    message = refusal(messages=text(value))
    assert message.startswith("messages: not valid JSON: ")
    assert message.endswith("it is a JSON list")
    assert len(message) < 300


def test_request_without_a_prompt_is_refused():
    with pytest.raises(InvalidArgument) as refused:
        parse({"stream": flag(True)}, "")
    assert str(refused.value) == (
        "the request has neither text_input nor messages; send one of them"
    )


def test_request_with_two_prompts_is_refused():
    message = refusal(text_input=text("x"), messages=messages([{"role": "user", "content": "x"}]))
    assert message == "the request has both text_input and messages; send one of them"


@pytest.mark.parametrize("name", ["image", "embedding_request"])
def test_images_and_embeddings_are_not_supported(name):
    with pytest.raises(Unsupported) as refused:
        read(**{name: text("x")})
    assert str(refused.value) == f"{name}: not supported by this model"


@pytest.mark.parametrize(
    "name",
    ["text_input", "messages", "sampling_parameters", "stop", "business_line", "cache_salt"],
)
def test_invalid_utf8(name):
    message = refusal(**{name: text(b"ab\xffcd")})
    assert message == f"{name}: not valid UTF-8 at byte 2; only UTF-8 text is allowed"


@pytest.mark.parametrize(
    ("name", "tensor", "num"),
    [
        ("text_input", text("a", "b"), 2),
        ("text_input", text(), 0),
        ("stream", flag(True, False), 2),
        ("return_usage", flag(), 0),
        ("sampling_parameters", text("{}", "{}"), 2),
        ("business_line", text("a", "b"), 2),
    ],
)
def test_tensor_must_have_one_element(name, tensor, num):
    assert refusal(**{name: tensor}) == f"{name}: has {num} elements; exactly 1 is allowed"


def test_shape_of_one_element_does_not_matter():
    assert read(text_input=text("Hi").reshape(1, 1)).text_input == "Hi"


# -- stream and echo --


@pytest.mark.parametrize(
    ("stream", "exclude", "echo"),
    [
        (None, None, True),
        (False, None, True),
        (False, False, True),
        (False, True, False),
        (True, None, False),
        (True, True, False),
    ],
)
def test_answer_starts_with_the_prompt(stream, exclude, echo):
    inputs = {"stream": stream, "exclude_input_in_output": exclude}
    request = read(**{name: flag(v) for name, v in inputs.items() if v is not None})
    assert (request.stream, request.echo) == (bool(stream), echo)


def test_streams_can_not_start_with_the_prompt():
    assert refusal(stream=flag(True), exclude_input_in_output=flag(False)) == (
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    )


@pytest.mark.parametrize(
    "name",
    [
        "return_finish_reason",
        "return_cumulative_logprob",
        "return_logprobs",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "return_usage",
    ],
)
def test_each_return_flag(name):
    assert read(**{name: flag(True)}).returned == {name}
    assert read(**{name: flag(False)}).returned == frozenset()


# -- sampling parameters --


def test_request_parameters_are_sampling_parameters():
    sampling = read({"max_tokens": 32, "temperature": "0", "stop": ["x"]}).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.stop) == (32, 0.0, ["x"])


def test_sampling_parameters_tensor_replaces_request_parameters():
    sampling = read(
        {"max_tokens": 32, "temperature": 0.5, "unknown": 1},
        sampling_parameters=text('{"max_tokens": "8"}'),
    ).sampling
    assert (sampling.max_tokens, sampling.temperature) == (8, 1.0)


def test_empty_sampling_parameters_tensor_replaces_request_parameters():
    assert read({"max_tokens": 32}, sampling_parameters=text("{}")).sampling.max_tokens is None


def test_stop_tensor_takes_several_strings():
    sampling = read({"stop": "z"}, stop=text("a", "终")).sampling
    assert sampling.stop == ["a", "终"]
    assert read(sampling_parameters=text('{"stop": "z"}'), stop=text("a")).sampling.stop == ["a"]


def test_unknown_parameter():
    assert refusal({"max_token": 5}).startswith("unknown sampling parameter 'max_token'; known")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("{", "not valid JSON: "),
        ("", "not valid JSON: "),
        ("[" * 100_000, "not valid JSON: "),
        ("[1]", "'[1]' is not allowed; it is a JSON object"),
        ("null", "'null' is not allowed; it is a JSON object"),
        ('"x"', "'\"x\"' is not allowed; it is a JSON object"),
    ],
)
def test_sampling_parameters_that_are_not_an_object(value, reason):
    message = refusal(sampling_parameters=text(value))
    assert message.startswith(f"sampling_parameters: {reason}")
    assert message.endswith("it is a JSON object")
    if value:
        assert refusal(value).startswith(f"request parameters: {reason}")


# -- labels --


def test_labels_from_tensors():
    request = read(
        business_line=text("search"), cache_salt=text("s"), request_class=text("offline")
    )
    assert (request.business_line, request.cache_salt) == ("search", "s")
    assert request.request_class is RequestClass.OFFLINE


def test_labels_from_parameters_are_kept_beside_the_sampling_parameters_tensor():
    request = read(
        {"business_line": "search", "cache_salt": "s", "request_class": "offline", "seed": 1},
        sampling_parameters=text('{"seed": 2}'),
    )
    assert (request.business_line, request.cache_salt) == ("search", "s")
    assert request.request_class is RequestClass.OFFLINE
    assert request.sampling.seed == 2


def test_label_tensor_wins_over_its_parameter():
    request = read({"business_line": "ads", "seed": 1}, business_line=text("search"))
    assert request.business_line == "search"
    assert request.sampling.seed == 1


@pytest.mark.parametrize("name", ["business_line", "cache_salt", "request_class"])
@pytest.mark.parametrize("value", [5, ["x"], True])
def test_label_must_be_a_string(name, value):
    assert refusal({name: value}) == f"{name}: {value!r} is not allowed; it is a string"


def test_deadline_ms():
    assert read().deadline_ms is None
    assert read(deadline_ms=np.array([250])).deadline_ms == 250
    request = read({"deadline_ms": "250", "seed": 1}, sampling_parameters=text('{"seed": 2}'))
    assert (request.deadline_ms, request.sampling.seed) == (250, 2)
    assert read({"deadline_ms": 1}, deadline_ms=np.array([2])).deadline_ms == 2


@pytest.mark.parametrize("value", [0, -1, 2**31 + 1, 1.5, True, "soon", "-5", [1], {}])
def test_deadline_must_be_a_whole_number(value):
    assert refusal({"deadline_ms": value}) == (
        f"deadline_ms: {value!r} is not allowed; it is a whole number of milliseconds from 1 to "
        "2147483648"
    )


def test_request_class():
    assert refusal(request_class=text("urgent")) == (
        "request_class: 'urgent' is not allowed; it is interactive or offline"
    )
    assert read(request_class=text("")).request_class is RequestClass.INTERACTIVE


@pytest.mark.parametrize("name", ["business_line", "cache_salt"])
def test_label_with_a_lone_surrogate_is_refused(name):
    assert "surrogate" in refusal({name: "\ud800"})


@pytest.mark.parametrize(
    "parameters",
    ['{"\\ud800": 1}', '{"stop": ["\\ud800"], "seed": "\\ud800"}', '{"request_class": "\\ud800"}'],
)
def test_refusals_can_be_sent_as_utf8(parameters):
    with pytest.raises(RequestError) as refused:
        read(parameters)
    str(refused.value).encode()


# -- responses --

USAGE = {"prompt_tokens": 3, "output_tokens": 2, "ttft_ms": 12.5, "cost": None}
TOKENS = [
    SampledToken(5, TokenLogprobs(-0.25, 1, [(5, -0.25), (7, -2.0)])),
    SampledToken(9, TokenLogprobs(-3.5, 4, [(5, -0.5), (7, -1.5)])),
]


class FakeTokenizer:
    def decode_token(self, token_id: int) -> str:
        return f"<{token_id}>" if token_id < 10 else "\ufffd"

    def decode_token_after(self, context, token_id: int) -> str:
        return f"{context} {token_id}"


def respond(
    delta: Delta, parameters: dict | str = "", usage: dict | None = None, **flags: bool
) -> dict[str, np.ndarray]:
    request = read(parameters, **{name: flag(value) for name, value in flags.items()})
    return response_tensors(request, [delta], 3, usage, FakeTokenizer())


def test_text_is_the_only_output_by_default():
    tensors = respond(Delta("Grüße 🙂", TOKENS, -3.75, FinishReason.STOP), usage=USAGE)
    assert list(tensors) == ["text_output"]
    assert tensors["text_output"].dtype == np.object_
    assert tensors["text_output"].shape == (1,)
    assert tensors["text_output"][0] == "Grüße 🙂".encode()


@pytest.mark.parametrize(
    ("flag_name", "output", "dtype", "value"),
    [
        ("return_finish_reason", "finish_reason", np.object_, b"length"),
        ("return_cumulative_logprob", "cumulative_logprob", np.float32, -3.75),
        ("return_num_input_tokens", "num_input_tokens", np.uint32, 3),
        ("return_num_output_tokens", "num_output_tokens", np.uint32, 2),
        ("return_logprobs", "logprobs", np.object_, b"null"),
    ],
)
def test_requested_output_comes_with_every_response(flag_name, output, dtype, value):
    for delta, usage in (
        (Delta("a", TOKENS, -3.75, FinishReason.LENGTH), USAGE),
        (Delta("a", TOKENS, -3.75), None),
    ):
        tensors = respond(delta, usage=usage, **{flag_name: True})
        assert set(tensors) == {"text_output", output}
        assert tensors[output].dtype == dtype
        assert tensors[output].shape == (1,)
        expected = b"None" if value == b"length" and delta.finish_reason is None else value
        assert tensors[output][0] == expected


def test_usage_comes_with_the_last_response():
    assert "usage" not in respond(Delta("a", [], 0.0), return_usage=True)
    last = Delta("a", [], 0.0, FinishReason.STOP)
    tensor = respond(last, usage=USAGE, return_usage=True)["usage"]
    assert tensor.shape == (1,)
    assert json.loads(tensor[0]) == USAGE


def test_logprobs_have_the_top_tokens_and_the_chosen_one():
    tensors = respond(Delta("ab", TOKENS, -3.75), {"logprobs": 2}, return_logprobs=True)
    assert json.loads(tensors["logprobs"][0]) == [
        {
            "5": {"logprob": -0.25, "rank": 1, "decoded_token": "<5>"},
            "7": {"logprob": -2.0, "rank": 2, "decoded_token": "<7>"},
        },
        {
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "<5>"},
            "7": {"logprob": -1.5, "rank": 2, "decoded_token": "<7>"},
            "9": {"logprob": -3.5, "rank": 4, "decoded_token": "<9>"},
        },
    ]


def test_each_output_has_one_element_per_answer():
    flags = ("finish_reason", "cumulative_logprob", "logprobs", "num_output_tokens")
    request = read({"n": 2}, **{f"return_{name}": flag(True) for name in flags})
    deltas = [Delta("a", TOKENS, -3.75, FinishReason.STOP), Delta("", [], -1.5)]
    tensors = response_tensors(request, deltas, 3, None, FakeTokenizer())
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "text_output": [b"a", b""],
        "finish_reason": [b"stop", b"None"],
        "cumulative_logprob": [-3.75, -1.5],
        "logprobs": [b"null", b"null"],
        "num_output_tokens": [2, 0],
    }


def test_logprobs_of_tokens_within_a_character():
    """They are decoded after the four tokens before them."""

    def decoded(delta: Delta, output: str = "logprobs") -> list[list[str]]:
        parameters = {"logprobs": 1, "prompt_logprobs": 1}
        elements = json.loads(respond(delta, parameters, return_logprobs=True)[output][0])
        return [[v["decoded_token"] for v in each.values()] for each in elements if each]

    tokens = [SampledToken(i, TokenLogprobs(-1.0, 2, [(12, -0.5)])) for i in (1, 13, 2, 14, 15, 16)]
    assert decoded(Delta("a", tokens, 0.0, context=(7, 8, 9))) == [
        ["[7, 8, 9] 12", "<1>"],
        ["[7, 8, 9, 1] 12", "[7, 8, 9, 1] 13"],
        ["[8, 9, 1, 13] 12", "<2>"],
        ["[9, 1, 13, 2] 12", "[9, 1, 13, 2] 14"],
        ["[1, 13, 2, 14] 12", "[1, 13, 2, 14] 15"],
        ["[13, 2, 14, 15] 12", "[13, 2, 14, 15] 16"],
    ]
    delta = Delta("a", [], 0.0, prompt_logprobs=tokens[:2], context=(7,))
    assert decoded(delta, "prompt_logprobs") == [["[] 12", "<1>"], ["[1] 12", "[1] 13"]]


def test_logprobs_of_a_response_without_tokens():
    tensors = respond(Delta("", [], 0.0), {"logprobs": 2}, return_logprobs=True)
    assert tensors["logprobs"][0] == b"[]"


TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [
        (f"00-{TRACE_ID}-00f067aa0ba902b7-01", TRACE_ID),
        (f"cc-{TRACE_ID}-00f067aa0ba902b7-01-more", TRACE_ID),
        (f"ff-{TRACE_ID}-00f067aa0ba902b7-01", ""),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", ""),
        (f"00-{TRACE_ID.upper()}-00f067aa0ba902b7-01", ""),
        ("nonsense", ""),
        (7, ""),
    ],
)
def test_trace_id_is_read_and_an_invalid_one_ignored(traceparent, trace_id):
    assert read({"traceparent": traceparent}, text_input=text("a")).trace_id == trace_id
