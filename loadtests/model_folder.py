"""The shipped model folder: its configuration, and servers of it with other parameters."""

import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tritium.backend.config import EngineConfig
from tritium.backend.host.serve import PACKAGE, TritonServer

_FOLDER = PACKAGE / "model_repository/smollm2"


def read_config() -> EngineConfig:
    """The configuration of the shipped model."""
    return EngineConfig.from_parameters(
        {
            name: {"string_value": value.string_value}
            for name, value in _model_config().parameters.items()
        }
    )


@contextmanager
def serve_with(
    parameters: Mapping[str, object], log: Any, model_py: str | None = None
) -> Iterator[TritonServer]:
    """A running server whose model, smollm2, has other parameters.

    Args:
        log: File for the server's output.
        model_py: Replaces the folder's model.py.
    """
    with tempfile.TemporaryDirectory() as repository:
        lay_out(Path(repository), parameters, model_py)
        http, grpc, metrics = _free_ports(3)
        with TritonServer(Path(repository), http, grpc, metrics, log=log) as server:
            yield server


def lay_out(
    repository: Path, parameters: Mapping[str, object], model_py: str | None = None
) -> None:
    """A model repository with the project's model, smollm2, and other parameters."""
    config = _model_config()
    for name, value in parameters.items():
        config.parameters[name].string_value = str(value)
    folder = repository / "smollm2"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config))
    (folder / "1/model.py").write_text(model_py or (_FOLDER / "1/model.py").read_text())


def _model_config() -> model_config_pb2.ModelConfig:
    text = (_FOLDER / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
