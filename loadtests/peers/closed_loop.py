"""A peer's process: reads cells from standard input, measures each, answers on standard output.

It runs in the peer's own environment, so it imports only the standard library. The only argument is
the path of the job. The protocol is one JSON line in each direction: when the peer is ready, it
writes {"version": ...}. Then it answers each line {"workload": ..., "num_requests": ...,
"concurrency": ...} with one line; see `result_of` in jobs.py.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# A request: [token ids of the prompt, number of output tokens].
Request = tuple[list[int], int]
# (request indices, concurrency) -> times of start, first and last token of each request.
Run = Callable[[list[Request], int], list[list[float]]]


def serve(start: Callable[[dict[str, Any]], tuple[str, Run]]) -> None:
    """Start the peer by its job's settings (-> version, run); answer until the input ends."""
    # Standard output belongs to the protocol, so what libraries print goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(Path(sys.argv[1]).read_text())
    version, run = start(job["settings"])
    first = next(iter(job["workloads"].values()))
    run(first[:2], 2)  # warm-up
    _write(answers, {"version": version})
    for line in sys.stdin:
        cell = json.loads(line)
        requests = job["workloads"][cell["workload"]][: cell["num_requests"]]
        begin = time.perf_counter()
        moments = run(requests, cell["concurrency"])
        _write(answers, {"seconds": time.perf_counter() - begin, "moments": moments})


def stepwise(
    requests: list[Request],
    concurrency: int,
    add: Callable[[int, list[int], int], None],
    step: Callable[[], Iterator[tuple[int, int, bool]]],
) -> list[list[float]]:
    """A closed loop around an engine in this process.

    Args:
        add: Starts request i with token ids and a number of output tokens.
        step: Computes a step; yields (request, number of new tokens, whether it has ended).
    """
    moments: list[list[float]] = [[] for _ in requests]
    counts = [0] * len(requests)
    waiting = iter(range(len(requests)))

    def add_next() -> None:
        if (i := next(waiting, None)) is not None:
            moments[i].append(time.perf_counter())
            add(i, *requests[i])

    for _ in range(concurrency):
        add_next()
    unfinished = len(requests)
    while unfinished:
        for i, num_tokens, ended in step():
            now = time.perf_counter()
            if num_tokens and len(moments[i]) == 1:
                moments[i].append(now)
            counts[i] += num_tokens
            if ended:
                moments[i].append(now)
                unfinished -= 1
                add_next()
    assert counts == [num_tokens for _, num_tokens in requests], "not the lengths asked for"
    return moments


def threaded(
    requests: list[Request],
    concurrency: int,
    stream: Callable[[list[int], int], Iterator[int]],
) -> list[list[float]]:
    """A closed loop of clients; `stream` yields the number of new tokens as they arrive.

    The clients' threads have a low priority, as in the measurement of Tritium's server.
    """
    moments: list[list[float]] = [[] for _ in requests]
    waiting = iter(range(len(requests)))
    lock = threading.Lock()

    def next_request() -> int | None:
        with lock:
            return next(waiting, None)

    def run() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while (i := next_request()) is not None:
            start, first, total = time.perf_counter(), 0.0, 0
            for num_tokens in stream(*requests[i]):
                if num_tokens:
                    first = first or time.perf_counter()
                    total += num_tokens
            assert total == requests[i][1], f"{total} tokens of {requests[i][1]}"
            moments[i] = [start, first, time.perf_counter()]

    threads = [threading.Thread(target=run) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(moments), "a request failed; the log says why"
    return moments


def _write(answers: Any, line: dict[str, Any]) -> None:
    answers.write(json.dumps(line) + "\n")
    answers.flush()
