"""`make pressure`: behaviour under load, through a real Triton Server with the real model.

- burst: ten times as many requests as may wait. How soon are the others refused, and when do the
  accepted requests get their first token?
- mixed: 32 endless offline streams, and an interactive request every 200 ms.
- long: a prompt of 6,000 tokens among 16 streams, with budgets from small to one that computes the
  prompt in one step.
- unread: 16 streams that are not read. How much does the server keep, and are others affected?
- tight: 64 requests with a tenth of the KV cache that they need, and with all of it, in float32.

Times are measured by clients on the server's machine; the client of the burst is light.
"""

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from tritium.backend.host.serve import TritonServer
from tritium.client import GenerationError, GrpcClient, Usage
from tritium.loadtests.model_folder import serve_with
from tritium.loadtests.statistics import percentile
from tritium.loadtests.volley import volley

_WORDS = ("time", "people", "water", "house", "day", "look", "make", "write", "long", "two", "most")
_BLOCK_BYTES = 16 * 30 * 2 * 3 * 64 * 4  # a KV block of SmolLM2-135M in float32


@dataclass(slots=True)
class Result:
    """One request as seen by its client; times in seconds of time.perf_counter()."""

    start: float
    moments: list[float] = field(default_factory=list)  # times of the deltas with text
    end: float = 0.0
    num_tokens: int = 0
    text: str = ""
    usage: Usage = Usage()  # noqa: RUF009 -- the class is frozen
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.moments[0] - self.start

    @property
    def tpot(self) -> float:
        return (self.end - self.moments[0]) / max(self.num_tokens - 1, 1)


def prompt(num_tokens: int, seed: int = 0) -> str:
    """A text of words of about one token each; each seed gives other words."""
    return " ".join(_WORDS[(seed * 7 + i * (seed + 3)) % len(_WORDS)] for i in range(num_tokens))


def ask(
    client: GrpcClient,
    text: str,
    max_tokens: int,
    stop: Callable[[], bool] = lambda: False,
    **more: Any,
) -> Result:
    """Read answers of a fixed length until `stop` is set."""
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    result = Result(time.perf_counter())
    try:
        with client.stream(text, sampling=sampling, **more) as deltas:
            for delta in deltas:
                result.num_tokens += delta.num_output_tokens
                result.text += delta.text
                if delta.text:
                    result.moments.append(time.perf_counter())
                if delta.usage:
                    result.usage = delta.usage
                if stop():
                    break
    except GenerationError as error:
        result.error = str(error)
    result.end = time.perf_counter()
    return result


@contextmanager
def serving(**parameters: Any) -> Iterator[GrpcClient]:
    """A client of a warmed-up server with these limits."""
    with open(os.devnull, "wb") as log, serve_with(parameters, log) as server:
        yield warm_client(server)


def warm_client(server: TritonServer) -> GrpcClient:
    client = GrpcClient(f"localhost:{server.grpc_port}", model="smollm2")
    for _ in range(3):
        ask(client, prompt(64), 8)
    return client


def burst(max_num_seqs: int = 8) -> Table:
    table = _table(
        "burst: 10 x max_queue_size",
        *("max_queue_size", "sent within, s", "accepted", "refused"),
        *("time to refuse, ms: p50, p99, max", "TTFT of accepted, s: p50, max", "bound, s"),
    )
    for max_queue_size, interval in ((8, 0), (16, 0), (16, 0.008)):
        limits = {"max_num_seqs": max_num_seqs, "max_queue_size": max_queue_size}
        prompts = [prompt(64, i) for i in range(10 * max_queue_size)]
        with open(os.devnull, "wb") as log, serve_with(limits, log) as server:
            warm_client(server)
            answers = volley(f"http://localhost:{server.http_port}", prompts, 32, interval)
        accepted = [answer for answer in answers if not answer.error]
        assert all(sum(d.num_output_tokens for d in a.deltas) == 32 for a in accepted)
        refused = [answer for answer in answers if answer.error]
        assert all("queue_full" in answer.error for answer in refused), refused[0].error
        waits = [(answer.first - answer.start) * 1e3 for answer in refused]
        ttfts = [answer.first - answer.start for answer in accepted]
        # The last request waits while those before it run, max_num_seqs at a time.
        usages = [usage for answer in accepted if (usage := answer.deltas[-1].usage)]
        service = percentile([usage.total_ms - usage.queue_ms for usage in usages], 50) / 1e3
        table.add_row(
            str(max_queue_size),
            f"{interval * len(prompts):.1f}",
            str(len(accepted)),
            str(len(refused)),
            f"{percentile(waits, 50):.0f}, {percentile(waits, 99):.0f}, {max(waits):.0f}",
            f"{percentile(ttfts, 50):.2f}, {max(ttfts):.2f}",
            f"{(1 + max_queue_size / max_num_seqs) * service:.2f}",
        )
    return table


