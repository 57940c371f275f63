"""The contract with clients: Triton Server's tensors and parameters to requests, and back.

Names, types and defaults are those of vLLM's Triton Server backend, plus Tritium's own. Works on
numpy arrays; knows nothing of the Python backend's types.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tritium.backend.engine.request import RequestClass, SampledToken
from tritium.backend.errors import InvalidArgument, Unsupported
from tritium.backend.front.bounds import check_name
from tritium.backend.front.chat import OPTIONS as CHAT_OPTIONS
from tritium.backend.front.chat import Chat, parse_chat, read_object
from tritium.backend.front.output import Delta
from tritium.backend.front.sampling_params import SamplingParams
from tritium.backend.front.structured_params import StructuredOutputs
from tritium.backend.front.tools import Tools, parse_tools


class TokenDecoder(Protocol):
    def decode_token(self, token_id: int) -> str: ...

    def decode_token_after(self, context: Sequence[int], token_id: int) -> str: ...


class TensorSpec(NamedTuple):
    name: str
    data_type: str
    dims: list[int]


_FLAGS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_usage",
)
# All inputs are optional; a request has either text_input or messages.
INPUTS = (
    TensorSpec("text_input", "TYPE_STRING", [1]),
    TensorSpec("messages", "TYPE_STRING", [1]),
    TensorSpec("tools", "TYPE_STRING", [1]),
    TensorSpec("tool_choice", "TYPE_STRING", [1]),
    TensorSpec("chat_template_kwargs", "TYPE_STRING", [1]),
    TensorSpec("add_generation_prompt", "TYPE_BOOL", [1]),
    TensorSpec("continue_final_message", "TYPE_BOOL", [1]),
    TensorSpec("stream", "TYPE_BOOL", [1]),
    TensorSpec("sampling_parameters", "TYPE_STRING", [1]),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL", [1]),
    *(TensorSpec(name, "TYPE_BOOL", [1]) for name in _FLAGS),
    TensorSpec("return_error_code", "TYPE_BOOL", [1]),
    TensorSpec("stop", "TYPE_STRING", [-1]),
    TensorSpec("image", "TYPE_STRING", [-1]),
    TensorSpec("embedding_request", "TYPE_STRING", [1]),
    TensorSpec("business_line", "TYPE_STRING", [1]),
    TensorSpec("cache_salt", "TYPE_STRING", [1]),
    TensorSpec("request_class", "TYPE_STRING", [1]),
    TensorSpec("deadline_ms", "TYPE_INT64", [1]),
)
OUTPUTS = (
    TensorSpec("text_output", "TYPE_STRING", [-1]),
    TensorSpec("finish_reason", "TYPE_STRING", [-1]),
    TensorSpec("cumulative_logprob", "TYPE_FP32", [-1]),
    TensorSpec("logprobs", "TYPE_STRING", [-1]),
    TensorSpec("num_input_tokens", "TYPE_UINT32", [1]),
    TensorSpec("num_output_tokens", "TYPE_UINT32", [-1]),
    TensorSpec("usage", "TYPE_STRING", [1]),
    TensorSpec("prompt_logprobs", "TYPE_STRING", [1]),
)
_MAX_DEADLINE_MS = 2**31
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A client's request, validated."""

    text_input: str | None  # exactly one of text_input and chat
    chat: Chat | None
    sampling: SamplingParams
    tools: Tools | None = None
    stream: bool = False
    echo: bool = False  # the answer starts with the prompt
    returned: frozenset[str] = frozenset()  # the return_* flags that are set
    business_line: str = ""
    cache_salt: str = ""
    request_class: RequestClass = RequestClass.INTERACTIVE
    deadline_ms: int | None = None  # from arrival to the end of the answer; None: no limit
    trace_id: str = ""  # the 32 hex digits in W3C's traceparent
    size: int = field(default=0, compare=False)  # bytes of the prompt's tensors

    @property
    def constraint(self) -> StructuredOutputs | None:
        """The constraint on the answer's text."""
        return self.sampling.structured_outputs or (self.tools.constraint if self.tools else None)

    @property
    def constraint_source(self) -> str:
        """Where the constraint comes from, for error messages."""
        given = self.sampling.structured_outputs
        return "sampling parameter 'structured_outputs'" if given else "tools"


