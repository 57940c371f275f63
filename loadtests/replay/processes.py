"""A replay in several processes, each with every n-th request; collects their records."""

import multiprocessing
import queue
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from tritium.loadtests.replay.dispatch import Dispatcher, connect
from tritium.loadtests.replay.metrics import Scraper
from tritium.loadtests.replay.plan import Plan
from tritium.loadtests.replay.prompts import JsonVocabulary, Prompts
from tritium.loadtests.replay.run import Health, Record, Run, Slo
from tritium.loadtests.traces.describe import describe


class ReplayError(RuntimeError):
    """A replay could not continue; the message says why."""


class Target(msgspec.Struct, frozen=True):
    """The server that receives the replay, and how it is sent.

    Args:
        url: http://host:port, or host:port for gRPC.
        metrics_url: The server's /metrics.
        model: Name of the served model.
        tokenizer: Text of the served model's tokenizer.json.
        seed: Seed of the prompts' words.
        timeout: Seconds for a whole answer.
        num_processes: Client processes.
        ledger: Directory of the server's ledger, whose tokens are compared, or None.
    """

    url: str
    metrics_url: str
    model: str
    tokenizer: str
    seed: str
    timeout: float = 600.0
    num_processes: int = 1
    ledger: Path | None = None


def dispatcher(
    plan: Plan,
    target: Target,
    share: int,
    num_shares: int,
    on_record: Callable[[Record], None],
) -> Dispatcher:
    """A dispatcher for every `num_shares`-th request of a plan, from number `share` on."""
    return Dispatcher(
        islice(plan.requests(), share, None, num_shares),
        Prompts(JsonVocabulary(target.tokenizer), target.seed),
        connect(target.url, target.model),
        target.timeout,
        on_record,
    )


def new_run(name: str, plan: Plan, url: str, slo: Slo, max_lag: float) -> Run:
    """A run without records; raises the errors of the plan."""
    planned = describe(request.as_trace() for request in plan.requests())
    return Run(name, url, plan, describe(plan.source()), planned, slo, max_lag)


def replay(
    name: str,
    plan: Plan,
    target: Target,
    slo: Slo,
    max_lag: float,
    on_start: Callable[[int], None] = lambda _: None,
    on_record: Callable[[Record], None] = lambda _: None,
) -> Run:
    """Replay a plan. Ctrl-C ends it early; the run then contains the records so far.

    Args:
        on_start: Called with the number of requests.
        on_record: Called with the record of each request that has ended.

    Raises:
        TraceError, ValueError: the plan or the ledger is wrong.
        ReplayError: a process of the client failed.
    """
    run = new_run(name, plan, target.url, slo, max_lag)
    on_start(run.planned.num_requests)
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    starts = [context.SimpleQueue() for _ in range(target.num_processes)]
    workers = [
        context.Process(
            target=_work,
            args=(plan, target, share, target.num_processes, start, messages),
            daemon=True,
        )
        for share, start in enumerate(starts)
    ]
    scraper = Scraper(target.metrics_url, target.model, target.ledger)
    for worker in workers:
        worker.start()
    try:
        received = _receive(messages, workers)
        for _ in workers:
            next(received)
        start_time = time.perf_counter() + 0.5
        for start in starts:
            start.put(start_time)
        scraper.start()
        try:
            for message in received:
                if isinstance(message, Record):
                    run.records.append(message)
                    on_record(message)
                else:
                    run.healths.append(message)
                    if len(run.healths) == len(workers):
                        break
        except KeyboardInterrupt:
            run.interrupted = True
        run.samples = scraper.stop(start_time)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    run.records.sort(key=lambda record: record.index)
    return run


def _receive(messages: Any, workers: list[Any]) -> Iterator[Any]:
    """The workers' messages in the order of arrival."""
    while True:
        try:
            message = messages.get(timeout=1)
        except queue.Empty:
            dead = [worker.exitcode for worker in workers if worker.exitcode]
            if dead:
                raise ReplayError(
                    f"a process of the client ended with exit code {dead[0]}"
                ) from None
            continue
        if isinstance(message, Exception):
            raise ReplayError(str(message)) from message
        yield message


def _work(
    plan: Plan, target: Target, share: int, num_shares: int, start: Any, messages: Any
) -> None:
    """The process of a worker: report that it is ready, wait for the start, replay."""
    try:
        sending = dispatcher(plan, target, share, num_shares, messages.put)
        sending.wait_until_ready()
        messages.put("ready")
        health: Health = sending.run(start.get())
        messages.put(health)
    except KeyboardInterrupt:
        pass
    except Exception as error:  # noqa: BLE001 -- raised in the parent process
        messages.put(ReplayError(f"{type(error).__name__}: {error}"))
    messages.close()
    messages.join_thread()
