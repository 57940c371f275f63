"""The client and its command line against a real Triton Server, over gRPC and HTTP."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import pytest

from tests.helpers import ROOT
from tritium.client import Client, GenerationError, GrpcClient, HttpClient

PROMPT = "Here is a short story about two friends:"
GREEDY = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
ENDLESS = {"max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(params=["grpc", "http"])
def client(server, request) -> Client:
    if request.param == "grpc":
        return GrpcClient(server.grpc_url, server.model)
    return HttpClient(server.http_url, server.model)


@pytest.fixture
def next_cancellation(server):
    """Waits until the server has counted one more cancelled request; fails after 5 seconds."""

    def cancelled() -> float:
        with urlopen(f"{server.metrics_url}/metrics") as response:
            metrics = response.read().decode()
        return sum(
            float(line.split()[-1])
            for line in metrics.splitlines()
            if line.startswith("tritium:requests_total{") and 'outcome="cancelled"' in line
        )

    before = cancelled()

    def wait() -> None:
        deadline = time.monotonic() + 5
        while cancelled() == before:
            assert time.monotonic() < deadline, "the server did not cancel the request"
            time.sleep(0.1)

    return wait


def test_deltas_add_up_to_the_whole_answer(client):
    deltas = list(client.stream(PROMPT, sampling=GREEDY))
    whole = client.generate(PROMPT, sampling=GREEDY)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert len(deltas) > 1
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == whole.finish_reason == "length"
    assert sum(delta.num_output_tokens for delta in deltas) == 16


def test_usage(client):
    usage = client.generate(PROMPT, sampling=GREEDY).usage
    assert usage.output_tokens == 16
    assert usage.prompt_tokens > usage.cached_tokens >= 0
    assert 0 <= usage.queue_ms <= usage.ttft_ms <= usage.total_ms
    assert usage.ttft_ms > 0


def test_transports_agree_on_messages(server):
    messages = [{"role": "user", "content": "Translate to French: 你好, «naïve» 🙂"}]
    answers = {
        transport.generate(messages=messages, sampling=GREEDY).text
        for transport in (
            GrpcClient(server.grpc_url, server.model),
            HttpClient(server.http_url, server.model),
        )
    }
    assert len(answers) == 1


def test_stop_ends_an_answer(client):
    text = client.generate(PROMPT, sampling=GREEDY).text
    stop = text[len(text) // 2 :][:5]
    answer = client.generate(PROMPT, sampling=GREEDY | {"stop": [stop]})
    assert answer.text == text[: text.index(stop)]
    assert answer.finish_reason == "stop"


def test_eight_threads_share_one_client(client):
    def lengths(n: int) -> tuple[int, int]:
        answer = client.generate("word " * n, sampling=GREEDY | {"max_tokens": n})
        return answer.usage.prompt_tokens, answer.usage.output_tokens

    alone = [lengths(n) for n in range(1, 9)]
    assert len(set(alone)) == 8
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lengths, range(1, 9))) == alone


def test_errors_carry_code_and_message(client):
    with pytest.raises(GenerationError, match="temperature") as caught:
        client.generate("Hi", sampling={"temperature": -1})
    assert caught.value.code == "INVALID_ARGUMENT"
    assert client.generate("Hi").text


def test_unknown_model(server):
    with pytest.raises(GenerationError, match="nonesuch"):
        GrpcClient(server.grpc_url, "nonesuch").generate("Hi")
    with pytest.raises(GenerationError, match="nonesuch") as caught:
        HttpClient(server.http_url, "nonesuch").generate("Hi")
    assert caught.value.code == "NOT_FOUND"


def test_timeout_raises_and_cancels(client, next_cancellation):
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        client.generate("Hi", sampling=ENDLESS, timeout=1)
    assert time.monotonic() - start < 3
    next_cancellation()


def test_break_cancels(client, next_cancellation):
    for _ in client.stream("Hi", sampling=ENDLESS):
        break
    next_cancellation()


def test_exception_cancels(client, next_cancellation):
    def read() -> None:
        with client.stream("Hi", sampling=ENDLESS) as stream:
            next(stream)
            raise KeyError

    with pytest.raises(KeyError):
        read()
    next_cancellation()


def test_cancel_ends_the_stream(client, next_cancellation):
    stream = client.stream("Hi", sampling=ENDLESS)
    next(stream)
    stream.cancel()
    assert len(list(stream)) < 100
    next_cancellation()


# -- the command line --


@pytest.fixture(params=["grpc", "http"])
def url_options(server, request) -> list[str]:
    if request.param == "grpc":
        return ["--url", server.grpc_url]
    return ["--http", "--url", server.http_url]


def run(server, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tritium.client", *arguments, "--model", server.model],
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        timeout=120,
        check=False,
    )


def test_generate_command(server, url_options):
    prompt = "Grüße aus 東京 🙂"
    done = run(
        *(server, "generate", prompt, "--raw", "--usage", *url_options),
        *("--temperature", "0", "--max-tokens", "12", "--param", "ignore_eos=true"),
    )
    expected = HttpClient(server.http_url, server.model).generate(
        prompt, sampling=GREEDY | {"max_tokens": 12}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected.text + "\n"
    assert re.search(r"prompt \d+ tokens .*output 12 tokens", done.stderr)


def test_generate_command_reports_errors(server, url_options):
    done = run(server, "generate", "Hi", "--temperature", "-1", *url_options)
    assert done.returncode == 1
    assert re.fullmatch(r"error: INVALID_ARGUMENT: .*temperature.*\n", done.stderr)


def test_chat_command(server, url_options):
    options = ["--temperature", "0", "--max-tokens", "12", "--system", "You are a pirate."]
    stdin = "My name is Ada.\nWhat is my name?\n/reset\nMy name is Ada.\n/quit\nnever asked\n"
    done = run(server, "chat", *options, *url_options, stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    client = HttpClient(server.http_url, server.model)
    system = [{"role": "system", "content": "You are a pirate."}]
    turns: list[dict[str, str]] = []
    for question in ("My name is Ada.", "What is my name?"):
        turns.append({"role": "user", "content": question})
        text = client.generate(
            messages=system + turns, sampling={"temperature": 0, "max_tokens": 12}
        ).text
        turns.append({"role": "assistant", "content": text})
    first, second = turns[1]["content"], turns[3]["content"]
    assert done.stdout == f"{first}\n{second}\n{first}\n"