def parse(inputs: Mapping[str, NDArray[Any]], parameters: str) -> GenerationRequest:
    """Read a request.

    Args:
        inputs: The request's tensors.
        parameters: The request's parameters, a JSON object or "".

    Raises:
        InvalidArgument: names the tensor or parameter, its value, and what is allowed.
        Unsupported: image or embedding input.
    """
    for name in ("image", "embedding_request"):
        if name in inputs:
            raise Unsupported(f"{name}: not supported by this model")
    text_input = _string(inputs, "text_input")
    messages = _string(inputs, "messages")
    if text_input is None and messages is None:
        raise InvalidArgument("the request has neither text_input nor messages; send one of them")
    if text_input is not None and messages is not None:
        raise InvalidArgument("the request has both text_input and messages; send one of them")

    settings = read_object("request parameters", parameters) if parameters else {}
    chat_options = _take(settings, CHAT_OPTIONS)
    tools = parse_tools(*(_label(name, inputs, settings) for name in ("tools", "tool_choice")))
    if tools and tools.functions and messages is None:
        raise InvalidArgument(
            "tools: only messages may have tools; text_input has no chat template"
        )
    business_line, cache_salt, request_class = (
        _label(name, inputs, settings) for name in ("business_line", "cache_salt", "request_class")
    )
    check_name("business_line", business_line)
    check_name("cache_salt", cache_salt)
    if business_line.startswith("_"):
        raise InvalidArgument(
            f"business_line: {business_line!r:.100} is not allowed; names that start with _ are "
            "the system's"
        )
    deadline_ms = _deadline_ms(inputs, settings)
    trace_id = _trace_id(settings.pop("traceparent", ""))
    sampling_parameters = _string(inputs, "sampling_parameters")
    if sampling_parameters is not None:  # replaces the request's parameters, as in vLLM
        settings = read_object("sampling_parameters", sampling_parameters)
        chat_options |= _take(settings, CHAT_OPTIONS)
    if "stop" in inputs:
        settings["stop"] = [_text("stop", value) for value in inputs["stop"].reshape(-1)]

    chat_options |= _chat_tensors(inputs)
    if chat_options and messages is None:
        raise InvalidArgument(
            f"{next(iter(chat_options))}: only messages may have it; text_input has no chat "
            "template"
        )

    stream = bool(_flag(inputs, "stream"))
    exclude_input = _flag(inputs, "exclude_input_in_output")
    if stream and exclude_input is False:
        raise InvalidArgument(
            "Error generating stream: When streaming, `exclude_input_in_output` = False "
            "is not allowed."
        )
    sampling = SamplingParams.parse(settings)
    if sampling.structured_outputs and tools and tools.constraint:
        raise InvalidArgument(
            "tool_choice: constrains the answer, and so does a sampling parameter; only one of "
            "them is allowed"
        )
    return GenerationRequest(
        text_input=text_input,
        chat=None if messages is None else parse_chat(messages, chat_options),
        sampling=sampling,
        tools=tools,
        stream=stream,
        echo=not stream and not exclude_input and text_input is not None,
        returned=frozenset(name for name in _FLAGS if _flag(inputs, name)),
        business_line=business_line,
        cache_salt=cache_salt,
        request_class=_request_class(request_class or "interactive"),
        deadline_ms=deadline_ms,
        trace_id=trace_id,
        size=sum(
            len(inputs[name].item())
            for name in ("text_input", "messages", "tools")
            if name in inputs
        ),
    )


def wants_error_code(inputs: Mapping[str, NDArray[Any]]) -> bool:
    """Whether error messages start with the gRPC status, as in "UNAVAILABLE: ..."."""
    try:
        return bool(_flag(inputs, "return_error_code"))
    except InvalidArgument:
        return False


def response_tensors(
    request: GenerationRequest,
    deltas: list[Delta],
    num_input_tokens: int,
    usage: Mapping[str, float | None] | None,
    tokenizer: TokenDecoder,
) -> dict[str, NDArray[Any]]:
    """The output tensors of one response: the texts, and the outputs that the request asked for.

    Args:
        deltas: One per answer (`n`).
        usage: Of the whole request; None before the last response.
    """
    tensors = {"text_output": _strings_tensor([delta.text for delta in deltas])}
    if "return_finish_reason" in request.returned:
        tensors["finish_reason"] = _strings_tensor([str(delta.finish_reason) for delta in deltas])
    if "return_cumulative_logprob" in request.returned:
        sums = [delta.cumulative_logprob for delta in deltas]
        tensors["cumulative_logprob"] = np.array(sums, dtype=np.float32)
    if "return_logprobs" in request.returned:
        wanted = request.sampling.logprobs is not None
        tensors["logprobs"] = _strings_tensor(
            [json.dumps(_delta_logprobs(delta, tokenizer) if wanted else None) for delta in deltas]
        )
        prompt = deltas[0].prompt_logprobs
        if prompt is not None and request.sampling.prompt_logprobs is not None:
            elements = [None, *_logprobs(prompt, (), tokenizer)]  # the first token is not predicted
            tensors["prompt_logprobs"] = _strings_tensor([json.dumps(elements)])
    if "return_num_input_tokens" in request.returned:
        tensors["num_input_tokens"] = np.array([num_input_tokens], dtype=np.uint32)
    if "return_num_output_tokens" in request.returned:
        counts = [len(delta.tokens) for delta in deltas]
        tensors["num_output_tokens"] = np.array(counts, dtype=np.uint32)
    if "return_usage" in request.returned and usage:
        tensors["usage"] = _strings_tensor([json.dumps(usage)])
    return tensors


