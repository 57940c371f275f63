"""What both transports share: the calls a caller makes and the stream they answer with."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Self, Unpack

from tritium.client.request import RequestOptions, request_fields
from tritium.client.types import ConnectionLost, Delta, Generation, GenerationError


class GenerationStream(Iterator[Delta]):
    """The deltas of one answer, as they arrive.

    Leaving it early cancels the request on the server: by `cancel()` from any thread, by the end of
    a `with` block, or by dropping it. After `cancel()` the iteration just ends.
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
            # The connection or the server went down amid the answer.
            raise ConnectionLost("the answer broke off") from None
        except (GenerationError, TimeoutError):
            # What a transport reports while it is being torn down is our own doing.
            if self._cancelled:
                raise StopIteration from None
            raise
        self._finished |= delta.finish_reason is not None
        return delta

    def cancel(self) -> None:
        """Stop the generation on the server; nothing happens if it is over already."""
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
    """A Tritium server's model. One client serves any number of threads."""

    def stream(
        self,
        prompt: str | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationStream:
        """Start an answer to `prompt`, or to `messages=`.

        `timeout`, in seconds, bounds the whole answer: past it, TimeoutError is raised and the
        request is cancelled on the server. Errors of the server or on the way to it are
        GenerationErrors, raised here or while iterating.
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
        """Reach the server once, so that the first request does not wait for a connection.

        Raises:
            ConnectionLost: it does not answer within `timeout` seconds.
        """

    @abstractmethod
    def _open(
        self, fields: Mapping[str, str | bool | int], timeout: float | None
    ) -> GenerationStream:
        """Send one request and return the stream of its answer."""
