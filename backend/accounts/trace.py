"""Traffic capture: lengths, times and salted block hashes of requests, never text.

The format is Mooncake's JSON lines (https://github.com/kvcache-ai/Mooncake) with additional fields.
A row is written when its request ends; `tritium loadtest convert` sorts rows by arrival.
"""

import hashlib
import logging
import queue
import secrets
from array import array
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from tritium.backend.supervisor import Supervisor

logger = logging.getLogger("tritium")

_NUM_FILES = 8  # files of a capture, including the current one
_MAX_BEHIND = 10_000  # requests that may wait to be written, so that a stalled disk costs no memory


class TraceRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request of a trace; the fields after `hash_ids` are Tritium's own.

    A hash id stands for `hash_block_size` tokens of the prompt and all tokens before them, so equal
    ids mean equal prefixes. The last block may be partial.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0)]  # ms
    input_length: Annotated[int, msgspec.Meta(ge=1)]  # tokens
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: list[int] = []
    hash_block_size: Annotated[int, msgspec.Meta(ge=1)] = 512
    business_line: str = ""
    request_class: str = ""
    session_id: str = ""


class Captured(NamedTuple):
    """A request that has ended."""

    arrival: float  # seconds since 1970
    prompt_token_ids: Sequence[int]
    output_lengths: list[int]  # one per answer; 0: nothing to replay
    cache_salt: bytes  # prompts under different salts share nothing
    business_line: str
    request_class: str


class TraceWriter:
    """Writes ended requests to a file, on a thread of its own.

    Args:
        path: The current file; older ones have the suffixes .1, .2, ...
        max_size: Most bytes of all files together; the oldest files are deleted.
        block_size: Tokens per hash id.
        supervisor: Starts the thread.

    Raises:
        OSError: the file can't be written.
    """

    def __init__(
        self, path: Path, max_size: int, block_size: int, supervisor: Supervisor | None = None
    ) -> None:
        self._block_size = block_size
        # Secret and random, so that guessed prompts can't be checked against the file.
        self._key = secrets.token_bytes(16)
        self._encoder = msgspec.json.Encoder()
        self._file = _File(path, max_size)
        self._queue: queue.SimpleQueue[Captured | None] = queue.SimpleQueue()
        self._is_losing = False
        self._thread = (supervisor or Supervisor()).start("trace", self._run)

    def add(self, request: Captured) -> None:
        """Queue a request; never waits, never raises. If too many are queued, it is dropped."""
        if self._queue.qsize() < _MAX_BEHIND:
            self._queue.put(request)
        elif not self._is_losing:
            self._is_losing = True
            logger.warning("trace_path: the disk is too slow; requests are missing in the file")

    def close(self) -> None:
        """Write all queued requests, for at most 5 s."""
        self._queue.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        is_broken = False
        while (request := self._queue.get()) is not None:
            if is_broken:
                continue
            try:
                self._write(request)
            except Exception as error:  # noqa: BLE001 -- serving continues without a trace
                logger.warning(f"trace_path: nothing more is written: {error}")
                is_broken = True
        self._file.close()

    def _write(self, request: Captured) -> None:
        ids = hash_ids(request, self._block_size, self._key)
        for output_length in filter(None, request.output_lengths):
            row = TraceRequest(
                round(request.arrival * 1000, 3),
                len(request.prompt_token_ids),
                output_length,
                ids,
                self._block_size,
                request.business_line,
                request.request_class,
            )
            self._file.write(self._encoder.encode(row).decode())


class _File(RotatingFileHandler):
    """Writes lines to a file, and begins a new one when it is full."""

    def __init__(self, path: Path, max_size: int) -> None:
        super().__init__(path, "a", max_size // _NUM_FILES, _NUM_FILES - 1, encoding="utf-8")

    def write(self, line: str) -> None:
        self.emit(logging.makeLogRecord({"msg": line}))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002 -- inherited
        raise  # noqa: PLE0704 -- logging calls this while it handles an exception


def hash_ids(request: Captured, block_size: int, key: bytes) -> list[int]:
    """One number of 53 bits per block, exact in JSON, computed from all tokens up to its end."""
    ids = []
    parent = hashlib.blake2b(request.cache_salt, key=key, digest_size=8).digest()
    tokens = array("q", request.prompt_token_ids)
    block_bytes = block_size * tokens.itemsize
    prompt = tokens.tobytes()
    for start in range(0, len(prompt), block_bytes):
        block = prompt[start : start + block_bytes]
        parent = hashlib.blake2b(parent + block, key=key, digest_size=8).digest()
        ids.append(int.from_bytes(parent, "big") >> 11)
    return ids
