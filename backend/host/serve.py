"""Finds a Triton Server, lays out its folders, and runs it: `tritium serve`.

A `tritonserver` on PATH (the container) is used as it is. Elsewhere the binaries come from the
PyPI package nvidia-pytriton, whose Python backend needs its stub beside it and the shared library
of the very Python that runs this.
"""

import argparse
import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tritium

PACKAGE = Path(tritium.__file__).parent
_DRAIN_SECONDS = 30  # Triton Server's default --exit-timeout-secs


class SetupError(RuntimeError):
    """Something that the server needs is missing; the message says how to get it."""


@dataclass
class TritonServer:
    """A Triton Server process; a context manager that has it ready inside and gone after.

    Args:
        model_repository: Folder of models.
        http_port, grpc_port, metrics_port: Where it listens.
        arguments: More arguments for tritonserver.
        environment: More environment variables.
        log: Where its output goes; None: to this process's own.
    """

    model_repository: Path = PACKAGE / "model_repository"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    log: Any = None
    process: subprocess.Popen | None = field(default=None, init=False)

    def start(self) -> None:
        """Start the process; `wait_until_ready` tells when it serves."""
        command, environment = _command_and_environment()
        command += [
            f"--model-repository={self.model_repository}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            *self.arguments,
        ]
        # In a session of its own: Ctrl-C reaches it once, through stop(), and stop() finds
        # all of its processes.
        self.process = subprocess.Popen(
            command,
            env={**environment, **self.environment},
            start_new_session=True,
            stdout=self.log,
            stderr=subprocess.STDOUT if self.log else None,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 -- calls nothing that takes a lock
        )

    def wait_until_ready(self, timeout: float) -> None:
        """Block until the server answers that it and its models are ready.

        Raises:
            SetupError: it ended before.
            TimeoutError: it took longer.
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

    def stop(self, timeout: float = _DRAIN_SECONDS + 15) -> int:
        """Drain and end the server, and whatever is left of its processes; its exit code."""
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


def _end_with_parent() -> None:
    """In the child: be told to stop when this process ends, however it ends."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _command_and_environment() -> tuple[list[str], dict[str, str]]:
    """The command that starts a Triton Server, without its arguments, and its environment."""
    environment = dict(os.environ)
    environment.setdefault("LC_CTYPE", "C.UTF-8")  # the stub sets no locale
    # The stub takes the packages of the first python3 on PATH.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    if on_path := shutil.which("tritonserver"):
        return [on_path], environment
    package = importlib.util.find_spec("pytriton")
    if package is None or not package.submodule_search_locations:
        raise SetupError(
            "no tritonserver on PATH and no package nvidia-pytriton, which carries one; "
            "run `make setup`"
        )
    pytriton = Path(package.submodule_search_locations[0])
    libraries = [_libpython_folder(), pytriton.parent / "nvidia_pytriton.libs"]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    server = pytriton / "tritonserver"
    backends = _lay_out_backends(server)
    return [str(server / "bin/tritonserver"), f"--backend-directory={backends}"], environment


def _lay_out_backends(server: Path) -> Path:
    """A folder of backends: the Python backend with this Python's stub beside it, and Tritium."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        known = ", ".join(sorted(path.name for path in stub.parents[1].iterdir()))
        raise SetupError(
            f"this Triton Server has no stub for Python {version}, only for {known}; "
            "make the environment with one of these (make setup PYTHON=python3.11)"
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
    """Where the shared library of the running Python is."""
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


def _print_what_to_try(server: TritonServer) -> None:
    print(
        f"""
Ready. To try:
  curl -N localhost:{server.http_port}/v2/models/smollm2/generate_stream -d \
'{{"text_input": "The capital of France is", "stream": true, "max_tokens": 32, "temperature": 0}}'
  {Path(sys.executable).parent.parent.name}/bin/tritium chat --url localhost:{server.grpc_port}
  curl localhost:{server.metrics_port}/metrics
""",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tritium serve", description=__doc__)
    parser.add_argument("--model-repository", type=Path, default=PACKAGE / "model_repository")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument("arguments", nargs="*", help="more arguments for tritonserver, after --")
    options = parser.parse_args(arguments)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, interrupt)
    server = TritonServer(**vars(options))
    try:
        server.start()
        server.wait_until_ready(timeout=600)
        _print_what_to_try(server)
        assert server.process
        return server.process.wait()
    except (SetupError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopping: requests in flight may end first (again to stop at once)", flush=True)
        return 0
    finally:
        if server.process:
            try:
                server.stop()
            except KeyboardInterrupt:
                server.stop(timeout=0)


if __name__ == "__main__":
    sys.exit(main())
