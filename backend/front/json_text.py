"""JSON in a client's request: text to a value, or an error that names the field."""

import json
from typing import Any

from tritium.backend.errors import InvalidArgument


def parse_json(name: str, text: str, what: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # fails on escaped lone surrogates
        return value
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name}: has a lone surrogate, which is not a character") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{name}: not valid JSON: {error}; it is {what}") from None


def json_object(name: str, text: str) -> dict[str, Any]:
    value = parse_json(name, text, "a JSON object")
    if not isinstance(value, dict):
        raise InvalidArgument(f"{name}: {text!r:.100} is not allowed; it is a JSON object")
    return value
