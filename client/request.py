"""The input fields of a request under the server's names, before a transport encodes them."""

import json
from typing import Any, TypedDict


class RequestOptions(TypedDict, total=False):
    """Options of a request besides the prompt."""

    messages: list[dict[str, str]] | None  # chat messages, instead of a prompt
    sampling: dict[str, Any] | None  # sampling parameters under vLLM's names
    business_line: str | None  # the line that pays
    cache_salt: str | None  # extra isolation of the prefix cache
    request_class: str | None  # "interactive" or "offline"
    deadline_ms: int | None  # from arrival to the end of the answer


def request_fields(
    prompt: str | None,
    *,
    messages: list[dict[str, str]] | None = None,
    sampling: dict[str, Any] | None = None,
    business_line: str | None = None,
    cache_salt: str | None = None,
    request_class: str | None = None,
    deadline_ms: int | None = None,
) -> dict[str, str | bool | int]:
    """Return the fields of a streamed request; the transports send each as a tensor or JSON key."""
    if (prompt is None) == (messages is None):
        raise ValueError("give exactly one of prompt and messages")
    if sampling and sampling.get("n", 1) not in (1, "1"):
        raise ValueError(f"a stream carries one answer: n must be 1, got {sampling['n']}")
    fields: dict[str, str | bool | int] = {
        "stream": True,
        "return_finish_reason": True,
        "return_num_output_tokens": True,
        "return_usage": True,
        "return_error_code": True,
    }
    if prompt is not None:
        fields["text_input"] = prompt
    else:
        fields["messages"] = json.dumps(messages, ensure_ascii=False)
    if sampling:
        fields["sampling_parameters"] = json.dumps(sampling, ensure_ascii=False)
    labels = {
        "business_line": business_line,
        "cache_salt": cache_salt,
        "request_class": request_class,
        "deadline_ms": deadline_ms,
    }
    return fields | {name: value for name, value in labels.items() if value is not None}
