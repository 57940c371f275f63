"""A real Triton Server for tests: model folders made from the project's own, and plain requests."""

import json
import queue
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from backend.serve import ROOT

CONFIG = (ROOT / "model_repository/smollm2/config.pbtxt").read_text()


def write_model(repository: Path, name: str, text: str = CONFIG, **parameters: object) -> None:
    """A copy of the project's model folder with other parameters."""
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    config.name = name
    for key, value in parameters.items():
        config.parameters[key].string_value = str(value)
    version = repository / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    (repository / name / "config.pbtxt").write_text(text_format.MessageToString(config))
    (version / "model.py").write_text((ROOT / "model_repository/smollm2/1/model.py").read_text())


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@dataclass
class Server:
    """Where the server under test listens, and what its log says."""

    http_url: str  # http://host:port
    grpc_url: str  # host:port
    metrics_url: str  # http://host:port
    log: Path
    process_id: int
    model: str = "smollm2"

    def metric(self, name: str, model: str | None = None, **labels: str) -> float:
        """The value of one of the engine's metrics."""
        labels["model"] = model or self.model
        text = urllib.request.urlopen(f"{self.metrics_url}/metrics", timeout=10).read().decode()
        for line in text.splitlines():
            if line.startswith(f"tritium:{name}{{") and all(
                f'{key}="{value}"' in line for key, value in labels.items()
            ):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric tritium:{name} with {labels}")

    def http(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """(status, body) of a GET, or of a POST of JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.http_url}/v2/{path}", data=data)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@dataclass
class Response:
    """One gRPC response: decoded tensors and whether it was marked final."""

    tensors: dict[str, np.ndarray]
    final: bool
    error: InferenceServerException | None = None

    @property
    def text(self) -> str:
        """Decoded strictly: a split character raises."""
        return b"".join(self.tensors["text_output"].tolist()).decode()

    def string(self, name: str) -> str:
        return self.tensors[name].item().decode()


@dataclass
class Stream:
    """A gRPC stream with one request on it."""

    client: grpcclient.InferenceServerClient
    responses: queue.Queue = field(default_factory=queue.Queue)

    def cancel(self) -> None:
        self.client.stop_stream(cancel_requests=True)

    def next(self, timeout: float = 120) -> Response:
        result, error = self.responses.get(timeout=timeout)
        if error is not None:
            return Response({}, True, error)
        header = result.get_response()
        final = header.parameters["triton_final_response"].bool_param
        tensors = {output.name: result.as_numpy(output.name) for output in header.outputs}
        return Response(tensors, final)

    def __iter__(self) -> Iterator[Response]:
        """Responses up to the final one."""
        while True:
            response = self.next()
            yield response
            if response.final:
                return

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


def tensor(name: str, value: Any) -> grpcclient.InferInput:
    """An input tensor from a bool, text, bytes or a list of texts."""
    if isinstance(value, bool):
        array, kind = np.array([value]), "BOOL"
    else:
        values = value if isinstance(value, list) else [value]
        encoded = [v.encode() if isinstance(v, str) else v for v in values]
        array, kind = np.array(encoded, dtype=np.object_), "BYTES"
    result = grpcclient.InferInput(name, array.shape, kind)
    result.set_data_from_numpy(array)
    return result


def send(
    server: Server,
    text: str | bytes | None,
    *,
    model: str | None = None,
    sampling: dict[str, Any] | str | None = None,
    parameters: dict[str, Any] | None = None,
    **tensors: Any,
) -> Stream:
    """Send one request on a gRPC stream of its own."""
    if text is not None:
        tensors["text_input"] = text
    if sampling is not None:
        tensors["sampling_parameters"] = (
            sampling if isinstance(sampling, str) else json.dumps(sampling)
        )
    stream = Stream(grpcclient.InferenceServerClient(server.grpc_url))
    stream.client.start_stream(
        lambda result, error: stream.responses.put((result, error)),
        headers={"triton_grpc_error": "true"},  # errors with their codes
    )
    stream.client.async_stream_infer(
        model or server.model,
        [tensor(name, value) for name, value in tensors.items()],
        parameters=parameters,
        enable_empty_final_response=True,
    )
    return stream


def collect(server: Server, text: str | bytes | None, **options: Any) -> list[Response]:
    """All responses of one request."""
    with send(server, text, **options) as stream:
        return list(stream)


def complete(server: Server, text: str, **options: Any) -> str:
    """The whole answer, greedy unless told otherwise."""
    options.setdefault("sampling", {"temperature": 0, "max_tokens": 16})
    options.setdefault("exclude_input_in_output", True)
    responses = collect(server, text, **options)
    assert responses[-1].error is None, responses[-1].error
    return "".join(response.text for response in responses)


def until(condition: Callable[[], bool], timeout: float = 20) -> None:
    """Wait for a condition that must come true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.02)