def mixed(num_offline: int = 32, seconds: float = 20.0) -> Table:
    table = _table(
        f"mixed: {num_offline} offline streams, an interactive request (16 + 4 tokens) per 200 ms",
        *("interactive", "offline tokens/s", "offline gaps, ms: p50"),
        *("interactive TTFT, ms: p50, p95", "3 steps + prefill", "interactive share of tokens"),
    )
    with serving(max_num_seqs=64) as client:
        alone = percentile([ask(client, prompt(16, i), 1).ttft for i in range(9)], 50)
        before = 0.0
        for with_interactive in (False, True):
            gaps, interactive = _mix(client, num_offline, seconds, with_interactive)
            rate, step = len(gaps) / seconds, percentile(gaps, 50)
            if not with_interactive:
                before = rate
                table.add_row("no", f"{rate:.0f}", f"{step * 1e3:.0f}", "", "", "")
                continue
            num_tokens = sum(16 + result.num_tokens for result in interactive)
            ttfts = [result.ttft * 1e3 for result in interactive]
            table.add_row(
                f"{len(interactive)}",
                f"{rate:.0f} ({rate / before - 1:+.0%})",
                f"{step * 1e3:.0f}",
                f"{percentile(ttfts, 50):.0f}, {percentile(ttfts, 95):.0f}",
                f"{(3 * step + alone) * 1e3:.0f} ms",
                f"{num_tokens / (num_tokens + len(gaps)):.0%}",
            )
    return table


def _mix(
    client: GrpcClient, num_offline: int, seconds: float, with_interactive: bool
) -> tuple[list[float], list[Result]]:
    """(gaps between tokens of offline streams, interactive requests), once all streams run."""
    offline: list[Result] = []
    interactive: list[Result] = []
    running: set[int] = set()
    is_over = threading.Event()

    def ask_repeatedly(i: int) -> None:
        def note() -> bool:
            running.add(i)
            return is_over.is_set()

        while not is_over.is_set():
            offline.append(ask(client, prompt(64, i), 1024, note, request_class="offline"))

    def ask_one(i: int) -> None:
        interactive.append(ask(client, prompt(16, i), 4))

    threads = [threading.Thread(target=ask_repeatedly, args=(i,)) for i in range(num_offline)]
    for thread in threads:
        thread.start()
    while len(running) < num_offline:
        time.sleep(0.1)
    begin = time.perf_counter()
    for i in range(int(seconds / 0.2)):
        if with_interactive:
            threads.append(threading.Thread(target=ask_one, args=(i,)))
            threads[-1].start()
        time.sleep(0.2)
    end = time.perf_counter()
    is_over.set()
    for thread in threads:
        thread.join()
    moments = [[m for m in result.moments if begin <= m <= end] for result in offline]
    return [b - a for stream in moments for a, b in pairwise(stream)], interactive


def long(budgets: tuple[int, ...] = (128, 512, 2048, 8192)) -> Table:
    table = _table(
        "long: a prompt of 6,000 tokens among 16 streams",
        *("max_num_batched_tokens", "gaps between tokens meanwhile, ms: p50, p99, max"),
        "TTFT of the long prompt, s",
    )
    for budget in budgets:
        with serving(max_num_seqs=32, max_num_batched_tokens=budget) as client:
            done = threading.Event()
            with ThreadPoolExecutor(16) as pool:
                streams = [
                    pool.submit(ask, client, prompt(64, i), 2000, done.is_set) for i in range(16)
                ]
                time.sleep(3)
                newcomer = ask(client, prompt(6000), 1)
                done.set()
                results = [stream.result() for stream in streams]
        assert not newcomer.error, newcomer.error
        gaps = []
        for result in results:
            inside = [m for m in result.moments if m >= newcomer.start - 0.5]
            gaps += [(b - a) * 1e3 for a, b in pairwise(inside)]
        table.add_row(
            str(budget),
            f"{percentile(gaps, 50):.0f}, {percentile(gaps, 99):.0f}, {max(gaps):.0f}",
            f"{newcomer.ttft:.2f}",
        )
    return table


