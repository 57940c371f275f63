"""What prefix reuse gains, and whether it leaks information, through a real server.

    tritium loadtest prefix

First 64 requests at once with a common system prompt of about 512 tokens, with reuse off, on and
auto. Then a timing test: does TTFT reveal which prompts another business line or another salt has
in the cache? Prompts that the other line has just sent and new prompts are sent in turns.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from tritium.backend.host.serve import TritonServer
from tritium.client import GrpcClient
from tritium.client.types import Usage
from tritium.loadtests.harness import free_ports, write_model

NUM_REQUESTS, NUM_PAIRS, NUM_SHUFFLES = 64, 30, 10_000
LIMITS: dict[str, Any] = {
    "kv_cache_memory": "1GiB",
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "max_queue_delay_ms": 600_000,
}


def words(rng: random.Random, number: int) -> str:
    """A text of words with about one token each."""
    common = ("the", "of", "and", "to", "in", "is", "that", "for", "with", "as", "was", "on", "are")
    return " ".join(rng.choice(common) for _ in range(number))


def ask(client: GrpcClient, prompt: str, **labels: Any) -> Usage:
    answer = client.generate(
        prompt, sampling={"temperature": 0, "max_tokens": 8, "ignore_eos": True}, **labels
    )
    assert answer.usage
    return answer.usage


def burst(client: GrpcClient, systems: list[str], **labels: Any) -> list[Usage]:
    """Send one request per system prompt, each with a text of its own, all at once."""
    rng = random.Random(1)
    prompts = [f"{system} {words(rng, 31)}" for system in systems]
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(client, prompt, **labels), prompts))


def show_burst(name: str, usages: list[Usage]) -> None:
    computed = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    ttft = statistics.mean(usage.ttft_ms for usage in usages)
    total = sum(usage.prompt_tokens for usage in usages)
    print(f"{name}: {computed} of {total} prompt tokens computed, mean TTFT {ttft:.0f} ms")


def show_timing(name: str, client: GrpcClient, rng: random.Random, **prober: Any) -> None:
    """TTFT of prompts that the line `victim` has just sent, and of new prompts."""
    seen: list[float] = []
    unseen: list[float] = []
    cached = 0
    for _ in range(NUM_PAIRS):
        known, new = words(rng, 160), words(rng, 160)
        ask(client, known, business_line="victim", cache_salt="secret")
        for prompt, times in rng.sample([(known, seen), (new, unseen)], 2):
            usage = ask(client, prompt, **prober)
            cached += usage.cached_tokens
            times.append(usage.ttft_ms - usage.queue_ms)
    print(
        f"{name}: {cached} tokens cached, TTFT {statistics.median(seen):.2f} ms for prompts "
        f"that another line has sent, {statistics.median(unseen):.2f} ms for new prompts, "
        f"p = {p_value(seen, unseen):.3f}"
    )


def p_value(first: list[float], second: list[float]) -> float:
    """p value of a difference of means, by a permutation test."""
    both = np.array(first + second)
    rng = np.random.default_rng(0)
    shuffled = rng.permuted(np.tile(both, (NUM_SHUFFLES, 1)), axis=1)
    half = len(first)
    by_chance = np.abs(shuffled[:, :half].mean(axis=1) - shuffled[:, half:].mean(axis=1))
    return float((by_chance >= abs(np.mean(first) - np.mean(second)) - 1e-9).mean())


@contextmanager
def served() -> Iterator[tuple[str, grpcclient.InferenceServerClient]]:
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        for mode in ("off", "on", "auto"):
            write_model(repository, mode, prefix_cache=mode, **LIMITS)
        http, grpc, metrics = free_ports(3)
        with (
            (repository / "server.log").open("wb") as log,
            TritonServer(
                repository, http, grpc, metrics, ["--model-control-mode=explicit"], log=log
            ),
            grpcclient.InferenceServerClient(f"localhost:{grpc}") as control,
        ):
            yield f"localhost:{grpc}", control


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium loadtest prefix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    rng = random.Random(0)
    with served() as (url, control):
        for mode in ("off", "on", "auto"):
            control.load_model(mode)
            client = GrpcClient(url, model=mode)
            ask(client, words(rng, 600))
            show_burst(mode, burst(client, [words(rng, 511)] * NUM_REQUESTS))
            if mode == "auto":
                strangers = [words(rng, 511) for _ in range(NUM_REQUESTS)]
                show_burst("auto, nothing in common", burst(client, strangers, business_line="x"))
            if mode == "on":
                secret = {"business_line": "victim", "cache_salt": "secret"}
                show_timing("the same line and salt", client, rng, **secret)
                show_timing("another salt", client, rng, business_line="victim", cache_salt="x")
                show_timing("another line", client, rng, business_line="x", cache_salt="secret")
            control.unload_model(mode)


if __name__ == "__main__":
    main()
