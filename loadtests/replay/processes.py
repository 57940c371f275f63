"""A replay in processes of their own, each with every n-th request; gathers their records."""

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
    """A replay could not go on; the message says why."""


class Target(msgspec.Struct, frozen=True):
    """What is replayed against, and how.

    Args:
        url: http://host:port, or host:port of gRPC.
        metrics_url: The server's /metrics.
        model: Its name there.
        tokenizer: The served model's, as the text of a tokenizer.json.
        seed: Of the prompts' words.
        timeout: Seconds that an answer may take.
        num_processes: Of the client.
        ledger: Directory of the server's ledger, whose tokens are compared; None: none.
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
    """What sends every `num_shares`-th request of a plan, from number `share` on."""
    return Dispatcher(
        islice(plan.requests(), share, None, num_shares),
        Prompts(JsonVocabulary(target.tokenizer), target.seed),
        connect(target.url, target.model),
        target.timeout,
        on_record,
    )


def new_run(name: str, plan: Plan, url: str, slo: Slo, max_lag: float) -> Run:
    """A run of which nothing is recorded yet; raises what the plan does."""
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
    """Replay a plan. Ctrl-C ends it early; the run then has what was recorded so far.

    Args:
        on_start: Told of the number of requests.
        on_record: Told of each one's end.

    Raises:
        TraceError, ValueError: of the plan, or of the ledger.
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
    """What the workers say, as it comes."""
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
    """In a process of its own: say that all is ready, wait for the start, replay."""
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
