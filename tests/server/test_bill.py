"""Billing through a real server: sums, tokens, metrics and logs, from the ledger file alone."""

import json
import random
import sqlite3
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.server.test_failures import stubs_of
from tritium.backend.host.serve import TritonServer
from tritium.client.__main__ import main
from tritium.client.ledger import Ledger
from tritium.loadtests.faults import FAILS, MODEL_PY
from tritium.loadtests.harness import (
    Server,
    collect,
    complete,
    free_ports,
    send,
    until,
    write_model,
)

LINES = ("search", "ads", "mail", "maps", "shop")
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
NUM_REQUESTS = 200
# The ledger's outcome for each error code.
CODES = {"INVALID_ARGUMENT": "invalid_arg", "UNAVAILABLE": "unavailable"}
PAUSE = 0.2  # seconds between a refusal and a client's next request


@pytest.fixture(scope="module")
def ledger_path(tmp_path_factory):
    return tmp_path_factory.mktemp("ledger") / "created by the server"


@pytest.fixture(scope="module")
def model(server, repository, tiny_weights, ledger_path):
    """A model with every billing option, and so little KV memory that requests are preempted."""
    write_model(
        repository,
        "billed",
        model=tiny_weights,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        max_queue_size=16,
        max_num_batched_tokens=64,
        kv_cache_memory=24 * 16 * 2 * 2 * 2 * 16 * 4,  # 24 blocks
        prefix_cache="on",
        ledger_path=ledger_path,
        business_lines=json.dumps(LINES[:3]),
        price_per_hour=3600,
        log_format="json",
    )
    (repository / "billed/1/model.py").write_text(MODEL_PY)  # steps fail for certain seeds
    with grpcclient.InferenceServerClient(server.grpc_url) as control:
        control.load_model("billed")
        yield "billed"
        control.unload_model("billed")


def read(ledger_path, table: str) -> list[dict]:
    (path,) = ledger_path.glob("billed-*.ledger")
    database = sqlite3.connect(path)
    database.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in database.execute(f"SELECT * FROM {table} ORDER BY sequence")]
    finally:
        database.close()


class Traffic:
    """Mixed requests of five business lines, counted as the clients see them."""

    def __init__(self, server: Server, model: str) -> None:
        self._server = server
        self._model = model
        self.output_tokens: Counter[str] = Counter()  # of answered requests, by business line
        self.cancelled_tokens = 0  # received before the cancellation
        self.outcomes: Counter[str] = Counter()  # by the ledger's names

    def run(self, number: int) -> None:
        rng = random.Random(number)
        line = LINES[number % len(LINES)]
        prompt = "one two three four " * rng.randint(1, 16)
        sampling = {"temperature": 0, "max_tokens": rng.randint(1, 40), "ignore_eos": True}
        options = dict(
            model=self._model,
            stream=True,
            sampling=sampling,
            business_line=line,
            request_class=rng.choice(["interactive", "offline"]),
            return_usage=True,
            return_num_output_tokens=True,
        )
        match number % 20:
            case 1:
                sampling["temperature"] = -1
            case 3:
                sampling["max_tokens"] = 400  # more than all blocks hold
            case 5 | 15:
                sampling["max_tokens"] = 300
                self._cancel(prompt, options)
                return
            case 7 | 17:
                sampling |= {"n": 2, "temperature": 1}
            case 9 | 10 | 11 | 12:
                # Four such requests at once exceed the 8 that run and the 16 that wait.
                sampling |= {"n": 8, "temperature": 1, "max_tokens": 4}
        responses = collect(self._server, prompt, **options)
        last = responses[-1]
        if last.error:
            self._refused(last.code)
            return
        received = sum(int(r.tensors["num_output_tokens"].sum()) for r in responses)
        usage = json.loads(last.string("usage"))
        assert usage["output_tokens"] == received
        assert usage["cost"] == pytest.approx(
            (usage["prefill_ms"] + usage["decode_ms"]) / 1e3, abs=2e-6
        )  # at a price of 3,600 per hour
        assert usage["peak_kv_bytes"] >= usage["peak_own_kv_bytes"] > 0
        assert usage["kv_block_seconds"] > 0
        self.output_tokens[line] += received
        self.outcomes["length"] += 1

    def _refused(self, code: str) -> None:
        """Without a pause, a slow server's full queue would refuse most of the requests."""
        self.outcomes[CODES[code]] += 1
        time.sleep(PAUSE)

    def _cancel(self, prompt: str, options: dict) -> None:
        with send(self._server, prompt, **options) as stream:
            responses = iter(stream)
            first = next(responses)
            if first.error:
                assert not list(responses)  # the stream ends here
                self._refused(first.code)
            else:
                stream.cancel()
                self.outcomes["cancelled"] += 1
                self.cancelled_tokens += int(first.tensors["num_output_tokens"].sum())


