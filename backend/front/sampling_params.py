"""Sampling parameters as callers send them: names and meanings are vLLM's, checked by pydantic."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tritium.backend.config import RepetitionDetection
from tritium.backend.errors import InvalidArgument, Unsupported
from tritium.backend.front.structured_params import StructuredOutputs, take_structured_outputs

_NOT_YET = frozenset(["best_of"])
# What these mean when they change nothing, so that clients which send defaults are served.
_HARMLESS = {"best_of": 1}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | int) and not isinstance(value, bool) else value


def _none_as_empty(value: Any) -> Any:
    return [] if value is None else value


def _none_as_nothing(value: Any) -> Any:
    return {} if value is None else value


Int = Annotated[int, BeforeValidator(lambda v: _refuse_bool(v))]
Float = Annotated[float, BeforeValidator(lambda v: _refuse_bool(v))]


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not a boolean")
    return value


class SamplingParams(BaseModel):
    """How a request's tokens are chosen and when it ends.

    Numbers and booleans may come as strings, as JSON clients of vLLM's backend send them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    n: Int = Field(1, ge=1)
    temperature: Float = Field(1.0, ge=0, le=100)  # 0: greedy
    top_k: Int = Field(0, ge=-1)  # 0 and -1: all tokens
    top_p: Float = Field(1.0, gt=0, le=1)
    min_p: Float = Field(0.0, ge=0, le=1)
    presence_penalty: Float = Field(0.0, ge=-2, le=2)
    frequency_penalty: Float = Field(0.0, ge=-2, le=2)
    repetition_penalty: Float = Field(1.0, ge=0.01, le=100)
    logit_bias: Annotated[dict[Int, Float], BeforeValidator(_none_as_nothing)] = {}
    allowed_token_ids: list[Int] | None = Field(None, min_length=1)
    bad_words: Annotated[list[str], BeforeValidator(_as_list), BeforeValidator(_none_as_empty)] = []
    seed: Int | None = Field(None, ge=-(2**63), lt=2**64)
    max_tokens: Int | None = Field(None, ge=1)  # None: the server's default_max_tokens
    min_tokens: Int = Field(0, ge=0)
    stop: Annotated[list[str], BeforeValidator(_as_list), BeforeValidator(_none_as_empty)] = []
    stop_token_ids: Annotated[
        list[Int], BeforeValidator(_as_list), BeforeValidator(_none_as_empty)
    ] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: Int | None = Field(None, ge=0, le=20)  # the top so many, plus the chosen token
    prompt_logprobs: Int | None = Field(None, ge=0, le=20)  # the same for the prompt
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Int | None = Field(None, ge=-1)  # the last so many; -1: what fits
    lora_name: str | None = None  # the adapter; None: the base model
    priority: Int = Field(0, ge=-(2**31), lt=2**31)  # smaller ones are admitted first
    structured_outputs: StructuredOutputs | None = None  # also guided_decoding, response_format
    repetition_detection: RepetitionDetection | None = None  # None: the server's
    speculative: bool | None = None  # ours: whether drafts are tried; None: the server's default
    trim_blanks: bool | None = None  # ours: no blanks at the end of the answer; None: the server's

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "SamplingParams":
        """Check parameters as they came.

        Raises:
            InvalidArgument: a parameter is unknown or has an impossible value; names it.
            Unsupported: a parameter of vLLM's that this server does not act on yet.
        """
        values = dict(values)
        values["structured_outputs"] = take_structured_outputs(values)
        for name, value in list(values.items()):
            if name in _NOT_YET:
                if value is not None and _number(value) != _HARMLESS.get(name):
                    raise Unsupported(f"sampling parameter '{name}' is not supported yet")
                del values[name]
            elif value is None:  # JSON null: as if it were not there
                del values[name]
        try:
            params = cls.model_validate(values)
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
                f"sampling parameter 'min_tokens': {params.min_tokens} is more than "
                f"max_tokens {params.max_tokens}"
            )
        return params


def _number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _explain(error: ValidationError) -> str:
    details = error.errors()[0]
    name = "".join(map(str, details["loc"][:1]))
    if details["type"] == "extra_forbidden" and len(details["loc"]) == 1:
        known = ", ".join(sorted(SamplingParams.model_fields))
        return f"unknown sampling parameter '{name}'; known are: {known}"
    reason = details["msg"].removeprefix("Value error, ")
    return f"sampling parameter '{name}': {details['input']!r:.100} is not allowed. {reason}"