def unread(num_streams: int = 16, num_tokens: int = 500, num_readers: int = 8) -> Table:
    table = _table(
        f"unread: {num_streams} streams of {num_tokens} tokens, and {num_readers} readers",
        *("the streams are", "TPOT of the readers, ms: p50", "server memory, kB per token"),
    )
    sampling = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    with open(os.devnull, "wb") as log, serve_with({"max_num_seqs": 32}, log) as server:
        client = warm_client(server)
        assert server.process
        process = psutil.Process(server.process.pid)
        for reads in (True, False):
            before = process.memory_info().rss
            others = [client.stream(prompt(64, i), sampling=sampling) for i in range(num_streams)]
            with ThreadPoolExecutor(num_readers + num_streams) as pool:
                reading = [pool.submit(list, stream) for stream in others if reads]
                results = list(
                    pool.map(lambda i: ask(client, prompt(64, i), num_tokens), range(num_readers))
                )
                growth = process.memory_info().rss - before
                lengths = [future.result() for future in reading] or [list(o) for o in others]
            for deltas in lengths:
                assert sum(delta.num_output_tokens for delta in deltas) == num_tokens
            table.add_row(
                "read" if reads else "not read until the end",
                f"{percentile([result.tpot for result in results], 50) * 1e3:.0f}",
                f"{growth / 1e3 / (num_streams * num_tokens):.2f}",
            )
    return table


def tight(num_requests: int = 64, num_tokens: int = 96) -> Table:
    table = _table(
        f"tight: {num_requests} requests, answers of {num_tokens} tokens, every fourth of 16",
        *("KV blocks", "tokens/s", "preemptions: total, most per request"),
        *("end of short answers, s: p50, max", "end of all, s", "equal answers"),
    )
    lengths = [16 if i % 4 == 3 else num_tokens for i in range(num_requests)]
    wanted = num_requests * -(-(64 + num_tokens) // 16)
    limits = {"max_num_seqs": 64, "dtype": "float32", "max_queue_delay_ms": 600_000}
    texts: list[str] = []
    for num_blocks in (wanted, wanted // 10):
        with serving(kv_cache_memory=num_blocks * _BLOCK_BYTES, **limits) as client:
            begin = time.perf_counter()
            with ThreadPoolExecutor(num_requests) as pool:
                results = list(
                    pool.map(lambda i: ask(client, prompt(64, i), lengths[i]), range(num_requests))
                )
        assert not any(errors := [result.error for result in results]), errors
        assert [result.num_tokens for result in results] == lengths
        seconds = max(result.end for result in results) - begin
        short = [r.end - begin for r, length in zip(results, lengths, strict=True) if length == 16]
        preemptions = [result.usage.preemptions for result in results]
        texts = texts or [result.text for result in results]
        same = sum(result.text == text for result, text in zip(results, texts, strict=True))
        table.add_row(
            str(num_blocks),
            f"{sum(lengths) / seconds:.0f}",
            f"{sum(preemptions)}, {max(preemptions)}",
            f"{percentile(short, 50):.1f}, {max(short):.1f}",
            f"{seconds:.1f}",
            f"{same} of {num_requests}",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right")
    return table


def main(arguments: list[str] | None = None) -> None:
    parts = {function.__name__: function for function in (burst, mixed, long, unread, tight)}
    parser = argparse.ArgumentParser(
        prog="tritium loadtest pressure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts", nargs="*", metavar="part", help=f"{', '.join(parts)}; default: all"
    )
    names = parser.parse_args(arguments).parts or list(parts)
    if unknown := set(names) - set(parts):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; parts: {', '.join(parts)}")
    for name in names:
        Console(width=120).print(parts[name]())


if __name__ == "__main__":
    main()
