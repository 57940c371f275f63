"""Errors that end a request with a code of Triton Server's and a message for the caller."""

from enum import StrEnum


class RefusalReason(StrEnum):
    """Why a request was not taken in, though it may be right."""

    QUEUE_FULL = "queue_full"
    QUEUE_TOKENS = "queue_tokens"
    DEADLINE_UNMEETABLE = "deadline_unmeetable"
    KV_NEVER_FITS = "kv_never_fits"
    DRAINING = "draining"


class RequestError(Exception):
    """A request that is refused or failed.

    `code` is the name of a `TritonError` code, `grpc_status` what gRPC calls the same. The message
    of a refusal starts with its reason.
    """

    code = "INTERNAL"
    grpc_status = "INTERNAL"

    def __init__(self, message: str, reason: RefusalReason | None = None) -> None:
        super().__init__(f"{reason}: {message}" if reason else message)
        self.reason = reason


class InvalidArgument(RequestError):
    """The request is wrong and stays wrong; the message names field, value and what is allowed."""

    code = "INVALID_ARG"
    grpc_status = "INVALID_ARGUMENT"


class Unsupported(RequestError):
    """The request asks for something that this server does not do."""

    code = "UNSUPPORTED"
    grpc_status = "UNIMPLEMENTED"


class Unavailable(RequestError):
    """The request may succeed later or elsewhere; the message says which limit was reached."""

    code = grpc_status = "UNAVAILABLE"


class Cancelled(RequestError):
    """The client cancelled the request or went away."""

    code = grpc_status = "CANCELLED"


class OutOfMemory(Exception):
    """A step found no memory, and has changed nothing; a smaller one may find some."""


ERRORS = (RequestError, InvalidArgument, Unsupported, Unavailable, Cancelled)
