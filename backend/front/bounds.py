"""How large each part of a request may be. Checked before it costs anything, and far above what
people send.

Bytes are those of the tensor or parameter as it arrives. What becomes the prompt is bounded by the
model's length: see `Bounds`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray

from tritium.backend.errors import InvalidArgument

MAX_NAME_CHARS = 256  # of request ids, business lines and cache salts
_OPTIONS = 2**20  # bytes of JSON: a constraint has at most 65,536 characters
_BYTES = {
    "tool_choice": _OPTIONS,
    "chat_template_kwargs": 2**16,
    "sampling_parameters": _OPTIONS,
    "business_line": 4 * MAX_NAME_CHARS,
    "cache_salt": 4 * MAX_NAME_CHARS,
    "request_class": 256,
    "stop": 2**16,
}
_ENTRIES = {
    "stop": 256,
    "bad_words": 1024,
    "logit_bias": 4096,
    "allowed_token_ids": 2**17,
    "stop_token_ids": 4096,
}
_CHARS = {"stop": 1024, "bad_words": 1024}  # of each
_PARAMETERS = 128
_ESCAPED = 6  # bytes of JSON for a byte of text: \u0041


class Bounds(NamedTuple):
    """The bounds of one model's requests.

    Args:
        max_model_len: Most tokens of prompt and answer together.
        max_token_bytes: Those of the vocabulary's longest token.
    """

    max_model_len: int
    max_token_bytes: int

    def check(self, inputs: Mapping[str, NDArray[Any]], parameters: str, request_id: str) -> None:
        """Check a request as it arrives.

        Raises:
            InvalidArgument: names the field, its size and what is allowed.
        """
        check_name("request id", request_id)
        _check("request parameters", len(parameters), _OPTIONS, "characters")
        prompt_bytes = self.max_model_len * self.max_token_bytes
        json_bytes = _ESCAPED * prompt_bytes + _OPTIONS
        prompt = {"text_input": prompt_bytes, "messages": json_bytes, "tools": json_bytes}
        limits = _BYTES | prompt
        for name in inputs.keys() & limits:
            values = inputs[name].reshape(-1)
            if name == "stop":
                _check(name, len(values), _ENTRIES[name], "elements")
            if name == "stop" or len(values) == 1:  # else it is refused anyway
                why = f" (max_model_len is {self.max_model_len})" if name in prompt else ""
                _check(name, sum(map(len, values)), limits[name], "bytes", why)


def check_sampling(values: Mapping[str, Any]) -> None:
    """Check how many sampling parameters there are, and their lists, before they are validated."""
    _check("sampling parameters", len(values), _PARAMETERS, "entries")
    for name, limit in _ENTRIES.items():
        value = values.get(name)
        if isinstance(value, list | dict):
            _check(f"sampling parameter '{name}'", len(value), limit, "entries")
    for name, limit in _CHARS.items():
        value = values.get(name)
        texts = value if isinstance(value, list) else [value]
        longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
        _check(f"sampling parameter '{name}'", longest, limit, "characters in a text")


def check_name(field: str, name: str) -> None:
    """Check a name that a caller chooses, and that ledgers, metrics or logs keep."""
    _check(field, len(name), MAX_NAME_CHARS, "characters")
    if not name.isprintable():
        raise InvalidArgument(f"{field}: {name!r:.100} is not allowed; it is printable text")


def _check(field: str, size: int, limit: int, unit: str, why: str = "") -> None:
    if size > limit:
        raise InvalidArgument(f"{field}: has {size} {unit}; at most {limit} are allowed{why}")
