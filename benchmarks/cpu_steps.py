"""`make cpu-steps`: the cost of a decode step on CPU by kind of weights, and how it grows.

All kinds of weights step in turns in one process, so that the speed of the machine is the same for
all.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tritium.backend.config import EngineConfig
from tritium.backend.engine.engine import Engine
from tritium.backend.engine.request import EngineRequest, SampledToken
from tritium.backend.engine.sequence import ScheduledSequence
from tritium.backend.runner.model_runner import ModelRunner
from tritium.benchmarks.engine_runs import make_engine
from tritium.benchmarks.models import SMOLLM2
from tritium.kernels import cpu
from tritium.kernels.cpu import build

CONTEXT = 200  # tokens per prompt
ROUNDS = 30
_BYTES_READ = 2**30


class Kind(NamedTuple):
    name: str
    quantization: str
    in_c: bool = True  # False: PyTorch
    dtype: str = "bfloat16"


KINDS = (
    Kind("PyTorch, float32", "none", in_c=False, dtype="float32"),
    Kind("PyTorch, bfloat16", "none", in_c=False),
    Kind("bfloat16", "none"),
    Kind("int8", "int8"),
    Kind("int4", "int4"),
)


@contextmanager
def operations_of(kind: Kind) -> Iterator[None]:
    """A context in which PyTorch replaces kernels/cpu/ops.c if the kind says so."""
    library = build.library
    if not kind.in_c:
        build.library = lambda: None  # type: ignore[assignment]
    try:
        yield
    finally:
        build.library = library


def config_of(kind: Kind, **settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "kv_cache_memory": "1GiB",
        "max_num_seqs": 64,
        "quantization": kind.quantization,
        "dtype": kind.dtype,
    }
    return EngineConfig(model=SMOLLM2, **(defaults | settings))


def load(kind: Kind, config: EngineConfig) -> ModelRunner:
    """Load on a thread that ends: OpenMP keeps threads for each live thread, which slow others."""
    with operations_of(kind), ThreadPoolExecutor(1) as thread:
        return thread.submit(ModelRunner, config).result()


def decoding(config: EngineConfig, runner: ModelRunner, batch: int, context: int) -> Engine:
    """An engine whose next steps decode one token for each of `batch` sequences."""
    engine = make_engine(config, runner)
    for i in range(batch):
        prompt = random.choices(range(1000), k=context)
        engine.reserve()
        engine.submit(EngineRequest(i, prompt, max_tokens=10 * ROUNDS))
    running = engine.scheduler.running
    while len(running) < batch or any(not sequence.num_output_tokens for sequence in running):
        engine.step()  # on a CPU, steps do not overlap
    return engine


def median_steps(engines: Sequence[tuple[Kind, Engine]], rounds: int = ROUNDS) -> list[float]:
    """Seconds per step of each engine, in turns."""
    times: list[list[float]] = [[] for _ in engines]
    for _ in range(rounds):
        for (kind, engine), own in zip(engines, times, strict=True):
            with operations_of(kind):
                start = time.perf_counter()
                engine.step()
                own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times]


def read_speed() -> float:
    """Read bandwidth of all threads together, in bytes per second."""
    tensor = torch.ones(_BYTES_READ // 8, dtype=torch.int64)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        tensor.sum()
        times.append(time.perf_counter() - start)
    return _BYTES_READ / statistics.median(times)


def weight_bytes(runner: ModelRunner) -> int:
    """Bytes of the weights that a step reads."""
    model = runner.model
    weights = [part.weight for layer in model.layers for part in layer.linears] + [model.lm_head]
    return sum(
        tensor.nbytes
        for weight in weights
        for tensor in (weight if isinstance(weight, cpu.PackedWeight) else (weight,))
        if isinstance(tensor, torch.Tensor)
    )


def compare(console: Console, batches: Sequence[int] = (1, 8, 32)) -> None:
    configs = [config_of(kind) for kind in KINDS]
    runners = [load(kind, config) for kind, config in zip(KINDS, configs, strict=True)]

    def measure() -> None:
        runners[-1].start()
        speed = read_speed()
        table = Table(title=f"A step of sequences with {CONTEXT} tokens, ms (tokens/s)")
        for name in ("weights", "MB", *map(str, batches), "share of memory bandwidth, at 1"):
            table.add_column(name, justify="right")
        megabytes = [weight_bytes(runner) / 1e6 for runner in runners]
        rows = [[kind.name, f"{mb:.0f}"] for kind, mb in zip(KINDS, megabytes, strict=True)]
        for batch in batches:
            engines = []
            for kind, config, runner in zip(KINDS, configs, runners, strict=True):
                with operations_of(kind):
                    engines.append((kind, decoding(config, runner, batch, CONTEXT)))
            medians = median_steps(engines)
            for row, seconds in zip(rows, medians, strict=True):
                row.append(f"{seconds * 1000:.1f} ({batch / seconds:.0f})")
            if batch == 1:
                shares = [
                    mb * 1e6 / speed / seconds
                    for mb, seconds in zip(megabytes, medians, strict=True)
                ]
        for row, share in zip(rows, shares, strict=True):
            table.add_row(*row, f"{share:.0%}")
        console.print(f"Memory bandwidth: {speed / 1e9:.1f} GB/s")
        console.print(table)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(measure).result()


class Line(NamedTuple):
    """Least squares fit of y = intercept + slope * x."""

    intercept: float
    slope: float
    r_squared: float

    @classmethod
    def through(cls, x: Sequence[float], y: Sequence[float]) -> "Line":
        slope, intercept = np.polyfit(x, y, 1)
        residuals = np.array(y) - intercept - slope * np.array(x)
        return cls(float(intercept), float(slope), float(1 - residuals.var() / np.var(y)))


def growth(console: Console) -> None:
    """Step time against batch size, and against context length."""
    kind = Kind("bfloat16", "none")
    config = config_of(kind, kv_cache_memory="2GiB")
    runner = load(kind, config)

    def measure() -> None:
        runner.start()
        for what, points in (
            ("sequences of 256 tokens", [(b, 256) for b in (1, 2, 4, 8, 16, 32, 48, 64)]),
            ("tokens in each of 8 sequences", [(8, c) for c in (128, 512, 1024, 2048, 4096)]),
        ):
            x = [batch if context == 256 else context for batch, context in points]
            y = []
            for batch, context in points:
                engine = decoding(config, runner, batch, context)
                y.append(median_steps([(kind, engine)])[0] * 1000)
            line = Line.through(x, y)
            console.print(
                f"{what}: "
                + ", ".join(f"{a}: {b:.1f}" for a, b in zip(x, y, strict=True))
                + f" ms; line {line.intercept:.1f} + {line.slope:.4f} x, R2 {line.r_squared:.4f}"
            )

    with ThreadPoolExecutor(1) as thread:
        thread.submit(measure).result()


class _Idle:
    """A runner that computes nothing."""

    num_blocks = 2**16
    overlaps = False

    def start(self) -> None:
        pass

    def launch(self, batch: list[ScheduledSequence]) -> Callable[[], list[SampledToken]]:
        return lambda: [SampledToken(1, None) for scheduled in batch if scheduled.samples]


def bookkeeping(console: Console) -> None:
    """The engine's own time per step: schedule and update, without a model."""
    for running, waiting in ((32, 0), (64, 0), (128, 0), (256, 0), (256, 10_000)):
        settings = {"max_num_seqs": running, "max_queue_size": waiting}
        config = config_of(KINDS[-1], **settings, max_num_batched_tokens=8192)
        engine = make_engine(config, _Idle())
        for i in range(running + waiting):
            engine.reserve()
            engine.submit(EngineRequest(i, [1] * 16, max_tokens=1000))
        times = []
        for _ in range(300):
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
        milliseconds = statistics.median(times[50:]) * 1000
        console.print(f"{running} running, {waiting} waiting: {milliseconds:.3f} ms per step")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium benchmark cpu-steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    console = Console(width=140)
    random.seed(0)
    bookkeeping(console)
    compare(console)
    growth(console)


if __name__ == "__main__":
    main()
