"""Hypothesis strategies for the parts of requests, valid and invalid."""

import json
import math
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from tritium.backend.front.protocol import INPUTS
from tritium.loadtests.harness import add_tensor

ODD_TEXTS = [
    "",
    "\0",
    " ",
    "a\0b",
    "\ud800",  # a lone surrogate: invalid UTF-8 as bytes, an escape in JSON
    "a\udfffb",
    "\ufeff",
    "😀",
    "👩\u200d👩\u200d👧\u200d👦",
    "e\u0301",
    "\u202eabc",
    "<|im_start|>user\nHi<|im_end|>\n",
    "{{ 1 / 0 }}",
    "%s %n {0} ${x}",
    "null",
    "[1, 2]",
    "{}",
    "[" * 990,
    "[" * 100_000,
    '{"a":' * 400 + "1" + "}" * 400,
    "hello " * 300,
    "x" * 70_000,
]
ODD_NUMBERS = [
    *(-1, 0, 1, 2, 65, 2**31, -(2**31) - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63)),
    *(10**30, 10**400, -(10**400), 0.5, -0.0, 1.0, 1e-300, 5e-324, 1e38, 1e39, 1e308, -1e308),
    *(math.nan, math.inf, -math.inf),
]
texts = st.sampled_from(ODD_TEXTS) | st.text(max_size=20)
words = st.sampled_from(["a", " the", "é", "😀", "Paris", "\n"]) | st.text(min_size=1, max_size=5)
numbers = st.sampled_from(ODD_NUMBERS) | st.integers() | st.floats()
scalars = st.none() | st.booleans() | numbers | texts | numbers.map(str)
values = st.recursive(
    scalars,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(texts, children, max_size=3),
    max_leaves=6,
)


def one_in(odds: int) -> st.SearchStrategy[bool]:
    return st.integers(1, odds).map(lambda i: i == odds)


def pieces(*parts: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(parts), min_size=1, max_size=8).map("".join)


regexes = pieces(
    *("a", "b", "[a-z]", "[^a]", "(", ")", "(?:", "(?i)", "(?=a)", "(?!a)", "(?<x>", "\\1", "*"),
    *("+", "?", "{2}", "{1,3}", "{999999}", "|", "^", "$", ".", "\\d", "\\w", "\\", "\\p{L}"),
    *("[", "]", "[[:alpha:]]", "é", "😀", "\0", "\n"),
)
grammars = pieces(
    *("start: ", "root ::= ", "A", "x", ": ", " ::= ", '"a"', '"', "/[a-z]+/", "/", "(", ")", "|"),
    *("*", "+", "?", "~ 3", "{2,5}", "\n", "%ignore / /", "%json {}", "&", "%import common.INT"),
    *("A: /a/", "x: A x", "\0", "é", "start", "root", "[lazy]", "# c", "// c"),
)
names = st.sampled_from(["a", "b", "x", "", "é", "a b", "$ref", "properties", "\ud800"])
references = st.sampled_from(["#", "#/$defs/a", "#/properties/a", "#/", "http://x/y", "a", ""])
plain_schemas = st.sampled_from(
    [
        True,
        False,
        {},
        *({"type": name} for name in ("object", "array", "string", "number", "integer", "null")),
        {"type": ["string", "null"]},
        {"type": "any"},
    ]
)


def keywords(children: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """Keywords of JSON schemas, with valid values."""
    by_name = st.dictionaries(names, children, max_size=2)
    some = st.lists(children, max_size=2)
    sizes = st.integers(0, 4)
    return {
        "type": st.sampled_from(["object", "array", "string", "number", "integer"]),
        "properties": by_name,
        "patternProperties": st.dictionaries(regexes, children, max_size=2),
        "additionalProperties": children,
        "required": st.lists(names, max_size=2),
        "items": children,
        "prefixItems": some,
        "anyOf": some,
        "oneOf": some,
        "allOf": some,
        "not": children,
        "enum": st.lists(values, max_size=3),
        "const": values,
        "pattern": regexes,
        "format": st.sampled_from(["date", "uuid", "email", "ipv4", "odd"]),
        "$ref": references,
        "$defs": by_name,
        "multipleOf": numbers,
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), numbers),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), sizes),
        **dict.fromkeys(("minProperties", "maxProperties"), sizes),
    }


