"""What both transports share: the calls of a client and the stream that they return."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Self, Unpack

from tritium.client.request import RequestOptions, request_fields
from tritium.client.types import ConnectionLost, Delta, Generation, GenerationError


class GenerationStream(Iterator[Delta]):
    """The deltas of one answer, as they arrive.

    The request is cancelled on the server by `cancel()` from any thread, at the end of a `with`
    block, or when the stream is garbage collected. After `cancel()` the iteration ends.
    """

    def __init__(self, deltas: Iterator[Delta], abort: Callable[[], None]) -> None:
        self._deltas = deltas
        self._abort = abort
        self._finished = False
        self._cancelled = False

    def __next__(self) -> Delta:
        try:
            delta = next(self._deltas)
        except StopIteration:
            if self._finished or self._cancelled:
                raise
            # The connection or the server failed during the answer.
            raise ConnectionLost("the answer broke off") from None
        except (GenerationError, TimeoutError):
            # cancel() makes the transport report an error.
            if self._cancelled:
                raise StopIteration from None
            raise
        self._finished |= delta.finish_reason is not None
        return delta

    def cancel(self) -> None:
        """Stop the generation on the server; does nothing if it has ended."""
        self._cancelled = True
        self._abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()


class Client(ABC):
    """A client of one served model, for any number of threads."""

    def stream(
        self,
        prompt: str | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationStream:
        """Start an answer to `prompt`, or to `messages=`.

        Args:
            timeout: Seconds for the whole answer; then the request is cancelled on the server.
            options: See `RequestOptions`.

        Raises:
            GenerationError: the server reported an error; raised here or while iterating.
            TimeoutError: the answer was not complete within `timeout`.
        """
        return self._open(request_fields(prompt, **options), timeout)

    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Wait for the whole answer; arguments and errors are those of `stream`."""
        text: list[str] = []
        finish_reason = usage = None
        with self.stream(prompt, timeout=timeout, **options) as deltas:
            for delta in deltas:
                text.append(delta.text)
                finish_reason = delta.finish_reason or finish_reason
                usage = delta.usage or usage
        return Generation("".join(text), finish_reason, usage)

    @abstractmethod
    def connect(self, timeout: float) -> None:
        """Connect to the server, so that the first request does not wait for a connection.

        Raises:
            ConnectionLost: it does not answer within `timeout` seconds.
        """

    @abstractmethod
    def _open(
        self, fields: Mapping[str, str | bool | int], timeout: float | None
    ) -> GenerationStream:
        """Send one request and return the stream of its answer."""
