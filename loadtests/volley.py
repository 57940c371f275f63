"""Sends many requests within milliseconds, by a client that is not the bottleneck.

With a thread and a gRPC stream per request, a Python client needs longer to send 160 requests than
a server needs to refuse them. Here each request has an open connection and one `send`, and a single
thread waits for all answers.
"""

import io
import json
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import cast
from urllib.parse import urlsplit

from tritium.client import Delta
from tritium.client.request import request_fields
from tritium.client.sse import parse_events


@dataclass(slots=True)
class Answer:
    """One answer; times are time.perf_counter() in seconds."""

    start: float
    first: float = 0.0  # time of the first event or error
    end: float = 0.0
    deltas: list[Delta] = field(default_factory=list)
    error: str = ""


def volley(
    url: str,
    prompts: Sequence[str],
    max_tokens: int,
    interval: float = 0,
    timeout: float = 300,
    model: str = "smollm2",
) -> list[Answer]:
    """Send one request per prompt, each for `max_tokens` tokens; return the answers in order.

    Args:
        url: http://host:port
        interval: Seconds between requests; 0: all at once.

    Raises:
        TimeoutError: an answer was not complete in time.
    """
    host, port = urlsplit(url).hostname, urlsplit(url).port
    path = f"/v2/models/{model}/generate_stream"
    requests = [_request(f"{host}:{port}", path, prompt, max_tokens) for prompt in prompts]
    connections = [socket.create_connection((host, port)) for _ in prompts]
    received = [bytearray() for _ in prompts]
    answers: list[Answer] = []
    num_open = len(prompts)
    with selectors.DefaultSelector() as selector:
        begin = time.perf_counter()
        while num_open:
            now = time.perf_counter()
            if len(answers) < len(prompts) and now >= begin + len(answers) * interval:
                connection = connections[len(answers)]
                selector.register(connection, selectors.EVENT_READ, len(answers))
                connection.sendall(requests[len(answers)])
                answers.append(Answer(now))
                continue
            if now > begin + timeout:
                raise TimeoutError(f"{num_open} answers are not complete")
            is_sending = len(answers) < len(prompts)
            for key, _ in selector.select(interval / 4 if is_sending else timeout):
                i, moment = key.data, time.perf_counter()
                piece = connections[i].recv(2**16)
                received[i] += piece
                if not answers[i].first and b"data:" in received[i]:
                    answers[i].first = moment
                if not piece:
                    answers[i].end = moment
                    selector.unregister(connections[i])
                    connections[i].close()
                    num_open -= 1
    for answer, raw in zip(answers, received, strict=True):
        _read(answer, bytes(raw))
    return answers


def _request(host: str, path: str, prompt: str, max_tokens: int) -> bytes:
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    body = json.dumps(request_fields(prompt, sampling=sampling)).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _read(answer: Answer, raw: bytes) -> None:
    response = HTTPResponse(cast(socket.socket, _Bytes(raw)))
    response.begin()
    for event in parse_events(response):
        outputs = json.loads(event)
        if "error" in outputs:
            answer.error = outputs["error"]
        else:
            answer.deltas.append(Delta.from_outputs(outputs))


class _Bytes:
    """The part of a socket that HTTPResponse needs."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(io.BytesIO(self._raw))
