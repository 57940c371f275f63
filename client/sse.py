"""Server-sent events: lines of a response body in, the data of each event out."""

from collections.abc import Iterable, Iterator


def parse_events(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield each event's data. Only whole lines are decoded, so no character is ever split."""
    data: list[str] = []
    for line in lines:
        text = line.decode().rstrip("\r\n")
        if text.startswith("data:"):
            data.append(text.removeprefix("data:").removeprefix(" "))
        elif not text and data:
            yield "\n".join(data)
            data.clear()
    if data:  # the last event may lack its empty line
        yield "\n".join(data)
