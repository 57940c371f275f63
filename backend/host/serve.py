"""Runs Triton Server with a model repository: `tritium serve`.

Uses the `tritonserver` on PATH if there is one, as in the container. Otherwise the binaries come
from the PyPI package nvidia-pytriton. Its Python backend needs the stub for this Python version in
its own folder, and the shared library of the Python that runs this file.
"""

import argparse
import ctypes
import importlib.util
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tritium
from tritium.backend.host.one_model import write_repository

PACKAGE = Path(tritium.__file__).parent  # the installed package, or tritium/ of the source tree
_DRAIN_SECONDS = 30  # Triton Server's default --exit-timeout-secs


class SetupError(RuntimeError):
    """The server can't start, or has ended; the message says what to do."""


@dataclass
class TritonServer:
    """A Triton Server process. As a context manager: started and ready on entry, stopped on exit.

    Args:
        model_repository: The folder of models.
        http_port, grpc_port, metrics_port: The ports to listen on.
        arguments: Additional arguments for tritonserver.
        environment: Additional environment variables.
        log: A file for the server's output; None: this process's output.
    """

    model_repository: Path = PACKAGE / "model_repository"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    log: Any = None
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start the process without waiting until it is ready.

        Raises:
            SetupError: something that the server needs is missing, or a port is in use.
        """
        for kind in ("http", "grpc", "metrics"):
            _check_port_is_free(kind, getattr(self, f"{kind}_port"))
        command, environment = _command_and_environment()
        command += [
            f"--model-repository={self.model_repository}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            *self.arguments,
        ]
        # In its own session, so that Ctrl-C reaches it only through stop(), and stop() can kill all
        # of its processes.
        self.process = subprocess.Popen(
            command,
            env={**environment, **self.environment},
            start_new_session=True,
            stdout=self.log,
            stderr=subprocess.STDOUT if self.log else None,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 -- calls nothing that takes a lock
        )

    def wait_until_ready(self, timeout: float) -> None:
        """Block until the server reports that it and its models are ready.

        Args:
            timeout: In seconds.

        Raises:
            SetupError: the server's process has ended.
            TimeoutError: the server was not ready in time.
        """
        assert self.process
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise SetupError(
                    f"tritonserver ended with exit code {self.process.returncode}; its log says why"
                )
            try:
                with urllib.request.urlopen(
                    f"http://localhost:{self.http_port}/v2/health/ready", timeout=2
                ):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise TimeoutError(f"tritonserver was not ready within {timeout:.0f} s")

    def ready_models(self) -> list[str]:
        """The names of the models that are ready; none if the server does not tell."""
        url = f"http://localhost:{self.http_port}/v2/repository/index"
        try:
            with urllib.request.urlopen(url, data=b"", timeout=10) as response:
                index = json.load(response)
        except urllib.error.URLError:  # restricted by an argument of tritonserver
            return []
        return sorted({model["name"] for model in index if model.get("state") == "READY"})

    def stop(self, timeout: float = _DRAIN_SECONDS + 15) -> int:
        """Let the server drain and exit, then kill its remaining processes.

        Returns:
            The server's exit code; -SIGKILL if it did not exit within `timeout` seconds.
        """
        assert self.process
        try:
            self.process.terminate()
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait()

    def __enter__(self) -> "TritonServer":
        self.start()
        try:
            self.wait_until_ready(timeout=180)
        except BaseException:
            self.stop(timeout=5)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _check_port_is_free(kind: str, port: int) -> None:
    # Another server there would answer the readiness check in this one's place.
    try:
        with socket.create_connection(("localhost", port), timeout=2):
            pass
    except OSError:
        return
    raise SetupError(f"port {port} is in use; choose another one with --{kind}-port")


def _end_with_parent() -> None:
    """In the child process: receive SIGTERM when the parent ends, in whatever way."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _command_and_environment() -> tuple[list[str], dict[str, str]]:
    """The command that starts Triton Server, without its arguments, and its environment."""
    environment = dict(os.environ)
    environment.setdefault("LC_CTYPE", "C.UTF-8")  # the stub sets no locale
    # The stub uses the packages of the first python3 on PATH.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    if on_path := shutil.which("tritonserver"):
        return [on_path], environment
    package = importlib.util.find_spec("pytriton")
    if package is None or not package.submodule_search_locations:
        raise SetupError(
            "there is neither a tritonserver on PATH nor the package nvidia-pytriton, which "
            "contains one; run `make setup`"
        )
    pytriton = Path(package.submodule_search_locations[0])
    libraries = [_libpython_folder(), pytriton.parent / "nvidia_pytriton.libs"]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    server = pytriton / "tritonserver"
    backends = _lay_out_backends(server)
    return [str(server / "bin/tritonserver"), f"--backend-directory={backends}"], environment


