"""The trace format: Mooncake's JSON lines (https://github.com/kvcache-ai/Mooncake) and some fields.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

One request a line, in order of time. Each hash id stands for `hash_block_size` tokens of the prompt
and all before them, so equal ids are equal prefixes; the last block may be part empty.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec


class TraceError(ValueError):
    """A trace can't be read; the message names file, line and what is wrong."""


class BadRow(NamedTuple):
    """A row that is no request."""

    line: int  # from 1
    reason: str


class TraceRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request of a trace; the fields behind `hash_ids` are ours."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]  # ms
    input_length: Annotated[int, msgspec.Meta(ge=1)]  # tokens
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: list[int] = []
    hash_block_size: Annotated[int, msgspec.Meta(ge=1)] = 512
    business_line: str = ""
    request_class: str = ""
    session_id: str = ""

    def check(self) -> None:
        """Refuse hash ids that don't cover the prompt.

        Raises:
            ValueError: with the numbers.
        """
        covered = len(self.hash_ids) * self.hash_block_size
        if self.hash_ids and covered < self.input_length:
            raise ValueError(
                f"{len(self.hash_ids)} hash_ids of {self.hash_block_size} tokens cover {covered}, "
                f"but input_length is {self.input_length}"
            )


_DECODER = msgspec.json.Decoder(TraceRequest)


def parse_line(line: bytes) -> TraceRequest:
    """Read one line of a trace.

    Raises:
        ValueError: what is wrong with it.
    """
    request = _DECODER.decode(line)  # its errors are ValueErrors that name the field
    request.check()
    return request


def in_order(rows: Iterable[tuple[int, TraceRequest | BadRow]]) -> Iterator[TraceRequest | BadRow]:
    """Rows by their lines; one that is earlier than the one before becomes a bad row."""
    latest = 0.0
    for line, row in rows:
        if isinstance(row, TraceRequest):
            if row.timestamp < latest:
                back = latest - row.timestamp
                yield BadRow(line, f"is {back:.3f} ms earlier than a row before it")
                continue
            latest = row.timestamp
        yield row


def read_rows(path: Path) -> Iterator[tuple[int, TraceRequest | BadRow]]:
    """The rows of a trace, in any order, by their lines. Empty lines are left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield number, parse_line(line)
                except ValueError as error:
                    yield number, BadRow(number, str(error))


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """The requests of a trace, one by one.

    Raises:
        TraceError: at the first bad row.
    """
    for row in in_order(read_rows(path)):
        if isinstance(row, BadRow):
            raise TraceError(f"{path}, line {row.line}: {row.reason}")
        yield row


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write a trace and return the number of its requests."""
    encoder = msgspec.json.Encoder()
    count = 0
    with path.open("wb") as file:
        for request in requests:
            file.write(encoder.encode(request) + b"\n")
            count += 1
    return count
