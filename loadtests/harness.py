"""A real Triton Server for tests and load tests: model folders, plain requests, its log."""

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import InferResult, model_config_pb2, service_pb2, service_pb2_grpc

from tritium.backend.host.serve import PACKAGE
from tritium.client.types import GenerationError

CONFIG = (PACKAGE / "model_repository/smollm2/config.pbtxt").read_text()


def write_model(repository: Path, name: str, text: str = CONFIG, **parameters: object) -> None:
    """A copy of the project's model folder with other parameters."""
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    config.name = name
    for key, value in parameters.items():
        config.parameters[key].string_value = str(value)
    version = repository / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    (repository / name / "config.pbtxt").write_text(text_format.MessageToString(config))
    (version / "model.py").write_text((PACKAGE / "model_repository/smollm2/1/model.py").read_text())


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def until(condition: Callable[[], bool], timeout: float = 20) -> None:
    """Wait until a condition is true; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.02)


@dataclass
class Server:
    """Where the server under test listens, and what its log says."""

    http_url: str  # http://host:port
    grpc_url: str  # host:port
    metrics_url: str  # http://host:port
    log: Path
    process_id: int
    model: str = "smollm2"

    def metrics(self) -> list[str]:
        """All lines of /metrics."""
        with urllib.request.urlopen(f"{self.metrics_url}/metrics", timeout=10) as response:
            return response.read().decode().splitlines()

    def metric(self, name: str, model: str | None = None, **labels: str) -> float:
        """The value of one of the engine's metrics."""
        labels["model"] = model or self.model
        for line in self.metrics():
            if line.startswith(f"tritium:{name}{{") and all(
                f'{key}="{value}"' in line for key, value in labels.items()
            ):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric tritium:{name} with {labels}")

    def http(self, path: str, body: dict[str, Any] | bytes | None = None) -> tuple[int, str]:
        """(status, body) of a GET request, or of a POST request with JSON."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
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
    code: str = ""  # gRPC status of an error, if Triton Server gave one
    error: str = ""

    @property
    def text(self) -> str:
        """The text, decoded strictly: a split character raises an error."""
        return b"".join(self.tensors["text_output"].tolist()).decode()

    def string(self, name: str) -> str:
        return self.tensors[name].item().decode()


class Stream:
    """A gRPC stream with one request.

    It uses tritonclient's stub instead of `start_stream`, so that a test has no thread to wait for.
    It does not set `triton_grpc_error`, with which Triton Server 2.51 sometimes crashes.
    """

    def __init__(
        self, url: str, request: service_pb2.ModelInferRequest, timeout: float = 120
    ) -> None:
        self._channel = grpc.insecure_channel(url)
        self._call = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelStreamInfer(
            iter([request]), timeout=timeout
        )
        self._broken = False

    def cancel(self) -> None:
        self._call.cancel()

    def next(self) -> Response:
        try:
            message = next(self._call)
        except grpc.RpcError:
            self._broken = True
            return Response({}, True, self._call.code().name, self._call.details())
        if message.error_message:
            error = GenerationError.from_message(message.error_message, "")
            return Response({}, True, error.code, error.message)
        result = InferResult(message.infer_response)
        final = message.infer_response.parameters["triton_final_response"].bool_param
        names = [output.name for output in message.infer_response.outputs]
        return Response({name: result.as_numpy(name) for name in names}, final)

    def __iter__(self) -> Iterator[Response]:
        """All responses; nothing may come after the final one.

        Reads to the end of the stream: Triton Server 2.51 can't unload a model if a stream is
        cancelled right after an error.
        """
        ended = False
        while not ended:
            response = self.next()
            yield response
            ended = response.final
        assert self._broken or next(self._call, None) is None

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self._call.cancel()
        self._channel.close()


_CONTENTS = {
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


def add_tensor(
    request: service_pb2.ModelInferRequest,
    name: str,
    datatype: str,
    values: list[Any],
    shape: list[int] | None = None,
) -> None:
    """Add an input; its shape is [number of values] by default."""
    shape = [len(values)] if shape is None else shape
    tensor = request.inputs.add(name=name, shape=shape, datatype=datatype)
    if values:
        encoded = [value.encode() if isinstance(value, str) else value for value in values]
        getattr(tensor.contents, _CONTENTS[datatype]).extend(encoded)


def send(
    server: Server,
    text: str | bytes | list[str] | None,
    *,
    model: str | None = None,
    sampling: dict[str, Any] | str | None = None,
    timeout: float = 0,
    **tensors: Any,
) -> Stream:
    """Send one request on its own gRPC stream.

    Args:
        timeout: Triton Server's request parameter, in seconds; 0: none.
    """
    tensors.setdefault("return_error_code", True)
    if text is not None:
        tensors["text_input"] = text
    if sampling is not None:
        tensors["sampling_parameters"] = (
            sampling if isinstance(sampling, str) else json.dumps(sampling)
        )
    request = service_pb2.ModelInferRequest(model_name=model or server.model)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if timeout:
        request.parameters["timeout"].int64_param = int(timeout * 1e6)
    for name, value in tensors.items():
        values = value if isinstance(value, list) else [value]
        datatype = {bool: "BOOL", int: "INT64"}.get(type(value), "BYTES")
        add_tensor(request, name, datatype, values)
    return Stream(server.grpc_url, request)


def collect(server: Server, text: str | bytes | list[str] | None, **options: Any) -> list[Response]:
    """All responses of one request."""
    with send(server, text, **options) as stream:
        return list(stream)


def complete(server: Server, text: str | None, **options: Any) -> str:
    """The whole answer, greedy by default."""
    options.setdefault("sampling", {"temperature": 0, "max_tokens": 16})
    options.setdefault("exclude_input_in_output", True)
    responses = collect(server, text, **options)
    assert not responses[-1].error, responses[-1]
    return "".join(response.text for response in responses)