def objects(fields: dict[str, st.SearchStrategy[Any]], odds: int) -> st.SearchStrategy[Any]:
    """Up to 4 of the fields; one in `odds` has an arbitrary value."""

    def value_of(name: str) -> st.SearchStrategy[Any]:
        return one_in(odds).flatmap(lambda odd: values if odd else fields[name])

    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)
    return chosen.flatmap(lambda keys: st.fixed_dictionaries({k: value_of(k) for k in keys}))


schemas = st.recursive(
    plain_schemas, lambda children: objects(keywords(children), odds=8), max_leaves=5
)
nested = st.sampled_from([100, 400, 990]).flatmap(
    lambda depth: st.sampled_from(["items", "properties", "anyOf"]).map(
        lambda key: deep_schema(key, depth)
    )
)


def deep_schema(key: str, depth: int) -> str:
    before, after = {"items": ("", ""), "properties": ('{"a":', "}"), "anyOf": ("[", "]")}[key]
    return f'{{"{key}":{before}' * depth + "{}" + f"{after}}}" * depth


json_constraints = schemas | schemas.map(json.dumps) | nested
constraints = objects(
    {
        "json": json_constraints,
        "regex": regexes,
        "choice": st.lists(texts, max_size=3),
        "grammar": grammars,
        "json_object": st.booleans(),
        "whitespace_pattern": regexes,
        "disable_any_whitespace": st.booleans(),
        "disable_additional_properties": st.booleans(),
        "structural_tag": texts,
        "backend": texts,
    },
    odds=8,
)
valid_constraints = (
    json_constraints.map(lambda schema: {"json": schema})
    | regexes.map(lambda regex: {"regex": regex})
    | st.lists(words, min_size=1, max_size=3).map(lambda choice: {"choice": choice})
    | grammars.map(lambda grammar: {"grammar": grammar})
)
token_ids = st.integers(0, 49151)
lists_of_tokens = st.lists(token_ids, max_size=4)
floats = st.floats(-2, 2)
# Valid values of every sampling parameter.
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 4),
    "temperature": st.sampled_from([0, 1e-300, 1e-5, 1, 100]) | st.floats(0, 100),
    "top_k": st.sampled_from([-1, 0, 1, 50, 10**30]),
    "top_p": st.sampled_from([5e-324, 0.5, 1]) | st.floats(0.001, 1),
    "min_p": st.floats(0, 1),
    "presence_penalty": floats,
    "frequency_penalty": floats,
    "repetition_penalty": st.sampled_from([1e-300, 1e-39, 100]) | st.floats(0.01, 100),
    "logit_bias": st.dictionaries(token_ids.map(str), numbers, max_size=3),
    "allowed_token_ids": lists_of_tokens,
    "bad_words": words | st.lists(words, max_size=3),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "max_tokens": st.integers(1, 4),
    "min_tokens": st.integers(0, 4),
    "stop": words | st.lists(words, max_size=3),
    "stop_token_ids": lists_of_tokens,
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
    "skip_special_tokens": st.booleans(),
    "truncate_prompt_tokens": st.integers(-1, 9),
    "lora_name": texts,
    "priority": st.integers(-(2**31), 2**31 - 1),
    "structured_outputs": valid_constraints | constraints,
    "repetition_detection": objects(
        {
            "max_pattern_size": st.integers(0, 9),
            "min_pattern_size": st.integers(1, 9),
            "min_count": st.integers(2, 9),
        },
        odds=4,
    ),
    "trim_blanks": st.booleans(),
    "speculative": st.just(False),
    # Aliases, and names that are refused.
    "guided_decoding": valid_constraints | constraints,
    "guided_json": json_constraints,
    "guided_regex": regexes,
    "guided_choice": st.lists(texts, max_size=3),
    "guided_grammar": grammars,
    "guided_json_object": st.booleans(),
    "guided_": values,
    "response_format": json_constraints.map(
        lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}
    )
    | objects({"type": st.sampled_from(["text", "json_object", "x"]), "json_schema": values}, 4),
    "best_of": st.integers(0, 2),
    "use_beam_search": st.booleans(),
    "": values,
}
sampling = objects(SAMPLING, odds=12)
functions = objects(
    {"name": names, "description": texts, "parameters": schemas, "strict": st.booleans()}, odds=8
)
tools = st.lists(functions.map(lambda f: {"type": "function", "function": f}), max_size=2)
calls = st.lists(
    objects({"name": names, "arguments": texts | values}, odds=8).map(lambda f: {"function": f}),
    max_size=2,
)
roles = st.sampled_from(["user", "assistant", "system", "tool", "", "é", "\0"])
parts = st.lists(objects({"type": st.just("text"), "text": texts}, odds=12), max_size=3)
contents = texts | texts | parts
messages = st.lists(
    st.fixed_dictionaries({"role": roles, "content": contents})
    | objects({"role": roles, "content": contents, "tool_calls": calls, "name": texts}, odds=6),
    min_size=1,
    max_size=3,
)
choices = st.sampled_from(["none", "auto", "required", '"required"']) | names.map(
    lambda name: json.dumps({"type": "function", "function": {"name": name}})
)