def test_the_bill_adds_up(server, model, ledger_path, capsys):
    traffic = Traffic(server, model)
    with ThreadPoolExecutor(16) as pool:
        for future in [pool.submit(traffic.run, i) for i in range(NUM_REQUESTS)]:
            future.result()
    until(lambda: len(read(ledger_path, "requests")) == NUM_REQUESTS)
    until(lambda: read(ledger_path, "totals")[-1]["is_quiet"])
    rows, totals = read(ledger_path, "requests"), read(ledger_path, "totals")[-1]

    # Every outcome occurred.
    outcomes = Counter(row["outcome"] for row in rows)
    assert outcomes == traffic.outcomes
    never_fit = outcomes["invalid_arg"] - 10
    assert never_fit > 0
    assert outcomes["unavailable"] > 0  # the queue was full
    assert outcomes["cancelled"] > 0
    assert outcomes["length"] > 100
    preemptions = sum(row["preemptions"] for row in rows)
    assert preemptions > 0

    # The sum is exact to the nanosecond, from the file alone.
    lines = sum(row["prefill_ns"] + row["decode_ns"] for row in rows)
    accounts = ("warmup", "preemption", "fault", "overrun", "open")
    system = sum(totals[f"{account}_ns"] for account in accounts)
    assert lines + system - totals["busy_ns"] == 0
    assert totals["open_ns"] == 0
    assert main(["usage", "check", str(ledger_path)]) == 0
    assert "system: 0 ns" in capsys.readouterr().out
    assert totals["preemption_ns"] == sum(row["recompute_ns"] for row in rows) > 0
    held = sum(row["kv_block_seconds"] for row in rows)
    assert held == pytest.approx(totals["kv_block_ns"] / 1e9, rel=1e-9)

    # The ledger, the clients and the metrics count the same tokens.
    tokens: Counter[str] = Counter()
    for row in rows:
        if row["outcome"] == "length":
            tokens[row["business_line"]] += row["output_tokens"]
    assert tokens == traffic.output_tokens
    cancelled = [row for row in rows if row["outcome"] == "cancelled"]
    assert sum(row["output_tokens"] for row in cancelled) >= traffic.cancelled_tokens
    ran = [row for row in rows if row["output_tokens"]]
    for kind in ("prompt", "cached", "output"):
        expected = sum(row[f"{kind}_tokens"] for row in ran)
        until(lambda kind=kind, n=expected: server.metric(f"{kind}_tokens_total", model) == n)
        for label in (*LINES[:3], "other"):
            of_line = [row for row in ran if _label(row) == label]
            expected = sum(row[f"{kind}_tokens"] for row in of_line)
            labels = dict(kind=kind, business_line=label)
            assert server.metric("line_tokens_total", model, **labels) == expected
    for outcome, count in outcomes.items():
        assert server.metric("requests_total", model, outcome=outcome) == count
    for reason, count in (("queue_full", outcomes["unavailable"]), ("kv_never_fits", never_fit)):
        assert server.metric("requests_refused_total", model, reason=reason) == count
    assert server.metric("preemptions_total", model) == preemptions
    for label in (*LINES[:3], "other"):
        of_line = [row for row in rows if _label(row) == label]
        busy = sum(row["prefill_ns"] + row["decode_ns"] for row in of_line) / 1e9
        counted = server.metric("line_busy_seconds_total", model, business_line=label)
        assert counted == pytest.approx(busy)
        held = sum(row["kv_block_seconds"] for row in of_line)
        counted = server.metric("line_kv_block_seconds_total", model, business_line=label)
        assert counted == pytest.approx(held)
    for account in ("warmup", "preemption", "overrun"):
        counted = server.metric("line_busy_seconds_total", model, business_line=f"_{account}")
        assert counted == pytest.approx(totals[f"{account}_ns"] / 1e9)
    assert any(row["cached_tokens"] and row["saved_ns"] for row in rows)


def _label(row: dict) -> str:
    return row["business_line"] if row["business_line"] in LINES[:3] else "other"


