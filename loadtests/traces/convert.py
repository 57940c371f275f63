"""Converts public traces and the server's own captures to the trace format, as a stream."""

import csv
import heapq
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tritium.backend.accounts.trace import TraceRequest
from tritium.loadtests.traces.format import (
    BadRow,
    TraceError,
    in_order,
    parse_line,
    read_rows,
    write_trace,
)

_Rows = Iterator[tuple[int, TraceRequest | BadRow]]
_MAX_REPORTED = 20
# strptime's %f accepts six digits. Azure's traces have seven, and those of 2024 a time zone.
_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(\+00:00|Z)?")


def _azure_row(timestamp: str, context: str, generated: str) -> TraceRequest:
    """AzurePublicDataset's LLM inference traces of 2023 and 2024."""
    match = _AZURE_TIME.fullmatch(timestamp)
    if not match:
        raise ValueError(f"TIMESTAMP: {timestamp!r} is not like 2023-11-16 18:17:03.9799600")
    seconds = datetime.fromisoformat(match[1]).replace(tzinfo=UTC).timestamp()
    return TraceRequest(
        seconds * 1000 + float(match[2] or 0) * 1000,
        _count("ContextTokens", context),
        _count("GeneratedTokens", generated),
    )


def _burstgpt_row(timestamp: str, request: str, response: str) -> TraceRequest:
    """BurstGPT's CSV: seconds from the start; failed requests have no response tokens."""
    try:
        seconds = float(timestamp)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"Timestamp: {timestamp!r} is not a number of seconds")
    return TraceRequest(
        seconds * 1000, _count("Request tokens", request), _count("Response tokens", response)
    )


def _count(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name}: {text!r} is not a number of tokens, which is at least 1")
    return int(text)


def _csv_rows(columns: list[str], parse: Callable[..., TraceRequest]) -> Callable[[Path], _Rows]:
    def rows(path: Path) -> _Rows:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            if missing := set(columns) - set(header):
                raise TraceError(
                    f"{path}, line 1: no column {', '.join(sorted(missing))}; the columns are "
                    f"{', '.join(columns)}"
                )
            indices = [header.index(name) for name in columns]
            while True:
                try:
                    row = next(reader)
                    if len(row) != len(header):
                        raise ValueError(f"has {len(row)} columns instead of {len(header)}")
                    request = parse(*[row[index] for index in indices])
                except StopIteration:
                    return
                except (ValueError, csv.Error) as error:
                    yield reader.line_num, BadRow(reader.line_num, str(error))
                else:
                    yield reader.line_num, request

    return rows


def _mooncake_rows(path: Path) -> _Rows:
    """Mooncake's JSON lines; unknown fields are ignored."""
    known = set(TraceRequest.__struct_fields__)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                fields: Any = msgspec.json.decode(line)
                if isinstance(fields, dict):
                    fields = {name: value for name, value in fields.items() if name in known}
                yield number, parse_line(msgspec.json.encode(fields))
            except ValueError as error:
                yield number, BadRow(number, str(error))


SOURCES: dict[str, Callable[[Path], _Rows]] = {
    "azure": _csv_rows(["TIMESTAMP", "ContextTokens", "GeneratedTokens"], _azure_row),
    "burstgpt": _csv_rows(["Timestamp", "Request tokens", "Response tokens"], _burstgpt_row),
    "mooncake": _mooncake_rows,
    "server": read_rows,  # the server's captures; a row is written when its request ends
}


def guess_source(path: Path) -> str:
    """The source format, guessed from the first line of a file.

    Raises:
        TraceError: the line has no known format.
    """
    with path.open("rb") as file:
        head = file.readline(10_000).decode("utf-8-sig", "replace")
    if "ContextTokens" in head:
        return "azure"
    if "Request tokens" in head:
        return "burstgpt"
    if '"hash_block_size"' in head:
        return "server"
    if '"hash_ids"' in head or '"input_length"' in head:
        return "mooncake"
    raise TraceError(
        f"{path}, line 1: looks like none of {', '.join(SOURCES)}; name one (--source)"
    )


def convert(
    path: Path,
    output: Path,
    source: str,
    sort: bool = False,
    skip_bad_rows: bool = False,
    report: Callable[[str], None] = print,
) -> tuple[int, int]:
    """Write a trace that starts at 0.

    Args:
        source: One of `SOURCES`.
        sort: Accept rows in any order; otherwise a row that goes back in time is bad.
        report: Called with a message for each of the first bad rows.

    Returns:
        (requests written, bad rows)

    Raises:
        TraceError: there are bad rows that are not skipped; then nothing is written.
    """
    num_bad = 0

    def good(rows: Iterable[TraceRequest | BadRow]) -> Iterator[TraceRequest]:
        nonlocal num_bad
        for row in rows:
            if isinstance(row, TraceRequest):
                yield row
                continue
            num_bad += 1
            if num_bad <= _MAX_REPORTED:
                report(f"{path}, line {row.line}: {row.reason}")

    found = SOURCES[source](path)
    requests = (
        _sorted(good(row for _, row in found))
        if sort or source == "server"
        else good(in_order(found))
    )
    partial = output.with_name(output.name + ".partial")
    try:
        count = write_trace(partial, _from_zero(requests))
        if num_bad and not skip_bad_rows:
            raise TraceError(
                f"{path}: {num_bad} of {count + num_bad} rows are bad; nothing was written "
                "(--skip-bad-rows leaves them out, --sort takes rows in any order)"
            )
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return count, num_bad


def _from_zero(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    start = None
    for request in requests:
        start = request.timestamp if start is None else start
        yield msgspec.structs.replace(request, timestamp=round(request.timestamp - start, 3))


def _sorted(requests: Iterator[TraceRequest], chunk_size: int = 50_000) -> Iterator[TraceRequest]:
    """Sort rows by time; sorted chunks are kept on disk."""
    with tempfile.TemporaryDirectory() as folder:
        chunks: list[Path] = []
        while chunk := sorted(
            (request for _, request in zip(range(chunk_size), requests, strict=False)),
            key=lambda request: request.timestamp,
        ):
            path = Path(folder) / str(len(chunks))
            write_trace(path, chunk)
            chunks.append(path)
        streams = (
            (row for _, row in read_rows(path) if isinstance(row, TraceRequest)) for path in chunks
        )
        yield from heapq.merge(*streams, key=lambda request: request.timestamp)
