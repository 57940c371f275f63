"""Traffic through a real server: replayed, reported, captured, and replayed again."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

import pytest
import tritonclient.grpc as grpcclient

from tests.helpers import ROOT
from tritium.loadtests.harness import free_ports, until, write_model
from tritium.loadtests.replay.options import read_tokenizer
from tritium.loadtests.replay.plan import Plan
from tritium.loadtests.replay.processes import ReplayError, Target, replay
from tritium.loadtests.replay.run import TOKENS, Slo, load_run
from tritium.loadtests.report.summary import summarize
from tritium.loadtests.traces.convert import convert
from tritium.loadtests.traces.describe import describe
from tritium.loadtests.traces.format import read_trace, write_trace
from tritium.loadtests.traces.synthesize import Lengths, Shape, synthesize

NUM_REQUESTS = 30
SHAPE = Shape(NUM_REQUESTS, 24.0, Lengths(60, 150), Lengths(5, 12), dispersion=2.0, hit_ratio=0.4)


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    return tmp_path_factory.mktemp("capture") / "captured.jsonl"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    return tmp_path_factory.mktemp("ledger")


@pytest.fixture(scope="module")
def model(server, repository, tiny_weights, captured, ledger):
    """A fast model with a prefix cache, a traffic record and a ledger."""
    write_model(
        repository,
        "replayed",
        model=tiny_weights,
        max_model_len=1024,
        kv_cache_memory="32MiB",
        prefix_cache="on",
        trace_path=captured,
        ledger_path=ledger,
    )
    with grpcclient.InferenceServerClient(server.grpc_url) as control:
        control.load_model("replayed")
        yield "replayed"
        control.unload_model("replayed")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "synthetic.jsonl"
    write_trace(path, synthesize(SHAPE))
    return path


def target(server, model, tiny_weights, seed, **fields):
    return Target(
        **{
            "url": server.grpc_url,
            "metrics_url": f"{server.metrics_url}/metrics",
            "model": model,
            "tokenizer": read_tokenizer(str(tiny_weights)),
            "seed": seed,
        }
        | fields
    )


def test_captured_traffic_replays_like_the_original(
    server, model, tiny_weights, trace, captured, ledger, tmp_path
):
    """Replay over gRPC by two processes, then replay the server's record over HTTP by one."""

    def replayed(plan, seed, **fields):
        """The trace that the server records of a replay."""
        before = len(captured.read_bytes())
        to = target(server, model, tiny_weights, seed, ledger=ledger, **fields)
        run = replay(seed, plan, to, Slo(), max_lag=0.05)
        check(run)
        assert len(run.healths) == to.num_processes
        until(lambda: len(captured.read_bytes()[before:].splitlines()) == NUM_REQUESTS)
        part, converted = tmp_path / "part", tmp_path / f"{seed}.jsonl"
        part.write_bytes(captured.read_bytes()[before:])
        assert convert(part, converted, "server") == (NUM_REQUESTS, 0)
        return converted

    recorded = replayed(Plan(trace), "first", num_processes=2)
    again = replayed(Plan(recorded), "second", url=server.http_url)
    assert b" " not in recorded.read_bytes()  # the record holds no text
    requests = [list(read_trace(path)) for path in (trace, recorded, again)]
    # Requests of the same moment may come in any order.
    lengths = [sorted((r.input_length, r.output_length) for r in found) for found in requests]
    assert lengths[0] == lengths[1] == lengths[2]
    ratios = [describe(found).hit_ratio["endless"] for found in requests]
    assert ratios == pytest.approx([ratios[0]] * 3, abs=0.01)


def check(run):
    """Check lengths and prefix reuse; server, ledger and report must count the same tokens."""
    found = summarize(run)
    assert [record.error for record in run.records if record.error] == []
    assert found.sent == found.completed == found.exact_lengths == NUM_REQUESTS
    assert {record.finish_reason for record in run.records} == {"length"}
    assert [count.name for count in found.counts] == list(TOKENS)
    assert all(count.here == count.server == count.ledger > 0 for count in found.counts)
    assert all(record.device_ms > 0 for record in run.records)
    # Concurrent requests that share a prefix compute it twice.
    planned = run.planned.hit_ratio["endless"]
    assert 0.5 * planned < found.cached_ratio < planned + 1e-9


def test_throttled_client_is_distinguished_from_a_slow_server(server, model, tiny_weights, trace):
    """The client's process is stopped for 150 ms of every 200 ms after the first answer."""
    over = threading.Event()

    def throttle():
        [client] = multiprocessing.active_children()
        with contextlib.suppress(ProcessLookupError):  # the process has ended
            while not over.wait(0.05):
                os.kill(client.pid, signal.SIGSTOP)
                time.sleep(0.15)
                os.kill(client.pid, signal.SIGCONT)

    throttling = threading.Thread(target=throttle)

    def on_record(record):
        if not throttling.ident:
            throttling.start()

    to = target(server, model, tiny_weights, "throttled")
    run = replay("throttled", Plan(trace), to, Slo(), max_lag=0.05, on_record=on_record)
    over.set()
    throttling.join()
    found = summarize(run)
    assert found.completed == NUM_REQUESTS
    assert any("the client was the bottleneck" in reason for reason in found.invalid)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"tokenizer": "{}"}, "Model missing"), ({"url": "localhost:9"}, "UNAVAILABLE: localhost:9")],
)
def test_failing_process_ends_the_replay(server, model, tiny_weights, trace, fields, reason):
    to = target(server, model, tiny_weights, "s", **fields)
    with pytest.raises(ReplayError, match=reason):
        replay("none", Plan(trace), to, Slo(), max_lag=0.05)


@pytest.fixture
def locust(server, model, tiny_weights, trace, ledger, tmp_path):
    """The command line of a replay under Locust."""
    return [
        *(sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", f"--trace={trace}"),
        *(f"--url={server.grpc_url}", f"--metrics-url={server.metrics_url}/metrics"),
        *(f"--model={model}", f"--tokenizer={tiny_weights}", f"--output={tmp_path}"),
        f"--ledger={ledger}",
    ]


def test_under_locust(locust, tmp_path):
    result = subprocess.run(
        [*locust, "--headless", "--only-summary", "--processes=2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "ttft" in result.stdout + result.stderr
    run = load_run(tmp_path)
    check(run)
    assert len(run.healths) == 2
    assert result.returncode == bool(summarize(run).invalid)


def test_in_locust_s_web_ui(locust, tmp_path):
    """Start two runs in the UI; the second finds nothing of the first in the prefix cache."""
    [port] = free_ports(1)
    ui, report = f"http://127.0.0.1:{port}", tmp_path / "report.html"
    process = subprocess.Popen([*locust, "--web-host=127.0.0.1", f"--web-port={port}"], cwd=ROOT)

    def state():
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{ui}/stats/requests") as stats:
            return json.load(stats)["state"]

    try:
        until(lambda: state() == "ready")
        for _ in range(2):
            form = urllib.parse.urlencode({"user_count": 1, "spawn_rate": 1}).encode()
            with urllib.request.urlopen(f"{ui}/swarm", form) as answer:
                assert json.load(answer)["success"]
            until(report.exists, timeout=60)
            check(load_run(tmp_path))
            report.unlink()
            until(lambda: state() == "stopped")
    finally:
        process.terminate()
        process.wait(30)
