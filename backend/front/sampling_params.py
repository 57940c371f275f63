"""Sampling parameters as clients send them: names and meanings are vLLM's, checked by pydantic."""

from dataclasses import fields
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)
from pydantic.dataclasses import dataclass

from tritium.backend.config import RepetitionDetection
from tritium.backend.engine.request import SamplingOptions
from tritium.backend.errors import InvalidArgument, Unsupported
from tritium.backend.front.bounds import check_sampling
from tritium.backend.front.structured_params import StructuredOutputs, take_structured_outputs

# Parameters of vLLM that this server does not support, with the value that has no effect: clients
# may send it.
_UNSUPPORTED = {"best_of": 1}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | int) and not isinstance(value, bool) else value


def _none_as_empty_list(value: Any) -> Any:
    return [] if value is None else value


def _none_as_empty_dict(value: Any) -> Any:
    return {} if value is None else value


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not a boolean")
    return value


_Int = Annotated[int, BeforeValidator(_refuse_bool)]
_Float = Annotated[float, BeforeValidator(_refuse_bool)]
_Strings = Annotated[list[str], BeforeValidator(_as_list), BeforeValidator(_none_as_empty_list)]
_TokenIds = Annotated[list[_Int], BeforeValidator(_as_list), BeforeValidator(_none_as_empty_list)]
_Biases = Annotated[dict[_Int, _Float], BeforeValidator(_none_as_empty_dict)]

_INHERITED = [field.name for field in fields(SamplingOptions)]  # numbers, all of them


@dataclass(
    frozen=True, kw_only=True, slots=True, config=ConfigDict(extra="forbid", allow_inf_nan=False)
)
class SamplingParams(SamplingOptions):
    """How a request's tokens are chosen and when it ends.

    The fields here are those that the front acts on or translates for the engine; those of
    `SamplingOptions` reach the engine unchanged. Numbers and booleans may come as strings, as JSON
    clients of vLLM's backend send them.
    """

    n: _Int = Field(1, ge=1)
    logit_bias: _Biases = Field(default_factory=dict)
    allowed_token_ids: list[_Int] | None = Field(None, min_length=1)
    bad_words: _Strings = Field(default_factory=list)
    seed: _Int | None = Field(None, ge=-(2**63), lt=2**64)
    max_tokens: _Int | None = Field(None, ge=1)  # None: the server's default_max_tokens
    stop: _Strings = Field(default_factory=list)
    stop_token_ids: _TokenIds = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: _Int | None = Field(None, ge=0, le=20)  # how many top tokens beside the chosen one
    prompt_logprobs: _Int | None = Field(None, ge=0, le=20)  # likewise, for the prompt
    skip_special_tokens: bool = True
    truncate_prompt_tokens: _Int | None = Field(None, ge=-1)  # keep the last ones; -1: what fits
    lora_name: str | None = None  # the adapter; None: the base model
    structured_outputs: StructuredOutputs | None = None  # also guided_decoding, response_format
    repetition_detection: RepetitionDetection | None = None  # None: the server's default
    speculative: bool | None = None  # ours: whether to use drafts; None: the server's default
    trim_blanks: bool | None = None  # ours: remove trailing blanks; None: the server's default

    @field_validator(*_INHERITED, mode="before")
    @classmethod
    def _check_inherited(cls, value: Any) -> Any:
        return _refuse_bool(value)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "SamplingParams":
        """Validate parameters as the client sent them.

        Raises:
            InvalidArgument: a parameter is unknown or its value is not allowed; names it.
            Unsupported: a parameter of vLLM that this server does not support yet.
        """
        check_sampling(values)
        values = dict(values)
        values["structured_outputs"] = take_structured_outputs(values)
        for name, value in list(values.items()):
            if name in _UNSUPPORTED:
                if value is not None and _number(value) != _UNSUPPORTED[name]:
                    raise Unsupported(f"sampling parameter '{name}' is not supported yet")
                del values[name]
            elif value is None:  # JSON null means absent
                del values[name]
        try:
            params = _ADAPTER.validate_python(values)
        except ValidationError as error:
            raise InvalidArgument(_explain(error)) from None
        if any(not stop for stop in params.stop):
            raise InvalidArgument("sampling parameter 'stop': a stop string can't be empty")
        if any(not word.strip() for word in params.bad_words):
            raise InvalidArgument("sampling parameter 'bad_words': a word can't be empty")
        if params.truncate_prompt_tokens == 0:
            raise InvalidArgument(
                "sampling parameter 'truncate_prompt_tokens': 0 is not allowed; it is -1 or at "
                "least 1"
            )
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise InvalidArgument(
                f"sampling parameter 'min_tokens': {params.min_tokens!s:.100} is more than "
                f"max_tokens {params.max_tokens!s:.100}"
            )
        return params


_ADAPTER = TypeAdapter(SamplingParams)


def _number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _explain(error: ValidationError) -> str:
    details = error.errors()[0]
    name = "".join(map(str, details["loc"][:1]))
    if details["type"] == "unexpected_keyword_argument":
        known = ", ".join(sorted(field.name for field in fields(SamplingParams)))
        return f"unknown sampling parameter '{name:.100}'; known are: {known}"
    reason = details["msg"].removeprefix("Value error, ")
    return f"sampling parameter '{name:.100}': {details['input']!r:.100} is not allowed. {reason}"
