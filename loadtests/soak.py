"""A soak test: ten thousand requests of all kinds, with failing steps.

    make soak ARGS="--minutes 20 --requests 10000"

Clients ask, cancel, disconnect, send invalid requests, set deadlines, read slowly. Some steps fail,
some find no memory (`faults.py`). At the end the server is stopped while streams are open. It is
checked that each request has ended exactly once, that no block is held, that memory is flat, and
that greedy answers are the same as alone. The exit code is 1 if a check fails.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tritium.backend.host.serve import TritonServer
from tritium.client import GenerationError, GrpcClient, HttpClient
from tritium.kernels import cpu
from tritium.loadtests.faults import FAILS, MODEL_PY, NO_MEMORY
from tritium.loadtests.harness import Server, free_ports, write_model

MODEL = "soaked"
NUM_CLIENTS = 24
MAX_TOKENS = 24
LIMITS: dict[str, Any] = {
    # Answers must not depend on other requests. The C operations ensure it, float32 nearly.
    "dtype": "auto" if cpu.is_available() else "float32",
    "kv_cache_memory": "24MiB",  # without reserve, some sequences are preempted
    "reserve_blocks_per_seq": 0,
    "max_num_seqs": 16,
    "max_queue_size": 64,
    "max_queue_delay_ms": 300_000,
    "max_model_len": 2048,
    "drain_seconds": 3,
}
OPENINGS = [
    "The capital of France is",
    "Once upon a time",
    "To make bread",
    "The number after 41 is",
]


class Soak:
    """The clients, and the outcomes of their requests."""

    def __init__(self, server: Server, seconds: float, num_requests: int) -> None:
        self.server = server
        self.grpc = GrpcClient(server.grpc_url, model=MODEL)
        self.http = HttpClient(server.http_url, model=MODEL)
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.resident: list[int] = []  # bytes, one sample per second
        self.prompts = [
            f"{opening}{' and' * length}" for opening in OPENINGS for length in (0, 60, 200)
        ]
        self.expected: dict[str, str] = {}
        self._seconds = seconds
        self._until = 0.0
        self._numbers = itertools.count()
        self._num_requests = num_requests
        self._lock = threading.Lock()
        self.num_sent = 0

    def learn(self) -> None:
        """Get the answer to each prompt alone."""
        for prompt in self.prompts:
            self.expected[prompt] = self.grpc.generate(prompt, sampling=greedy(MAX_TOKENS)).text
            self.num_sent += 1

    def run(self) -> None:
        self._until = time.monotonic() + self._seconds
        clients = [threading.Thread(target=self._client, args=[i]) for i in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        processes = [psutil.Process(self.server.process_id)]
        processes += processes[0].children(recursive=True)
        while any(client.is_alive() for client in clients):
            self.resident.append(sum(process.memory_info().rss for process in processes))
            time.sleep(1)
            if time.monotonic() > self._until + 120:
                self.problems.append("a request hangs: 120 s after the last one was sent")
                return

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        actions: list[tuple[float, Callable[[random.Random], str]]] = [
            (60, self._ask),
            (10, self._cancel),
            (8, self._hang_up),
            (8, self._send_nonsense),
            (4, self._hurry),
            (4, self._expire),
            (3, self._read_slowly),
            (3, self._find_no_memory),
            (2, self._fail),
        ]
        weights = [weight for weight, _ in actions]
        while time.monotonic() < self._until and next(self._numbers) < self._num_requests:
            (_, action), *_ = rng.choices(actions, weights)
            try:
                outcome = action(rng)
            except GenerationError as error:
                outcome = f"{action.__name__.strip('_')}: {error.code}"
                if action != self._fail or "injected" not in error.message:
                    self.problems.append(f"{action.__name__}: {error}")
            except Exception as error:  # noqa: BLE001 -- a problem that the soak reports
                outcome = "broken"
                self.problems.append(f"{action.__name__}: {error!r}")
            with self._lock:
                self.outcomes[outcome] += 1
                self.num_sent += 1

    def _ask(self, rng: random.Random, seconds: float = 0, **more: int) -> str:
        """Read a whole answer, and compare it with the answer alone."""
        prompt, num_tokens = rng.choice(self.prompts), rng.randrange(4, MAX_TOKENS)
        client = rng.choice([self.grpc, self.http])
        texts, num_output_tokens = [], 0
        with client.stream(prompt, sampling=greedy(num_tokens) | more, timeout=100) as stream:
            for delta in stream:
                texts.append(delta.text)
                num_output_tokens += delta.num_output_tokens
                time.sleep(seconds)
        text = "".join(texts)
        if num_output_tokens != num_tokens or not self.expected[prompt].startswith(text):
            self.problems.append(f"{prompt[:30]!r}, {num_tokens} tokens: {text!r}")
        return "answered"

    def _read_slowly(self, rng: random.Random) -> str:
        self._ask(rng, seconds=0.2)
        return "answered slowly"

    def _find_no_memory(self, rng: random.Random) -> str:
        self._ask(rng, seed=NO_MEMORY)
        return "answered without memory"

    def _cancel(self, rng: random.Random) -> str:
        with self.grpc.stream(rng.choice(self.prompts), sampling=greedy(500)) as stream:
            for _ in range(rng.randrange(1, 16)):
                next(stream)
        return "cancelled"

    def _hang_up(self, rng: random.Random) -> str:
        body = {"text_input": rng.choice(self.prompts), "stream": True, **greedy(500)}
        request = urllib.request.Request(
            f"{self.server.http_url}/v2/models/{MODEL}/generate_stream", json.dumps(body).encode()
        )
        try:
            with urllib.request.urlopen(request, timeout=100) as response:
                for _ in range(rng.randrange(1, 10)):
                    response.readline()
        except urllib.error.HTTPError as error:
            raise GenerationError("INTERNAL", error.read().decode()) from error
        return "hung up"

    def _send_nonsense(self, rng: random.Random) -> str:
        wrong: dict[str, Any] = rng.choice(
            [
                {"temperature": -1},
                {"max_tokens": "many"},
                {"no_such": 1},
                {"top_p": 2},
                {"seed": "x"},
            ]
        )
        try:
            rng.choice([self.grpc, self.http]).generate("?", sampling=wrong)
        except GenerationError as error:
            if error.code == "INVALID_ARGUMENT":
                return "refused as wrong"
            raise
        raise AssertionError(f"{wrong} was accepted")

    def _hurry(self, rng: random.Random) -> str:
        try:
            self.grpc.generate(
                rng.choice(self.prompts), sampling=greedy(500), timeout=rng.uniform(0.2, 2)
            )
        except TimeoutError:
            return "timed out"
        return "answered in time"

    def _expire(self, rng: random.Random) -> str:
        try:
            self.grpc.generate(
                rng.choice(self.prompts), sampling=greedy(500), deadline_ms=rng.randrange(200, 2000)
            )
        except GenerationError as error:
            if error.code == "UNAVAILABLE" and "deadline" in error.message:
                return "expired"
            raise
        return "answered in time"

    def _fail(self, rng: random.Random) -> str:  # noqa: ARG002 -- like the other actions
        self.grpc.generate("Fail", sampling={"seed": FAILS})
        raise AssertionError("a step did not fail")

    # -- the end --

    def check(self) -> None:
        deadline = time.monotonic() + 30
        while self._held() and time.monotonic() < deadline:
            time.sleep(0.2)
        if held := self._held():
            self.problems.append(f"still held: {held}")
        ended = sum(
            float(line.rsplit(" ", 1)[1])
            for line in self.server.metrics()
            if line.startswith("tritium:requests_total{")
        )
        # A client with a short timeout may have left before the server read its request.
        if not self.num_sent - self.outcomes["timed out"] <= ended <= self.num_sent:
            self.problems.append(f"{self.num_sent} requests were sent, {ended:.0f} have ended")
        if abs(self.growth - 1) > 0.05:
            self.problems.append(f"memory is {self.growth:.1%} of its size in the second quarter")

    @property
    def growth(self) -> float:
        """Resident memory in the last quarter, relative to the second quarter."""
        quarter = max(len(self.resident) // 4, 1)
        return statistics.median(self.resident[-quarter:]) / statistics.median(
            self.resident[quarter : 2 * quarter] or self.resident
        )

    def _held(self) -> dict[str, float]:
        gauges = ("kv_blocks_used", "requests_running", "requests_waiting")
        return {name: value for name in gauges if (value := self.server.metric(name, MODEL))}

    def stop(self, server: TritonServer) -> None:
        """SIGTERM with open streams: each stream must end, and the server as well."""
        streams = [self.grpc.stream("Go on", sampling=greedy(1000)) for _ in range(8)]
        for stream in streams:
            next(stream)
        began = time.monotonic()
        stopper = threading.Thread(target=server.stop)
        stopper.start()
        for stream in streams:
            try:
                for _ in stream:
                    pass
                self.outcomes["at the end: answered"] += 1
            except GenerationError as error:
                self.outcomes[f"at the end: {error.code}"] += 1
        stopper.join()
        assert server.process
        exit_code = server.process.returncode
        print(f"stopped after {time.monotonic() - began:.1f} s with exit code {exit_code}")
        if exit_code:
            self.problems.append(f"the server ended with exit code {exit_code}")


def greedy(max_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tritium loadtest soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=float, default=20, help="time limit; default: %(default)s"
    )
    parser.add_argument("--requests", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--log", type=Path, default=None, help="file for the server's log")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "models"
        write_model(repository, MODEL, **LIMITS)
        (repository / MODEL / "1/model.py").write_text(MODEL_PY)
        http, grpc, metrics = free_ports(3)
        log = options.log or Path(folder) / "server.log"
        with (
            log.open("wb") as output,
            TritonServer(repository, http, grpc, metrics, log=output) as running,
        ):
            assert running.process
            server = Server(
                f"http://localhost:{http}",
                f"localhost:{grpc}",
                f"http://localhost:{metrics}",
                log,
                running.process.pid,
                MODEL,
            )
            soak = Soak(server, options.minutes * 60, options.requests)
            soak.learn()
            began = time.monotonic()
            soak.run()
            seconds = time.monotonic() - began
            soak.check()
            preemptions = server.metric("preemptions_total", MODEL)
            soak.stop(running)
    for outcome, number in sorted(soak.outcomes.items()):
        print(f"{number:7} {outcome}")
    print(
        f"{soak.num_sent} requests in {seconds:.0f} s, {preemptions:.0f} preemptions, memory "
        f"{soak.resident[-1] / 2**20:.0f} MiB, {soak.growth - 1:+.1%} from the second quarter on"
    )
    for problem, number in Counter(soak.problems).most_common(50):
        print(f"PROBLEM ({number} times) {problem}")
    print(f"{len(soak.problems)} problems")
    return bool(soak.problems)


if __name__ == "__main__":
    sys.exit(main())
