"""Replay under locust, with its web UI or headless: one dispatcher in each of its processes.

    locust -f loadtests/locustfile.py --trace trace.jsonl --url localhost:8001
    locust -f loadtests/locustfile.py --trace trace.jsonl --headless --processes 2

Locust's own loop is closed: a user waits for the answer before the next request. Therefore each
process has one user, which runs the open-loop dispatcher, and locust shows the results as `ttft`,
`tpot` and `e2e`. The report is that of `tritium loadtest replay`.
"""

import multiprocessing
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import grpc.experimental.gevent as grpc_gevent
import msgspec
from locust import LoadTestShape, User, constant, events, runners, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import WorkerRunner
from rich.console import Console

import tritium.backend.front.tokenizer  # noqa: F401 -- takes seconds: once, before locust forks
from tritium.loadtests.replay.metrics import Scraper
from tritium.loadtests.replay.options import (
    add_plan_options,
    add_target_options,
    ledger_of,
    max_lag_of,
    metrics_url_of,
    plan_of,
    slo_of,
    target_of,
)
from tritium.loadtests.replay.processes import ReplayError, dispatcher, new_run
from tritium.loadtests.replay.run import Health, Record
from tritium.loadtests.report.page import print_summaries, write_report

_FAILED = -1.0
# Heartbeats that a worker may miss: it sends none while it makes its prompts, seconds on a busy
# machine, and locust would end the test.
runners.HEARTBEAT_LIVENESS = 60


class _Shared:
    """What the processes share; created before locust forks them."""

    num_ready = multiprocessing.Value("i", 0)
    start = multiprocessing.Value("d", 0.0)  # time.perf_counter(); 0: not started
    num_tests = multiprocessing.Value("i", 0)  # port of the web page


# Records of all processes; in a worker, the records that were not sent to the master yet.
_records: list[Record] = []
_healths: list[Health] = []


class Replay(LoadTestShape):
    """One user per process, until the whole plan has been replayed."""

    def tick(self) -> tuple[int, float] | None:
        """(users, users started per second); None at the end."""
        assert self.runner
        shares = _num_shares(self.runner.environment)
        return None if len(_healths) >= shares else (shares, float(shares))


class ReplayUser(User):
    """Replays its process's share of the plan."""

    wait_time = constant(1e9)  # runs its task once

    @task
    def replay(self) -> None:
        """Send all requests at their times; on failure end the test in all processes."""
        try:
            _healths.append(self._replay())
        except Exception:
            _Shared.start.value = _FAILED
            _healths.append(Health(0.0, 0.0))
            raise

    def _replay(self) -> Health:
        # gRPC waits inside its C core, where gevent cannot see it: without this the first stream
        # would stop all others. It must run before the first channel and after locust's fork.
        grpc_gevent.init_gevent()
        options, runner = _options(self.environment), self.environment.runner
        shares = _num_shares(self.environment)
        share = runner.worker_index if isinstance(runner, WorkerRunner) else 0
        plan, target = plan_of(options, options.rate), target_of(options, shares)
        self._test = _Shared.num_tests.value
        # Each test has its own seed, so it does not find earlier prompts in the server's cache.
        target = msgspec.structs.replace(target, seed=f"{target.seed}/{self._test}")
        sending = dispatcher(plan, target, share, shares, self._record_ended)
        sending.wait_until_ready()
        with _Shared.num_ready.get_lock():
            _Shared.num_ready.value += 1
            if _Shared.num_ready.value == shares:
                _Shared.start.value = time.perf_counter() + 0.5
        while not _Shared.start.value:
            time.sleep(0.05)
        if _Shared.start.value == _FAILED:
            raise ReplayError("another process of the client failed")
        return sending.run(_Shared.start.value)

    def _record_ended(self, record: Record) -> None:
        if self._test != _Shared.num_tests.value:
            return  # the test was stopped and another one has started
        _records.append(record)
        if record.outcome != "completed":
            self._fire("e2e", record.e2e, RuntimeError(record.error))
            return
        self._fire("ttft", record.ttft)
        if record.tpot is not None:
            self._fire("tpot", record.tpot)
        self._fire("e2e", record.e2e)

    def _fire(self, name: str, seconds: float, error: Exception | None = None) -> None:
        self.environment.events.request.fire(
            request_type="replay",
            name=name,
            response_time=seconds * 1000,
            response_length=0,
            exception=error,
            context={},
        )


def _options(environment: Environment) -> Namespace:
    assert environment.parsed_options  # set by locust's main
    return environment.parsed_options


def _num_shares(environment: Environment) -> int:
    return _options(environment).processes or 1


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser, **_: Any) -> None:
    """Add the options of a replay."""
    # Strings, since locust sends all options to its workers.
    parser.add_argument("--trace", required=True, help="trace to replay")
    parser.add_argument("--rate", type=float, default=1.0, help="factor by which time runs faster")
    parser.add_argument("--output", default="results/locust", help="folder")
    add_plan_options(parser)
    add_target_options(parser)


@events.report_to_master.add_listener
def send_records(data: dict[str, Any], **_: Any) -> None:
    """In a worker: add the new records to locust's report to the master."""
    data["replay"] = msgspec.json.encode((_records, _healths)).decode()
    _records.clear()
    _healths.clear()


@events.worker_report.add_listener
def receive_records(data: dict[str, Any], **_: Any) -> None:
    """In the master: take the records of a worker."""
    records, healths = msgspec.json.decode(data["replay"], type=tuple[list[Record], list[Health]])
    _records.extend(records)
    _healths.extend(healths)


_scrapers: list[Scraper] = []


@events.test_start.add_listener
def begin(environment: Environment, **_: Any) -> None:
    """Drop late records of an earlier test, and start to scrape the server."""
    _records.clear()
    _healths.clear()
    if isinstance(environment.runner, WorkerRunner):
        return
    _Shared.num_ready.value, _Shared.start.value = 0, 0.0
    _Shared.num_tests.value += 1
    options = _options(environment)
    _scrapers.append(Scraper(metrics_url_of(options), options.model, ledger_of(options)))
    _scrapers[-1].start()


@events.test_stop.add_listener
def report(environment: Environment, **_: Any) -> None:
    """Write the report; an invalid run, or one without answers, sets the exit code.

    Then the state is reset, because the web page can start another test.
    """
    if isinstance(environment.runner, WorkerRunner):
        return
    options = _options(environment)
    shares = _num_shares(environment)
    plan, slo, max_lag = plan_of(options, options.rate), slo_of(options), max_lag_of(options)
    run = new_run(plan.trace.stem, plan, options.url, slo, max_lag)
    run.samples = _scrapers.pop().stop(_Shared.start.value)
    run.records = sorted(_records, key=lambda record: record.index)
    run.healths = list(_healths)
    run.interrupted = len(_healths) < shares
    _records.clear()
    _healths.clear()
    summary = write_report(run, Path(options.output))
    print_summaries(Console(), [summary])
    if summary.invalid or not summary.completed:
        environment.process_exit_code = 1
