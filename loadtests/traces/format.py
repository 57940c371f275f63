"""Traces in files: one request per line, ordered by time. accounts/trace.py has the fields.

{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from tritium.backend.accounts.trace import TraceRequest


class TraceError(ValueError):
    """A trace can't be read; the message names file, line and what is wrong."""


class BadRow(NamedTuple):
    """A row that is not a valid request."""

    line: int  # line number, from 1
    reason: str


def check(request: TraceRequest) -> None:
    """Check that hash ids cover the prompt.

    Raises:
        ValueError: they do not.
    """
    covered = len(request.hash_ids) * request.hash_block_size
    if request.hash_ids and covered < request.input_length:
        raise ValueError(
            f"{len(request.hash_ids)} hash_ids of {request.hash_block_size} tokens cover "
            f"{covered}, but input_length is {request.input_length}"
        )


_DECODER = msgspec.json.Decoder(TraceRequest)


def parse_line(line: bytes) -> TraceRequest:
    """Read one line of a trace.

    Raises:
        ValueError: says what is wrong.
    """
    request = _DECODER.decode(line)  # its errors are ValueErrors and name the field
    check(request)
    return request


def in_order(rows: Iterable[tuple[int, TraceRequest | BadRow]]) -> Iterator[TraceRequest | BadRow]:
    """Numbered rows; a row that is earlier than the one before becomes a bad row."""
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
    """Numbered rows of a trace, in any order; empty lines are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield number, parse_line(line)
                except ValueError as error:
                    yield number, BadRow(number, str(error))


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """The requests of a trace, read one by one.

    Raises:
        TraceError: names the first bad row.
    """
    for row in in_order(read_rows(path)):
        if isinstance(row, BadRow):
            raise TraceError(f"{path}, line {row.line}: {row.reason}")
        yield row


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write a trace and return the number of its requests."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encoder = msgspec.json.Encoder()
    count = 0
    with path.open("wb") as file:
        for request in requests:
            file.write(encoder.encode(request) + b"\n")
            count += 1
    return count
