"""Locust users that stream answers over gRPC and HTTP through the project's own client.

    locust -f loadtests/locustfile.py --headless -u 16 -r 16 -t 30s --host http://localhost:8000

Locust's own tables show every request three times: as `ttft`, `tpot` and `e2e`. Failures are
counted under `e2e`, and make the exit code 1.
"""

import itertools
import time
from argparse import Namespace
from collections import defaultdict
from typing import Any, ClassVar

import grpc.experimental.gevent as grpc_gevent
from locust import User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from rich.console import Console

from client import Client, GenerationError, GrpcClient, HttpClient
from loadtests.summary import ProtocolStats, summary_table
from loadtests.workload import Workload

# gRPC waits inside its C core, where gevent cannot see it: without this the first stream would
# stop every other user. It comes before the first channel.
grpc_gevent.init_gevent()

STATS: defaultdict[str, ProtocolStats] = defaultdict(ProtocolStats)


class StreamingUser(User):
    """Sends one request after another and reports ttft, tpot and e2e of each."""

    abstract = True
    protocol: ClassVar[str]
    _numbers = itertools.count()

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        options = environment.parsed_options
        assert options is not None  # locust's own main sets them
        self.client = self.make_client(options)
        self.workload = Workload(f"{options.seed}/{self.protocol}/{next(self._numbers)}")

    def make_client(self, options: Namespace) -> Client:
        """Make a client of this user's protocol."""
        raise NotImplementedError

    @task
    def generate(self) -> None:
        """Stream one answer."""
        stats = STATS[self.protocol]
        request = self.workload.next_request()
        start = time.perf_counter()
        try:
            with self.client.stream(request.prompt, sampling=request.sampling) as stream:
                timing = stats.measure(stream, start)
        except (GenerationError, TimeoutError) as error:
            stats.num_failures += 1
            self._report("e2e", (time.perf_counter() - start) * 1000, error=error)
            time.sleep(1)  # a user who is turned away does not come back at once
            return
        self._report("ttft", timing.ttft)
        if timing.tpot is not None:
            self._report("tpot", timing.tpot)
        self._report("e2e", timing.e2e)

    def _report(self, name: str, milliseconds: float, error: Exception | None = None) -> None:
        self.environment.events.request.fire(
            request_type=self.protocol,
            name=name,
            response_time=milliseconds,
            response_length=0,
            exception=error,
            context={},
        )


class GrpcUser(StreamingUser):
    """Streams over gRPC."""

    protocol = "gRPC"

    def make_client(self, options: Namespace) -> Client:
        """Connect to --grpc-url."""
        return GrpcClient(options.grpc_url, options.model)


class HttpUser(StreamingUser):
    """Streams over HTTP, to --host."""

    protocol = "HTTP"
    host = "http://localhost:8000"

    def make_client(self, options: Namespace) -> Client:
        """Connect to --host."""
        return HttpClient(self.host or "", options.model)


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser, **_: Any) -> None:
    """Add what locust's own options lack."""
    parser.add_argument("--grpc-url", default="localhost:8001", help="host:port of gRPC")
    parser.add_argument("--model", default="smollm2", help="name of the model")
    parser.add_argument("--seed", default="0", help="seed of prompts and lengths")


@events.quitting.add_listener
def fail_when_nothing_finished(environment: Environment, **_: Any) -> None:
    """Give a run without a single answer a bad exit code, even if it had no failure either."""
    if not any(stats.timings for stats in STATS.values()):
        environment.process_exit_code = 1


@events.quit.add_listener
def print_summary(**_: Any) -> None:
    """Print the table below locust's own."""
    Console().print(summary_table(STATS))
