"""How a door hands requests over to the main model: what both must know.

A door is a model with another contract, in a process of its own; it passes requests on by Triton
Server's Business Logic Scripting (BLS). That falls short in three ways (in Triton Server 2.51),
which the main model makes up for where a request's id says that it was handed over:

- BLS can't cancel. A request with the id of `cancel()` does it.
- BLS keeps one of the door's 32 threads, on which its own responses leave too, until a request's
  first response. So the main model sends an empty one at once.
- BLS loses the code of an error, and the whole of one that is not the first response. So an error
  comes as a response whose finish reason tells both.
"""

import secrets

from tritium.backend.errors import ERRORS, RequestError

_REQUEST, _CANCEL = "tritium-request-", "tritium-cancel-"
_ERRORS = {error.code: error for error in ERRORS}


def new_id() -> str:
    """The id of a request that is handed over; nobody can guess it."""
    return _REQUEST + secrets.token_hex(16)


def is_handed_over(request_id: str) -> bool:
    return request_id.startswith(_REQUEST)


def cancel(request_id: str) -> str:
    """The id of a request that cancels another one."""
    return _CANCEL + request_id


def is_cancel(request_id: str) -> bool:
    return request_id.startswith(_CANCEL)


def finish_reason(error: RequestError) -> str:
    """Of a request that ends with an error."""
    return f"error {error.code} {error}"


def read_error(finish_reason: str) -> RequestError | None:
    """The error, where a finish reason is that of one."""
    if not finish_reason.startswith("error "):
        return None
    _, code, message = finish_reason.split(" ", 2)
    return _ERRORS[code](message)