def test_failed_step_is_charged_to_a_system_account(server, model, ledger_path, capsys):
    (response,) = collect(
        server, "Hello", model=model, sampling={"seed": FAILS}, business_line="unlucky"
    )
    assert response.code == "INTERNAL"
    row = _row(ledger_path, "unlucky")
    assert (row["outcome"], row["prefill_ns"], row["decode_ns"]) == ("error", 0, 0)
    until(lambda: read(ledger_path, "totals")[-1]["fault_ns"] > 0)
    until(lambda: read(ledger_path, "totals")[-1]["is_quiet"])
    assert main(["usage", "check", str(ledger_path)]) == 0
    assert "system: 0 ns" in capsys.readouterr().out


def test_usage_waits_for_the_engine(server, model, ledger_path):
    """The engine learns later that a stop string ended the answer; usage equals the ledger."""
    prompt = "The capital of France is"
    greedy = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    text = complete(server, prompt, model=model, sampling=greedy)
    stop = text[len(text) // 2 :][:3]
    (response,) = collect(
        server,
        prompt,
        model=model,
        sampling={**greedy, "stop": [stop]},
        business_line="stopped",
        return_usage=True,
        return_finish_reason=True,
    )
    assert response.string("finish_reason") == "stop"
    usage = json.loads(response.string("usage"))
    row = _row(ledger_path, "stopped")
    assert usage["decode_ms"] == round(row["decode_ns"] / 1e6, 3) > 0
    assert usage["output_tokens"] == row["output_tokens"]


def _row(ledger_path, business_line: str) -> dict:
    def found() -> list[dict]:
        rows = read(ledger_path, "requests")
        return [row for row in rows if row["business_line"] == business_line]

    until(lambda: bool(found()))
    (row,) = found()
    return row


def test_trace_id_reaches_ledger_and_log(server, model, ledger_path):
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        results: list = []
        client.start_stream(lambda result, error: results.append(error or result))
        text = grpcclient.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"Hello"], dtype=np.object_))
        client.async_stream_infer(
            model,
            [text],
            request_id="of the client",
            parameters={
                "traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01",
                "business_line": "traced",
                "max_tokens": 2,
            },
        )
        until(lambda: bool(results))
        client.stop_stream()
    row = _row(ledger_path, "traced")
    assert (row["trace_id"], row["request_id"]) == (TRACE_ID, "of the client")
    lines = [line for line in server.log.read_text().splitlines() if TRACE_ID in line]
    (line,) = lines
    logged = json.loads(line)
    assert logged["level"] == "info"
    for name in ("key", "request_id", "business_line", "outcome", "output_tokens", "decode_ns"):
        assert logged[name] == row[name]


def test_killed_stub_loses_at_most_the_last_two_seconds(tiny_weights, tmp_path, capsys):
    """Uses its own server: Triton Server 2.51 cannot unload a model whose stub was killed."""
    write_model(
        tmp_path,
        "killed",
        model=tiny_weights,
        max_model_len=512,
        kv_cache_memory="8MiB",
        ledger_path=tmp_path / "ledger",
    )
    http, grpc, metrics = free_ports(3)
    answered: list[float] = []  # time of each answer
    with (tmp_path / "log").open("wb") as log, ThreadPoolExecutor(4) as pool:
        running = TritonServer(tmp_path, http, grpc, metrics, log=log)
        running.start()
        try:
            running.wait_until_ready(timeout=60)
            server = Server("", f"localhost:{grpc}", "", tmp_path / "log", running.process.pid)

            def ask() -> None:
                sampling = {"max_tokens": 20, "ignore_eos": True}
                while not collect(server, "Hello", model="killed", sampling=sampling)[-1].error:
                    answered.append(time.monotonic())

            clients = [pool.submit(ask) for _ in range(4)]
            until(lambda: len(answered) > 4 and answered[-1] - answered[0] > 4)
            (stub,) = stubs_of(server, "killed")
            killed = time.monotonic()
            stub.kill()
        finally:
            running.stop(timeout=1)
    assert all(client.exception() is None for client in clients)
    (path,) = (tmp_path / "ledger").glob("*.ledger")
    num_rows = len([*Ledger.read([path]).select("key", "requests")])
    assert num_rows >= sum(moment < killed - 2 for moment in answered) > 0
    assert main(["usage", "check", str(path)]) == 0
    assert "system: 0 ns" in capsys.readouterr().out
