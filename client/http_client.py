"""The client over HTTP: `/generate_stream`, whose answer is a stream of server-sent events.

It uses the standard library's http.client, because cancelling from another thread and a timeout of
the whole answer both need the socket, even before the first byte of the answer. Libraries with a
connection pool do not give access to it.

Triton Server notices a closed HTTP connection at its next write. A cancelled request that waits in
the queue therefore stays until its first token; over gRPC it is removed at once.
"""

import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import quote, urlsplit

from tritium.client.base import Client, GenerationStream
from tritium.client.sse import parse_events
from tritium.client.types import ConnectionLost, Delta, GenerationError

# The inverse of Triton Server's mapping. 2.51 answers every error of the generate endpoints with
# 400, so only the message distinguishes a full queue from a wrong value.
_CODES = {
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
}


class HttpClient(Client):
    """Talks to Triton Server's HTTP port, `url` being http://host:port."""

    def __init__(self, url: str = "http://localhost:8000", model: str = "smollm2") -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"url must look like http://host:port, got {url!r}")
        self._url = url
        self._host, self._port = parts.hostname, parts.port
        self._path = f"{parts.path.rstrip('/')}/v2/models/{quote(model, safe='')}/generate_stream"

    def connect(self, timeout: float) -> None:
        """Check that the server accepts connections; each request opens its own."""
        try:
            socket.create_connection((self._host, self._port), timeout).close()
        except OSError as error:
            raise ConnectionLost(f"{self._url}: {error}") from error

    def _open(
        self, fields: Mapping[str, str | bool | int], timeout: float | None
    ) -> GenerationStream:
        connection = HTTPConnection(self._host, self._port, timeout=timeout)
        exchange = _Exchange(connection, self._url, timeout)
        exchange.send(self._path, json.dumps(fields).encode())
        return GenerationStream(_deltas(exchange), exchange.abort)


class _Exchange:
    """One request and its answer on a connection of their own; closing it cancels the request."""

    def __init__(self, connection: HTTPConnection, url: str, timeout: float | None) -> None:
        self._connection = connection
        self._url = url
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._socket: socket.socket | None = None  # set by send()

    def send(self, path: str, body: bytes) -> None:
        try:
            self._connection.connect()
            self._socket = self._connection.sock
            self._connection.request(
                "POST", path, body=body, headers={"Content-Type": "application/json"}
            )
        except OSError as error:
            raise self._failure(error) from error

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of a successful answer; an error status is raised."""
        try:
            self._limit_wait()
            response = self._connection.getresponse()
            if response.status != 200:
                raise _refusal(response)
            while True:
                self._limit_wait()
                line = response.readline()
                if not line:
                    return
                yield line
        except (OSError, HTTPException) as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Shut down and release the connection; called by the thread that reads the answer."""
        self.abort()
        self._connection.close()

    def abort(self) -> None:
        """Shut down the connection, from any thread; this wakes the thread that reads."""
        if self._socket is not None:
            with suppress(OSError):  # closed already, by us or by the server
                self._socket.shutdown(socket.SHUT_RDWR)

    def _limit_wait(self) -> None:
        if self._deadline is not None and self._socket is not None:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining)

    def _failure(self, error: OSError | HTTPException) -> GenerationError | TimeoutError:
        if isinstance(error, TimeoutError):
            return TimeoutError(f"no complete answer from {self._url} within {self._timeout} s")
        return ConnectionLost(f"{self._url}: {error}")


def _deltas(exchange: _Exchange) -> Iterator[Delta]:
    try:
        for event in parse_events(exchange.lines()):
            outputs = json.loads(event)
            if "error" in outputs:
                raise GenerationError.from_message(outputs["error"])
            yield Delta.from_outputs(outputs)
    finally:
        exchange.close()


def _refusal(response: HTTPResponse) -> GenerationError:
    # The body is JSON, or one event that holds the same JSON.
    body = response.read().decode(errors="replace").removeprefix("data: ").strip()
    try:
        message = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        message = body or f"HTTP status {response.status} {response.reason}"
    return GenerationError.from_message(message, _CODES.get(response.status, "UNKNOWN"))
