"""`make bench`: what the engine gains and what Triton Server costs, measured in one run.

    (a) engine   the engine alone, in this process
    (b) server   the same engine behind Triton Server, streamed over gRPC by this process
    (c) static   the same engine with static batching, as in transformers' `generate`: a batch
                 starts full, and every row is computed until the longest one ends
    (d) hf       transformers' `generate`, one request at a time, in the same dtype

Workload: 64 requests with prompts of 32-256 and answers of 16-192 tokens, both uniform, seeded,
with forced lengths. The loop is closed: `concurrency` requests are in flight, and the next one
starts when one ends. The long-tailed workload: 128 requests at once, 90 % of the answers have 8-32
tokens, 10 % have 256.

Each cell is measured once per round, the variants in turns. Slow cells that no ratio uses are
measured once. At the end the server is measured with and without ledger and metrics (overhead.py).
"""

import argparse
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from transformers.generation.streamers import BaseStreamer

from tritium.backend.config import EngineConfig
from tritium.backend.engine.engine import Engine, EngineStats
from tritium.backend.engine.request import EngineOutput, EngineRequest
from tritium.backend.front.tokenizer import Tokenizer
from tritium.backend.host.serve import TritonServer
from tritium.backend.runner.model_runner import ModelRunner
from tritium.backend.runner.models.loader import resolve
from tritium.client import GrpcClient
from tritium.loadtests.model_folder import read_config, serve_with
from tritium.loadtests.overhead import read_turns, serve_in_turns, verdict
from tritium.loadtests.results import Goal, Result, report, save
from tritium.loadtests.transformers_model import transformers_model

CONCURRENCY = (1, 8, 32)
STATIC_BATCH = 32  # batch size for the long-tailed workload


class Request(NamedTuple):
    """A request of forced lengths; its prompt as token ids and as the text of exactly these ids."""

    token_ids: list[int]
    text: str
    num_output_tokens: int


class Prompts:
    """Draws prompts with an exact number of tokens, from words of one token each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = [
            word
            for word in (tokenizer.decode_token(i) for i in range(1000, 20000))
            if word.startswith(" ") and word[1:].isascii() and word[1:].isalpha()
        ]

    def draw(self, rng: random.Random, num_tokens: int) -> tuple[list[int], str]:
        text = "".join(rng.choices(self._words, k=num_tokens))
        token_ids = self._tokenizer.encode(text)
        assert len(token_ids) == num_tokens
        return token_ids, text


def uniform_workload(prompts: Prompts) -> list[Request]:
    rng = random.Random(0)
    return [
        Request(*prompts.draw(rng, rng.randint(32, 256)), rng.randint(16, 192)) for _ in range(64)
    ]


def long_tailed_workload(prompts: Prompts) -> list[Request]:
    rng = random.Random(1)
    lengths = [256] * 13 + [rng.randint(8, 32) for _ in range(115)]
    rng.shuffle(lengths)
    return [Request(*prompts.draw(rng, rng.randint(32, 64)), length) for length in lengths]


def short_workload(prompts: Prompts) -> list[Request]:
    rng = random.Random(2)
    return [
        Request(*prompts.draw(rng, rng.randint(32, 64)), rng.randint(16, 48)) for _ in range(96)
    ]


class Alone:
    """The engine without server or threads.

    Args:
        on_step: Called with the engine's state after each step.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        on_step: Callable[[EngineStats], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._runner = runner
        self._on_step = on_step

    def continuous(
        self, requests: list[Request], concurrency: int, variant: str = "engine"
    ) -> Result:
        result = Result(variant, concurrency)
        self._run(result, requests, requests, concurrency)
        return result

    def static(self, requests: list[Request], batch_size: int) -> Result:
        """Static batches: all rows run to the longest; only the requested tokens count."""
        result = Result("static", batch_size)
        for i in range(0, len(requests), batch_size):
            batch = requests[i : i + batch_size]
            longest = max(request.num_output_tokens for request in batch)
            padded = [request._replace(num_output_tokens=longest) for request in batch]
            self._run(result, batch, padded, batch_size)
        return result

    def _run(self, result: Result, *arguments: Any) -> None:
        # On a separate thread, because `start` binds it to a core. The thread ends with the run,
        # since OpenMP's threads go to sleep sooner if there are more of them than cores.
        with ThreadPoolExecutor(1, initializer=self._runner.start) as thread:
            thread.submit(self._run_here, result, *arguments).result()

    def _run_here(
        self, result: Result, asked: list[Request], computed: list[Request], concurrency: int
    ) -> None:
        """Compute requests in a closed loop; count at most the requested tokens of each."""
        config = self._config.model_copy(update={"max_num_seqs": concurrency})
        outputs: list[EngineOutput] = []
        engine = Engine(config, self._runner, outputs.extend)
        moments: dict[int, list[float]] = {}  # request id: start, then each token
        waiting = iter(range(len(computed)))

        def submit_next() -> None:
            if (i := next(waiting, None)) is not None:
                engine.reserve()
                moments[i] = [time.perf_counter()]
                request = computed[i]
                engine.submit(EngineRequest(i, request.token_ids, request.num_output_tokens))

        begin = time.perf_counter()
        for _ in range(concurrency):
            submit_next()
        unfinished = len(computed)
        in_flight = None
        while unfinished:
            in_flight = engine.step(in_flight)
            now = time.perf_counter()
            self._on_step(engine.stats())
            for output in outputs:
                assert not output.error, output.error
                moments[output.request_id] += [now] * len(output.tokens)
                if output.finish_reason:
                    unfinished -= 1
                    submit_next()
            outputs.clear()
        result.seconds += time.perf_counter() - begin
        for i, (start, *tokens) in moments.items():
            num_tokens = asked[i].num_output_tokens
            result.add(start, tokens[0], tokens[num_tokens - 1], num_tokens)


