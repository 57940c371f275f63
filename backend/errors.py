"""Errors that end a request with a code of Triton Server's and a message for the caller."""


class RequestError(Exception):
    """A request that is refused or failed.

    `code` is the name of a `TritonError` code, `grpc_status` what gRPC calls the same.
    """

    code = "INTERNAL"
    grpc_status = "INTERNAL"


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


ERRORS = (RequestError, InvalidArgument, Unsupported, Unavailable, Cancelled)
