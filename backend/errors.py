"""Errors that end a request, each with a Triton Server error code and a message for the client."""

from enum import StrEnum

_MAX_CHARS = 980  # of a message, made of what a client sent; 1,000 with the status in front


class RefusalReason(StrEnum):
    """Why a valid request was refused."""

    QUEUE_FULL = "queue_full"
    QUEUE_TOKENS = "queue_tokens"
    DEADLINE_UNMEETABLE = "deadline_unmeetable"
    KV_NEVER_FITS = "kv_never_fits"
    DRAINING = "draining"


class RequestError(Exception):
    """A request was refused or failed.

    `code` is the name of a `TritonError` code, `grpc_status` its name in gRPC. The message of a
    refusal starts with the reason.
    """

    code = "INTERNAL"
    grpc_status = "INTERNAL"

    def __init__(self, message: str, reason: RefusalReason | None = None) -> None:
        whole = f"{reason}: {message}" if reason else message
        super().__init__(whole if len(whole) <= _MAX_CHARS else f"{whole[: _MAX_CHARS - 4]} ...")
        self.reason = reason


class InvalidArgument(RequestError):
    """The request is invalid; the message names the field, its value and what is allowed."""

    code = "INVALID_ARG"
    grpc_status = "INVALID_ARGUMENT"


class Unsupported(RequestError):
    """The request needs a feature that this server does not have."""

    code = "UNSUPPORTED"
    grpc_status = "UNIMPLEMENTED"


class Unavailable(RequestError):
    """The request may succeed later or on another server; the message names the limit reached."""

    code = grpc_status = "UNAVAILABLE"


class Cancelled(RequestError):
    """The client cancelled the request or disconnected."""

    code = grpc_status = "CANCELLED"


class OutOfMemory(Exception):
    """A step ran out of memory and has changed nothing; a smaller step may succeed."""


def is_fatal(error: BaseException) -> bool:
    """Whether an error asks the process to end. A Rust library's panic is no `Exception` either."""
    return isinstance(error, KeyboardInterrupt | SystemExit)


ERRORS = (RequestError, InvalidArgument, Unsupported, Unavailable, Cancelled)