def _delta_logprobs(delta: Delta, tokenizer: TokenDecoder) -> list[dict[str, Any]]:
    return _logprobs(delta.tokens, delta.context, tokenizer)


def _logprobs(
    tokens: list[SampledToken], before: Sequence[int], tokenizer: TokenDecoder
) -> list[dict[str, Any]]:
    """One element per token: the top `logprobs` tokens and the chosen one.

    Args:
        before: Ids of the tokens in front of these.
    """
    elements = []
    context = list(before)
    for token_id, logprobs in tokens:
        assert logprobs
        ranked = {i: (value, rank) for rank, (i, value) in enumerate(logprobs.top, start=1)}
        ranked[token_id] = (logprobs.logprob, logprobs.rank)
        elements.append(
            {
                str(i): {
                    "logprob": value,
                    "rank": rank,
                    "decoded_token": _decoded(i, context, tokenizer),
                }
                for i, (value, rank) in ranked.items()
            }
        )
        context = [*context[-3:], token_id]
    return elements


def _decoded(token_id: int, context: Sequence[int], tokenizer: TokenDecoder) -> str:
    text = tokenizer.decode_token(token_id)
    is_broken = text.endswith("\ufffd")  # as vLLM: the character shows with its last token
    return tokenizer.decode_token_after(context, token_id) if is_broken else text


def _strings_tensor(texts: list[str]) -> NDArray[Any]:
    return np.array([text.encode() for text in texts], dtype=np.object_)


def _text(name: str, value: str | bytes) -> str:
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"{name}: not valid UTF-8 at byte {error.start}; only UTF-8 text is allowed"
        ) from None


def _one(inputs: Mapping[str, NDArray[Any]], name: str) -> Any:
    values = inputs[name].reshape(-1)
    if len(values) != 1:
        raise InvalidArgument(f"{name}: has {len(values)} elements; exactly 1 is allowed")
    return values[0]


def _string(inputs: Mapping[str, NDArray[Any]], name: str) -> str | None:
    return _text(name, _one(inputs, name)) if name in inputs else None


def _flag(inputs: Mapping[str, NDArray[Any]], name: str) -> bool | None:
    return bool(_one(inputs, name)) if name in inputs else None


def _take(settings: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Remove these settings and return those that are set."""
    taken = {name: settings.pop(name, None) for name in names}
    return {name: value for name, value in taken.items() if value is not None}


def _chat_tensors(inputs: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    return {
        name: _string(inputs, name) if name == "chat_template_kwargs" else _flag(inputs, name)
        for name in CHAT_OPTIONS
        if name in inputs
    }


def _label(name: str, inputs: Mapping[str, NDArray[Any]], settings: dict[str, Any]) -> str:
    """A label from its tensor, else from the parameters, from which it is removed."""
    value = settings.pop(name, "")
    if name in inputs:
        value = _string(inputs, name)
    if not isinstance(value, str):
        raise InvalidArgument(f"{name}: {value!r:.100} is not allowed; it is a string")
    return value


def _request_class(name: str) -> RequestClass:
    classes = {request_class.name.lower(): request_class for request_class in RequestClass}
    if name not in classes:
        allowed = " or ".join(classes)
        raise InvalidArgument(f"request_class: {name!r:.100} is not allowed; it is {allowed}")
    return classes[name]


def _deadline_ms(inputs: Mapping[str, NDArray[Any]], settings: dict[str, Any]) -> int | None:
    """The deadline from its tensor, else from the parameters, from which it is removed."""
    value = settings.pop("deadline_ms", None)
    if "deadline_ms" in inputs:
        value = _one(inputs, "deadline_ms").item()
    if value is None:
        return None
    is_number = isinstance(value, str) and value.isdecimal() and len(value) < 20
    number = int(value) if is_number else value
    if type(number) is not int or not 1 <= number <= _MAX_DEADLINE_MS:
        raise InvalidArgument(
            f"deadline_ms: {value!r:.100} is not allowed; it is a whole number of milliseconds "
            f"from 1 to {_MAX_DEADLINE_MS}"
        )
    return number


def _trace_id(traceparent: Any) -> str:
    """The trace id in W3C's traceparent; "" if invalid, as the standard says to ignore it."""
    match = _TRACEPARENT.fullmatch(traceparent) if isinstance(traceparent, str) else None
    return match[1] if match else ""