def served(server: TritonServer, requests: list[Request], concurrency: int) -> Result:
    """Through Triton Server: one client, one thread per request in flight.

    The client's threads have a low priority, since in production they run on another machine.
    """
    result = Result("server", concurrency)
    client = GrpcClient(f"localhost:{server.grpc_port}")
    waiting = iter(requests)
    lock = threading.Lock()

    def next_request() -> Request | None:
        with lock:
            return next(waiting, None)

    def run() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while request := next_request():
            sampling = {
                "temperature": 0,
                "max_tokens": request.num_output_tokens,
                "ignore_eos": True,
            }
            start = time.perf_counter()
            first, num_tokens = 0.0, 0
            with client.stream(request.text, sampling=sampling) as stream:
                for delta in stream:
                    first = first or time.perf_counter()
                    num_tokens += delta.num_output_tokens
            end = time.perf_counter()
            assert num_tokens == request.num_output_tokens
            with lock:
                result.add(start, first, end, num_tokens)

    begin = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        threads = [pool.submit(run) for _ in range(concurrency)]
    result.seconds = time.perf_counter() - begin
    for thread in threads:
        thread.result()  # raises the error of a request, if any
    return result


class _Moments(BaseStreamer):
    """The time of each token of `generate`, which delivers the prompt first."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002 -- as in BaseStreamer
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        pass


def transformers_one_by_one(path: Path, dtype: torch.dtype, requests: list[Request]) -> Result:
    model = transformers_model(path, dtype)
    result = Result("hf", 1)
    begin = time.perf_counter()
    for request in requests:
        streamer = _Moments()
        input_ids = torch.tensor([request.token_ids])
        start = time.perf_counter()
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=request.num_output_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=streamer,
        )
        _, first, *rest = streamer.moments
        result.add(start, first, rest[-1], request.num_output_tokens)
    result.seconds = time.perf_counter() - begin
    return result


def measure(num_single_requests: int, num_rounds: int, log: Path) -> Iterator[Result]:
    config = read_config()
    path = resolve(config.model)
    prompts = Prompts(Tokenizer(path))
    uniform, long_tailed = uniform_workload(prompts), long_tailed_workload(prompts)
    # Load on a thread that ends, since OpenMP keeps threads for each live thread.
    with ThreadPoolExecutor(1) as pool:
        runner = pool.submit(ModelRunner, config).result()
    alone = Alone(config, runner)
    with (
        log.open("wb") as output,
        # Prompts are repeated and must be computed again.
        serve_with({"prefix_cache": "off"}, output) as server,
    ):
        served(server, uniform[:2], 2)  # warm-up
        for i in range(num_rounds):
            for concurrency in CONCURRENCY:
                # At concurrency 1 all requests run alike, so a few of them suffice.
                requests = uniform[:num_single_requests] if concurrency == 1 else uniform
                yield replace(alone.continuous(requests, concurrency), round=i)
                yield replace(served(server, requests, concurrency), round=i)
                # The slowest variant; no goal uses it at 8, so it is measured once there.
                if concurrency == STATIC_BATCH or (concurrency > 1 and i == 0):
                    yield replace(alone.static(requests, concurrency), round=i)
            for result in (
                alone.continuous(long_tailed, STATIC_BATCH),
                alone.continuous(long_tailed, len(long_tailed)),
                alone.static(long_tailed, STATIC_BATCH),
            ):
                yield replace(result, workload="long-tailed", round=i)
    # Ten times slower than everything else, so it is measured once.
    yield transformers_one_by_one(path, runner.model.dtype, uniform[:num_single_requests])


def measure_bill(seconds: float, log: Path) -> str:
    """The cost of billing as one line of text, with short requests, so that many are billed."""
    requests = short_workload(Prompts(Tokenizer(resolve(read_config().model))))
    with log.open("wb") as output, tempfile.TemporaryDirectory() as directory:
        with serve_in_turns(Path(directory), output) as (server, turns):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                served(server, requests, 32)
        return verdict(read_turns(turns))


def goals() -> list[Goal]:
    engine, longest = ("uniform", "engine", 32), ("long-tailed", "static", STATIC_BATCH)
    return [
        Goal("server / engine at 32", ("uniform", "server", 32), engine, 0.85),
        Goal("engine / static at 32", engine, ("uniform", "static", 32), 1.3),
        Goal("engine at 32 / transformers", engine, ("uniform", "hf", 1), 10),
        Goal("long-tailed, engine / static", ("long-tailed", "engine", 128), longest, 3),
        Goal("  with no more rows than static", ("long-tailed", "engine", 32), longest, 1),
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium loadtest bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--single-requests",
        type=int,
        default=8,
        help="number of requests at concurrency 1, of 64; default: %(default)s",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="measurements per cell; default: %(default)s"
    )
    parser.add_argument(
        "--bill-seconds",
        type=float,
        default=120,
        help="duration of the measurement of billing; default: %(default)s",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("results/bench.json"), help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    options.output.parent.mkdir(exist_ok=True)
    console = Console()
    results: list[Result] = []
    log = options.output.with_suffix(".log")
    for result in measure(options.single_requests, options.rounds, log):
        results.append(result)
        save(options.output, results)
        console.print(*result.cell, f"{result.tokens_per_second:.1f} tokens/s")
    report(console, results, goals())
    log = options.output.with_name("bench-bill.log")
    console.print(measure_bill(options.bill_seconds, log), highlight=False)


if __name__ == "__main__":
    main()
