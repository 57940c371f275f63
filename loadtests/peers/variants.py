"""The variants that are compared: Tritium, and the peers that are installed."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from gguf import GGMLQuantizationType

from tritium.backend.host.serve import TritonServer
from tritium.backend.runner.model_runner import ModelRunner
from tritium.backend.runner.models.loader import resolve
from tritium.client import GenerationError
from tritium.loadtests.bench import Alone, Request, served
from tritium.loadtests.model_folder import lay_out, read_config
from tritium.loadtests.peers import model_files
from tritium.loadtests.peers.jobs import Peer, PeerError, Workloads
from tritium.loadtests.results import Result

# All cores of this machine, like Tritium's engine.
_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
}
_VLLM_MODEL = """{{"model": "{model}", "dtype": "{dtype}", "max_model_len": 2048,
"max_num_seqs": 64, "enable_prefix_caching": false}}"""

# Tritium's client sends these inputs; the peer ignores them.
_VLLM_CONFIG = """
backend: "python"
instance_group [ { count: 1, kind: KIND_MODEL } ]
input [
  { name: "return_usage" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "return_error_code" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
"""


class Variant(Protocol):
    """An engine or server that can serve a workload."""

    name: str
    version: str

    def measure(self, workload: str, num_requests: int, concurrency: int) -> Result: ...

    def freeze(self) -> None:
        """Stop its processes, so that it takes no time from others between its cells."""

    def thaw(self) -> None: ...

    def stop(self) -> None: ...


class Engine:
    """Tritium's engine, in this process."""

    version = "here"

    def __init__(
        self, name: str, workloads: dict[str, list[Request]], quantization: str = "none"
    ) -> None:
        self.name = name
        self._workloads = workloads
        config = read_config().model_copy(update={"quantization": quantization})
        with ThreadPoolExecutor(1) as pool:  # see bench.py
            runner = pool.submit(ModelRunner, config).result()
        reusing = config.model_copy(update={"prefix_cache": "on"})
        self._uniform, self._reusing = Alone(config, runner), Alone(reusing, runner)

    def measure(self, workload: str, num_requests: int, concurrency: int) -> Result:
        alone = self._uniform if workload == "uniform" else self._reusing
        result = alone.continuous(self._workloads[workload][:num_requests], concurrency)
        result.variant, result.workload = self.name, workload
        return result

    def freeze(self) -> None:
        pass

    thaw = stop = freeze


class Server:
    """A model named smollm2 behind Triton Server, streamed over gRPC."""

    version = "here"

    def __init__(
        self, name: str, workloads: dict[str, list[Request]], log: Path, server: TritonServer
    ) -> None:
        self.name = name
        self._workloads = workloads
        self._server = server
        with log.open("wb") as output:
            server.log = output
            server.start()
        try:
            server.wait_until_ready(timeout=600)
            served(server, workloads["uniform"][:2], 2)  # warm-up
        except BaseException:
            self.stop()
            raise

    def measure(self, workload: str, num_requests: int, concurrency: int) -> Result:
        result = served(self._server, self._workloads[workload][:num_requests], concurrency)
        result.variant, result.workload = self.name, workload
        return result

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        self.thaw()
        self._server.stop(timeout=5)

    def _signal(self, number: int) -> None:
        assert self._server.process
        try:
            os.killpg(self._server.process.pid, number)
        except ProcessLookupError:
            pass  # it has ended; the next request to it reports that


@contextmanager
def started(
    names: Sequence[str], workloads: dict[str, list[Request]], folder: Path, port: int
) -> Iterator[list[Variant]]:
    """Start the named variants, frozen. A variant that can't start is reported and left out."""
    shipped = resolve(read_config().model)
    plain: Workloads = {
        name: [(request.token_ids, request.num_output_tokens) for request in requests]
        for name, requests in workloads.items()
    }

    def vllm() -> Variant:
        model = model_files.hugging_face(shipped, folder)
        settings = {"model": str(model), "dtype": _vllm_dtype()}
        python = _python("vllm")
        return Peer("vllm", python, "run_vllm.py", settings, plain, folder, _VLLM_ENVIRONMENT)

    def openvino(weights: str) -> Variant:
        python = _python("openvino")
        model = model_files.openvino_ir(
            model_files.hugging_face(shipped, folder),
            folder,
            python.parent / "optimum-cli",
            "int8" if weights == "int8" else "fp16",
        )
        name, settings = f"openvino {weights}", {"model": str(model)}
        return Peer(name, python, "run_openvino.py", settings, plain, folder)

    def llamacpp(weights: str, own_port: int) -> Variant:
        python = _python("llamacpp")
        kind = GGMLQuantizationType[weights.upper()]
        settings = {
            "model": str(model_files.gguf_file(shipped, folder, kind)),
            "binary": os.environ.get("LLAMA_SERVER"),
            "port": own_port,
        }
        return Peer(f"llama.cpp {weights}", python, "run_llamacpp.py", settings, plain, folder)

    def vllm_backend(own_port: int) -> Variant:
        model = model_files.hugging_face(shipped, folder)
        repository = _lay_out_vllm_backend(folder / "vllm-backend", model)
        python = _python("vllm-backend")
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, **_VLLM_ENVIRONMENT}
        ports = (own_port, own_port + 1, own_port + 2)
        server = TritonServer(repository, *ports, environment=environment)
        return Server("vllm backend", workloads, folder / "vllm-backend.log", server)

    def ours() -> Variant:
        repository = folder / "ours"
        shutil.rmtree(repository, ignore_errors=True)  # left by an earlier run
        # Prompts are repeated and must be computed again.
        lay_out(repository, {"prefix_cache": "off"})
        server = TritonServer(repository, port, port + 1, port + 2)
        return Server("server", workloads, folder / "server.log", server)

    makers: dict[str, Callable[[], Variant]] = {
        "engine": lambda: Engine("engine", workloads),
        "engine int8": lambda: Engine("engine int8", workloads, "int8"),
        "server": ours,
        "vllm": vllm,
        "vllm backend": lambda: vllm_backend(port + 3),
        "openvino int8": lambda: openvino("int8"),
        "openvino bf16": lambda: openvino("bf16"),
        "llama.cpp q8_0": lambda: llamacpp("q8_0", port + 6),
        "llama.cpp bf16": lambda: llamacpp("bf16", port + 7),
    }
    variants: list[Variant] = []
    try:
        for name in names:
            try:
                variant = makers[name]()
            except (PeerError, GenerationError, OSError, RuntimeError, AssertionError) as error:
                print(f"without {name}: {error}", flush=True)
                continue
            variants.append(variant)
            variant.freeze()
            print(f"{name}: {variant.version}", flush=True)
        yield variants
    finally:
        for variant in variants:
            variant.stop()


VARIANTS = (
    *("engine", "engine int8", "server", "vllm", "vllm backend"),
    *("openvino int8", "openvino bf16", "llama.cpp q8_0", "llama.cpp bf16"),
)


def _python(peer: str) -> Path:
    """The interpreter of a peer's environment, which is beside Tritium's."""
    python = Path(f"{sys.prefix}-{peer}") / "bin" / "python"
    if not python.exists():
        raise PeerError(f"no {python}")
    return python


def _vllm_dtype() -> str:
    return os.environ.get("VLLM_DTYPE", "bfloat16")


def _lay_out_vllm_backend(repository: Path, model: Path) -> Path:
    source = os.environ.get("VLLM_BACKEND")
    if not source or not (Path(source) / "model.py").exists():
        raise PeerError("VLLM_BACKEND names no folder with the model.py of vLLM's Triton backend")
    shutil.rmtree(repository, ignore_errors=True)  # left by an earlier run
    version = repository / "smollm2" / "1"
    version.mkdir(parents=True)
    for path in Path(source).iterdir():
        (version / path.name).symlink_to(path.resolve())
    model_json = _VLLM_MODEL.format(model=model, dtype=_vllm_dtype())
    (version / "model.json").write_text(model_json)
    (version.parent / "config.pbtxt").write_text(_VLLM_CONFIG)
    return repository
