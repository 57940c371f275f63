"""The constraint on an answer: a JSON schema, a regular expression, a choice or a grammar.

Reads the old and new names of vLLM's sampling parameters and OpenAI's `response_format`. Knows
nothing of how a constraint is enforced.
"""

import json
from typing import Annotated, Any, NoReturn, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tritium.backend.errors import InvalidArgument, Unsupported

# vLLM's older parameters: guided_json, guided_regex, ...
_OLD_PREFIX = "guided_"
# vLLM's choice of a library, in requests and inside its own object; there is only one here.
_OF_OTHER_LIBRARIES = (
    "backend",
    "decoding_backend",
    "disable_fallback",
    "_backend",
    "_backend_was_auto",
)
_MAX_CHARS = 2**16
_MAX_CHOICES = 2**12
_MAX_PATTERN_CHARS = 2**10  # of whitespace_pattern


def _schema_text(value: Any) -> Any:
    """The text of a JSON schema, given as an object or as text."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, dict):
            raise ValueError("Input should be a JSON schema: an object, or its text")
        return json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise ValueError("Input should be less deeply nested") from None


def _choices(value: Any) -> Any:
    """A list of strings, given as such or as text: `/generate` takes no lists as parameters."""
    try:
        choices = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list | tuple) or not all(isinstance(c, str) for c in choices):
        raise ValueError("Input should be a list of strings, or its text")
    return tuple(choices)


class StructuredOutputs(BaseModel):
    """Exactly one of the first five fields, and options. Fields as in vLLM; all are hashable."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    json_schema: Annotated[str, BeforeValidator(_schema_text)] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[tuple[str, ...], BeforeValidator(_choices), Field(min_length=1)] | None = None
    grammar: str | None = None  # Lark or GBNF, which has ::=
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    # A regular expression for the space between JSON's tokens.
    whitespace_pattern: str | None = Field(None, max_length=_MAX_PATTERN_CHARS)
    # Has no effect: objects with listed properties allow no others, unless their schema says so.
    disable_additional_properties: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = self._given()
        if len(given) != 1:
            raise ValueError(
                f"Exactly one of json, regex, choice, grammar and json_object is allowed; here "
                f"{'are ' + ', '.join(given) if given else 'is none'}"
            )
        name, value = self.given_field
        size = sum(map(len, value)) if isinstance(value, tuple) else len(str(value))
        if size > _MAX_CHARS:
            raise ValueError(f"'{name}' has {size} characters; at most {_MAX_CHARS} are allowed")
        if isinstance(value, tuple) and len(value) > _MAX_CHOICES:
            raise ValueError(
                f"'{name}' has {len(value)} entries; at most {_MAX_CHOICES} are allowed"
            )
        return self

    @property
    def given_field(self) -> tuple[str, Any]:
        """The constraint itself: its field's name in requests, and its value."""
        [item] = self._given().items()
        return item

    def _given(self) -> dict[str, Any]:
        fields = {
            "json": self.json_schema,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


def take_structured_outputs(parameters: dict[str, Any]) -> StructuredOutputs | None:
    """Remove the constraint from sampling parameters and return it; None: there is none.

    Raises:
        InvalidArgument: names the parameter, its value and what is allowed.
        Unsupported: structural tags.
    """
    old = {
        name.removeprefix(_OLD_PREFIX): parameters.pop(name)
        for name in list(parameters)
        if name.startswith(_OLD_PREFIX) and name != "guided_decoding"
    }
    demands = {
        "structured_outputs": parameters.pop("structured_outputs", None),
        "guided_decoding": parameters.pop("guided_decoding", None),
        "guided_...": {name: value for name, value in old.items() if value is not None} or None,
        "response_format": parameters.pop("response_format", None),
    }
    given = [(name, value) for name, value in demands.items() if value is not None]
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(name for name, _ in given)
        raise InvalidArgument(f"sampling parameters {names}: only one of them is allowed")
    [(name, value)] = given
    if name == "response_format":
        return _read_response_format(value)
    return read_structured_outputs(f"sampling parameter '{name}'", value)


def read_structured_outputs(name: str, value: Any) -> StructuredOutputs:
    """Read a constraint, given as a JSON object or its text.

    Raises:
        InvalidArgument: the message starts with `name`.
        Unsupported: structural tags.
    """
    fields = _object(name, value)
    if fields.get("structural_tag") is not None:
        raise Unsupported(f"{name}: 'structural_tag' is not supported")
    skipped = ("structural_tag", *_OF_OTHER_LIBRARIES)
    fields = {k: v for k, v in fields.items() if v is not None and k not in skipped}
    try:
        return StructuredOutputs.model_validate(fields)
    except ValidationError as error:
        details = error.errors(include_input=False)[0]
        part = details["loc"][0] if details["loc"] else None
        reason = details["msg"].removeprefix("Value error, ")
        if details["type"] == "extra_forbidden":
            known = ", ".join(f.alias or n for n, f in StructuredOutputs.model_fields.items())
            raise InvalidArgument(
                f"{name}: unknown field '{part:.100}'; known are: {known}"
            ) from None
        if part is None:
            _refuse(name, value, reason)
        _refuse(f"{name}: '{part}'", fields.get(str(part)), reason)


def _read_response_format(value: Any) -> StructuredOutputs | None:
    """OpenAI's {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": ...}}."""
    name = "sampling parameter 'response_format'"
    fields = _object(name, value)
    kind = fields.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return read_structured_outputs(name, {"json_object": True})
    if kind == "structural_tag":
        raise Unsupported(f"{name}: 'structural_tag' is not supported")
    if kind != "json_schema":
        _refuse(f"{name}: 'type'", kind, "It is text, json_object or json_schema")
    schema = fields.get("json_schema")
    if not isinstance(schema, dict) or schema.get("schema") is None:
        _refuse(f"{name}: 'json_schema'", schema, 'It is {"schema": ...}')
    return read_structured_outputs(name, {"json": schema["schema"]})


def _object(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            _refuse(name, value, f"It is not valid JSON: {error}")
    if not isinstance(value, dict):
        _refuse(name, value, "It is a JSON object")
    return value


def _refuse(name: str, value: Any, reason: str) -> NoReturn:
    raise InvalidArgument(f"{name}: {value!r:.100} is not allowed. {reason}")