def _lay_out_backends(server: Path) -> Path:
    """A folder with two backends: Python, with the stub for this Python version, and Tritium."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        known = ", ".join(sorted(path.name for path in stub.parents[1].iterdir()))
        raise SetupError(
            f"this Triton Server has no stub for Python {version}, only for {known}; "
            "create the environment with one of these (make setup PYTHON=python3.11)"
        )
    backends = Path(sys.prefix) / "tritonserver" / "backends"
    python = backends / "python"
    python.mkdir(parents=True, exist_ok=True)
    for source in (*(server / "backends/python").iterdir(), stub):
        target = python / source.name
        if source.is_file() and not target.exists():
            shutil.copy(source, target)
    (backends / "tritium").mkdir(exist_ok=True)
    shutil.copy(PACKAGE / "model.py", backends / "tritium")
    return backends


def _libpython_folder() -> Path:
    """The folder that has the shared library of the running Python."""
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    libdir = Path(sysconfig.get_config_var("LIBDIR"))
    folders = [libdir, libdir / str(sysconfig.get_config_var("MULTIARCH"))]
    for folder in folders:
        if (folder / name).exists():
            return folder
    package = name.split(".so")[0]
    raise SetupError(
        f"{name} is not in {' or '.join(map(str, folders))}. For the distribution's Python: "
        f"apt-get install {package} (Fedora: {package.replace('lib', '')}-libs); a Python built "
        "from source needs ./configure --enable-shared"
    )


def _greeting(server: TritonServer, models: list[str]) -> str:
    """What `tritium serve` prints once the server is ready: its models, and commands to try."""
    if not models:
        return f"\nReady at localhost:{server.http_port}.\n"
    model = "smollm2" if "smollm2" in models else models[0]
    program = Path(sys.executable).with_name("tritium")
    tritium = os.path.relpath(program) if program.exists() else "python -m tritium"
    client = "" if server.grpc_port == 8001 else f" --url localhost:{server.grpc_port}"
    client += "" if model == "smollm2" else f" --model {model}"
    return f"""
Ready. Models: {", ".join(models)}. To try:
  {tritium} chat{client}
  {tritium} generate{client} --temperature 0 "What is the capital of France?"
  curl -N localhost:{server.http_port}/v2/models/{model}/generate_stream -d \
'{{"text_input": "The capital of France is", "stream": true, "max_tokens": 32, "temperature": 0}}'
  curl localhost:{server.metrics_port}/metrics
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the server until it ends or is interrupted; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tritium serve",
        description="Run Triton Server with a model repository.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    models = parser.add_mutually_exclusive_group()
    models.add_argument(
        "--model-repository",
        type=Path,
        default=PACKAGE / "model_repository",
        metavar="FOLDER",
        help="the folder of models",
    )
    models.add_argument(
        "--model",
        default=argparse.SUPPRESS,
        help="serve one model with default parameters: a Hugging Face directory, a GGUF file, or "
        "org/name of the Hugging Face Hub, which is downloaded",
    )
    for name, port, kind in (
        ("http", 8000, "HTTP"),
        ("grpc", 8001, "gRPC"),
        ("metrics", 8002, "metrics"),
    ):
        parser.add_argument(
            f"--{name}-port", type=int, default=port, metavar="PORT", help=f"port for {kind}"
        )
    parser.add_argument(
        "arguments",
        nargs="*",
        default=argparse.SUPPRESS,
        metavar="ARGUMENT",
        help="after --: additional arguments for tritonserver",
    )
    options = vars(parser.parse_args(arguments))
    model = options.pop("model", None)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, interrupt)
    if model is None:
        return _run(TritonServer(**options))
    logging.basicConfig(format="%(message)s")
    logging.getLogger("tritium").setLevel(logging.INFO)  # tells about the download
    with tempfile.TemporaryDirectory(prefix="tritium-") as folder:
        options["model_repository"] = Path(folder)
        try:
            write_repository(Path(folder), model)
        except FileNotFoundError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 1
        return _run(TritonServer(**options))


def _run(server: TritonServer) -> int:
    """Run a server until it ends or is interrupted; returns the exit code."""
    try:
        server.start()
        server.wait_until_ready(timeout=600)
        print(_greeting(server, server.ready_models()), flush=True)
        assert server.process
        return server.process.wait()
    except (SetupError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopping after the running requests (press Ctrl-C again to stop now)", flush=True)
        return 0
    finally:
        if server.process:
            try:
                server.stop()
            except KeyboardInterrupt:
                server.stop(timeout=0)


if __name__ == "__main__":
    sys.exit(main())
