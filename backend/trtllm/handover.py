"""How a relay model passes requests to the main model: the protocol between the two.

A relay model serves another contract from a process of its own, and passes requests on by Triton
Server's Business Logic Scripting (BLS). BLS has three defects (in Triton Server 2.51). The main
model works around them for requests whose id says that they were relayed:

- BLS can't cancel. A request with the id `cancel(id)` cancels the request `id`.
- BLS blocks one of the relay's 32 threads, which also send its responses, until a request's first
  response. So the main model sends an empty response at once.
- BLS drops the code of an error, and all of an error that is not the first response. So an error is
  sent as a response whose finish reason has the code and the message.
"""

import hashlib
import os
import secrets
from pathlib import Path

from tritium.backend.errors import ERRORS, RequestError


def _secret() -> str:
    """Known to the processes of one Triton Server, and to no client, who could name its id so."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    started = stat.rpartition(")")[2].split()[19]  # field 22
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(f"{boot} {os.getppid()} {started}".encode()).hexdigest()[:32]


_SECRET = _secret()
_REQUEST, _CANCEL = f"tritium-request-{_SECRET}-", f"tritium-cancel-{_SECRET}-"
_ERRORS = {error.code: error for error in ERRORS}


def new_id() -> str:
    """A new id for a relayed request, which can't be guessed."""
    return _REQUEST + secrets.token_hex(16)


def is_handed_over(request_id: str) -> bool:
    return request_id.startswith(_REQUEST)


def cancel(request_id: str) -> str:
    """The id of the request that cancels the request with this id."""
    return _CANCEL + request_id


def is_cancel(request_id: str) -> bool:
    return request_id.startswith(_CANCEL)


def finish_reason(error: RequestError) -> str:
    """The finish reason that carries an error."""
    return f"error {error.code} {error}"


def read_error(finish_reason: str) -> RequestError | None:
    """The error that a finish reason carries, if any."""
    if not finish_reason.startswith("error "):
        return None
    _, code, message = finish_reason.split(" ", 2)
    return _ERRORS[code](message)
