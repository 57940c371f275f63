"""Runs of the engine without a server: requests in, tokens out, at full speed."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from tritium.backend.config import EngineConfig
from tritium.backend.engine.engine import Engine, Runner
from tritium.backend.engine.request import EngineOutput, EngineRequest, SampledToken
from tritium.backend.engine.sequence import ScheduledSequence


class Work(NamedTuple):
    """A prompt, and the number of tokens to generate."""

    prompt: list[int]
    num_output_tokens: int
    temperature: float = 0.0


def nano_vllm_work(num_seqs: int = 256, longest: int = 1024) -> list[Work]:
    """The workload of nano-vllm's bench.py: the same seed, drawn in the same order."""
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, 10000) for _ in range(rng.randint(100, longest))] for _ in range(num_seqs)
    ]
    return [Work(prompt, rng.randint(100, longest), temperature=0.6) for prompt in prompts]


def random_work(prompt_lens: Sequence[int], num_output_tokens: int) -> list[Work]:
    return [Work(random.choices(range(1000), k=n), num_output_tokens) for n in prompt_lens]


def make_engine(config: EngineConfig, runner: Runner) -> Engine:
    return Engine(config, runner, on_outputs=_raise_errors)


def stepping(engine: Engine) -> Iterator[list[EngineOutput]]:
    """Make one step per item, and yield the step's outputs."""
    outputs: list[EngineOutput] = []
    engine.on_outputs = outputs.extend
    in_flight = None
    while True:
        in_flight = engine.step(in_flight)
        _raise_errors(outputs)
        yield outputs.copy()
        outputs.clear()


def _raise_errors(outputs: list[EngineOutput]) -> None:
    for output in outputs:
        if output.error:
            raise RuntimeError(output.error)


def steps(engine: Engine, work: Sequence[Work]) -> Iterator[list[EngineOutput]]:
    """Submit all requests at once, then make one step per item, and yield its outputs."""
    for i, (prompt, num_output_tokens, temperature) in enumerate(work):
        engine.reserve()
        engine.submit(EngineRequest(i, prompt, num_output_tokens, temperature=temperature, seed=i))
    num_unfinished = len(work)
    for outputs in stepping(engine):
        num_unfinished -= sum(output.finish_reason is not None for output in outputs)
        yield outputs
        if not num_unfinished:
            break
    engine.scheduler.check_integrity()


def generate(engine: Engine, work: Sequence[Work]) -> list[list[int]]:
    """The tokens of each request."""
    generated: list[list[int]] = [[] for _ in work]
    for outputs in steps(engine, work):
        for output in outputs:
            generated[output.request_id] += [token.token_id for token in output.tokens]
    assert [len(tokens) for tokens in generated] == [w.num_output_tokens for w in work]
    return generated


@dataclass(slots=True)
class StepTimes:
    """A measured step. Times in seconds."""

    num_seqs: int
    num_new_tokens: int
    num_kv_tokens: int  # tokens of its sequences, new ones included
    launched: float  # time of launch
    waited: float = 0.0  # time that the host waits for the device
    # CUDA events of start and end, on a GPU.
    events: list[torch.cuda.Event] = field(default_factory=list)


class Meter:
    """A model runner that measures the time of each step on host and device."""

    def __init__(self, runner: Runner, device: torch.device) -> None:
        self.num_blocks = runner.num_blocks
        self.overlaps = runner.overlaps
        self.steps: list[StepTimes] = []
        self._runner = runner
        self._on_gpu = device.type == "cuda"

    def start(self) -> None:
        self._runner.start()

    def launch(self, batch: list[ScheduledSequence]) -> Callable[[], list[SampledToken]]:
        step = StepTimes(
            num_seqs=len(batch),
            num_new_tokens=sum(scheduled.num_new_tokens for scheduled in batch),
            num_kv_tokens=sum(scheduled.end for scheduled in batch),
            launched=time.perf_counter(),
        )
        self.steps.append(step)
        self._record(step)
        read = self._runner.launch(batch)
        self._record(step)

        def timed_read() -> list[SampledToken]:
            start = time.perf_counter()
            tokens = read()
            step.waited = time.perf_counter() - start
            return tokens

        return timed_read

    def decode_times(self, batch: int) -> dict[str, float]:
        """The steps that decode one token for each of `batch` sequences."""
        full = [s for s in self.steps if s.num_seqs == s.num_new_tokens == batch]
        full = full[len(full) // 4 :]  # warm-up
        seconds = (full[-1].launched - full[0].launched) / (len(full) - 1)
        times = {
            "step_us": seconds * 1e6,
            "host_us": (seconds - statistics.mean(s.waited for s in full)) * 1e6,
            "tokens_per_s": batch / seconds,
            "context": statistics.mean(s.num_kv_tokens for s in full) / batch,
        }
        if self._on_gpu:
            torch.cuda.synchronize()
            # The next step's first event waits for the end of this step, so there is no gap.
            idle = sum(
                max(before.events[1].elapsed_time(after.events[0]), 0.0)
                for before, after in pairwise(full)
            )
            times["gpu_busy"] = 1 - idle / 1000 / (seconds * (len(full) - 1))
        return times

    def _record(self, step: StepTimes) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            step.events.append(event)