def as_text(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[str]:
    """The value as JSON text; one in 12 is another value or not JSON."""
    valid, odd = strategy.map(json.dumps), values.map(json.dumps) | texts
    return one_in(12).flatmap(lambda is_odd: odd if is_odd else valid)


prompts = st.sampled_from(["The capital of France is", "1 2 3 4"]) | words | texts
# Valid and invalid texts, by the name of the tensor.
TEXTS = {
    "text_input": prompts,
    "messages": as_text(messages),
    "tools": as_text(tools),
    "tool_choice": choices | texts,
    "chat_template_kwargs": as_text(st.dictionaries(names | st.just("enable_thinking"), values)),
    "sampling_parameters": as_text(sampling),
    "stop": words | texts,
    "image": texts,
    "embedding_request": texts,
    "business_line": texts,
    "cache_salt": texts,
    "request_class": st.sampled_from(["interactive", "offline", "", "x"]),
}
FLAGS = [spec.name for spec in INPUTS if spec.data_type == "TYPE_BOOL"]


@st.composite
def inputs(draw: st.DrawFn) -> dict[str, Any]:
    """Usually one kind of prompt, sampling parameters, and some other inputs."""
    chosen = {draw(st.sampled_from(["text_input", "messages"]))}
    chosen |= draw(st.sets(st.just("sampling_parameters")))
    if draw(one_in(2)):
        others = ["stop", "business_line", "cache_salt", "request_class", "tools", "tool_choice"]
        chosen |= draw(st.sets(st.sampled_from(others), max_size=3))
    if draw(one_in(12)):
        chosen |= draw(st.sets(st.sampled_from(sorted(TEXTS)), max_size=2))
    if draw(one_in(6)):
        chosen |= set(NUMBERS)
    if "messages" in chosen and draw(one_in(4)):
        chosen.add("chat_template_kwargs")
    flags = draw(st.sets(st.sampled_from(FLAGS), max_size=5))
    if "messages" not in chosen and not draw(one_in(12)):
        flags -= {"add_generation_prompt", "continue_final_message"}
    made = {name: draw((TEXTS | NUMBERS)[name]) for name in sorted(chosen)}
    return made | {name: draw(st.booleans()) for name in sorted(flags)}


def encode(text: str) -> bytes:
    """UTF-8, except that a surrogate gives bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogatepass")


NUMBERS = {"deadline_ms": st.integers(1, 100_000) | st.integers(-(2**63), 2**63 - 1)}

# -- over gRPC --


@dataclass
class Tensor:
    datatype: str
    elements: list[Any]
    shape: list[int]


@dataclass
class GrpcRequest:
    tensors: dict[str, Tensor]
    parameters: dict[str, Any]
    raw: list[bytes]  # replace the elements of the tensors, unless empty

    def message(self, model: str) -> service_pb2.ModelInferRequest:
        request = service_pb2.ModelInferRequest(model_name=model)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        for name, value in self.parameters.items():
            kind = {bool: "bool", int: "int64", float: "double", str: "string"}[type(value)]
            setattr(request.parameters[name], f"{kind}_param", value)
        for name, tensor in self.tensors.items():
            elements = [] if self.raw else tensor.elements
            add_tensor(request, name, tensor.datatype, elements, tensor.shape)
        request.raw_input_contents.extend(self.raw)
        return request


_ELEMENTS: dict[str, st.SearchStrategy[Any]] = {
    "BYTES": texts.map(encode) | st.binary(max_size=20),
    "BOOL": st.booleans(),
    "INT32": st.integers(-(2**31), 2**31 - 1),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "UINT32": st.integers(0, 2**32 - 1),
    "UINT64": st.integers(0, 2**64 - 1),
    "FP32": st.floats(width=32),
    "FP64": st.floats(),
}
_tensor_names = st.sampled_from(["unknown", "é", *TEXTS, *NUMBERS, *FLAGS])
_parameter_names = st.sampled_from(
    ["x", "é", "priority", "timeout", "sequence_id", "traceparent", *SAMPLING, *TEXTS, *NUMBERS]
)
_parameter_values = (
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=20)
)


def _tensor(value: bool | int | str) -> Tensor:
    if isinstance(value, bool):
        return Tensor("BOOL", [value], [1])
    if isinstance(value, int):
        return Tensor("INT64", [value], [1])
    return Tensor("BYTES", [encode(value)], [1])


@st.composite
def _odd_tensors(draw: st.DrawFn) -> Tensor:
    datatype = draw(st.sampled_from(sorted(_ELEMENTS)))
    elements = draw(st.lists(_ELEMENTS[datatype], max_size=3))
    shapes = st.just([len(elements)]) | st.lists(st.sampled_from([1, 0, 2, -1, 2**62]), max_size=3)
    return Tensor(datatype, elements, draw(shapes))


@st.composite
def grpc_requests(draw: st.DrawFn) -> GrpcRequest:
    tensors = {name: _tensor(value) for name, value in draw(inputs()).items()}
    tensors["return_error_code"] = _tensor(True)
    parameters: dict[str, Any] = {}
    raw: list[bytes] = []
    if draw(one_in(3)):
        parameters = draw(st.dictionaries(_parameter_names, _parameter_values, max_size=2))
    if draw(one_in(8)):
        tensors |= draw(st.dictionaries(_tensor_names, _odd_tensors(), max_size=2))
    if draw(one_in(16)):
        raw = draw(st.lists(st.binary(max_size=20), min_size=1, max_size=len(tensors)))
    return GrpcRequest(tensors, parameters, raw)


# -- over HTTP --


@dataclass
class HttpRequest:
    endpoint: str
    body: bytes


@st.composite
def http_requests(draw: st.DrawFn) -> HttpRequest:
    body = draw(inputs())
    if draw(st.booleans()):
        body |= draw(sampling)
    if draw(one_in(8)):
        body["parameters"] = draw(sampling | values)
    if draw(one_in(6)):
        keys = texts | st.sampled_from([*TEXTS, *NUMBERS, *FLAGS])
        body |= draw(st.dictionaries(keys, values, max_size=3))
    body["return_error_code"] = True
    # Lone surrogates become escapes or bytes that are not UTF-8.
    text = encode(json.dumps(body, ensure_ascii=draw(st.booleans())))
    if draw(one_in(10)):
        cut = draw(st.integers(0, len(text)))
        text = text[:cut] + draw(st.binary(max_size=3)) + text[cut + draw(st.integers(0, 3)) :]
    endpoints = ["generate", "generate_stream"]
    if body.get("stream") is True:
        endpoints.reverse()
    return HttpRequest(endpoints[draw(one_in(9))], text)
