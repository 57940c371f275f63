"""Bills: when a request's row is written, and what totals say about unwritten ones."""

import json
import logging

import pytest

from tritium.backend.accounts.billing import Bill, Billing
from tritium.backend.accounts.ledger import TotalsRow
from tritium.backend.accounts.request_usage import AnswerUsage, RequestRow
from tritium.backend.engine.request import EngineOutput, FinishReason, SequenceUsage
from tritium.backend.engine.usage import DeviceTotals
from tritium.backend.host.logs import JsonFormatter

ANSWERS = AnswerUsage(10, 0, 5, 1.0, 2.0, 3.0)
TOTALS = DeviceTotals(
    busy=100, idle=0, open=7, warmup=0, preemption=0, fault=0, overrun=0, block_ns=0, is_quiet=True
)


class Kept:
    """A ledger and metrics that record their calls."""

    server = "s"

    def __init__(self) -> None:
        self.rows: list[RequestRow | TotalsRow] = []
        self.counted: list[RequestRow] = []
        self.totals: list[DeviceTotals] = []

    def add(self, row) -> None:
        self.rows.append(row)

    def request_finished(self, row, gaps) -> None:
        self.counted.append(row)

    def count_totals(self, totals) -> None:
        self.totals.append(totals)


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def billing(kept):
    return Billing(kept, kept, block_bytes=100, price_per_hour=3600.0)


def ended(engine_id: int, decode_ns: int = 20) -> EngineOutput:
    figures = SequenceUsage(
        prefill_ns=10, decode_ns=decode_ns, block_seconds=0.5, peak_blocks=3, num_preemptions=1
    )
    return EngineOutput(engine_id, [], FinishReason.LENGTH, usage=figures)


def open_bill(billing: Billing, *engine_ids: int) -> Bill:
    bill = billing.open("r")
    billing.submitted(bill, engine_ids)
    return bill


@pytest.mark.parametrize("engine_first", [True, False])
def test_row_is_written_when_front_and_engine_are_done(billing, kept, engine_first):
    bill = open_bill(billing, 7)
    steps = [lambda: billing.engine_ended(ended(7)), lambda: billing.close(bill, "length", ANSWERS)]
    first, second = steps if engine_first else steps[::-1]
    first()
    assert kept.rows == []
    second()
    (row,) = kept.rows
    assert kept.counted == [row]
    assert (row.key, row.request_id, row.outcome) == ("s/0", "r", "length")
    assert (row.prefill_ns, row.decode_ns, row.output_tokens) == (10, 20, 5)


def test_several_answers_make_one_row(billing, kept):
    bill = open_bill(billing, 7, 8)
    billing.engine_ended(ended(7))
    billing.close(bill, "stop", ANSWERS)
    assert kept.rows == []
    billing.engine_ended(ended(8, decode_ns=30))
    (row,) = kept.rows
    assert (row.decode_ns, row.kv_block_seconds, row.peak_blocks) == (50, 1.0, 6)
    assert row.preemptions == billing.usage(bill)["preemptions"] == 2


def test_refused_request_has_a_row(billing, kept):
    billing.close(billing.open("r"), "invalid_arg")
    withdrawn = open_bill(billing, 7)
    billing.withdrawn(withdrawn)
    billing.close(withdrawn, "unavailable")
    assert [row.outcome for row in kept.rows] == ["invalid_arg", "unavailable"]
    assert [row.busy_ns for row in kept.rows] == [0, 0]


def test_totals_include_bills_without_a_row(billing, kept):
    bill = open_bill(billing, 7)
    billing.engine_ended(ended(7))
    billing.totals(TOTALS)
    billing.close(bill, "length", ANSWERS)
    billing.totals(TOTALS)
    before, _, after = kept.rows
    assert (before.open_ns, before.is_quiet) == (7 + 30, 0)
    assert (after.open_ns, after.is_quiet) == (7, 1)
    assert kept.totals == [TOTALS, TOTALS]


def test_usage_joins_front_and_engine(billing):
    bill = open_bill(billing, 7)
    billing.engine_ended(ended(7, decode_ns=1_990_000_000 - 10))
    billing.close(bill, "length", ANSWERS)
    assert billing.usage(bill) == {
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "output_tokens": 5,
        "queue_ms": 1.0,
        "ttft_ms": 2.0,
        "total_ms": 3.0,
        "preemptions": 1,
        "prefill_ms": 0.0,
        "decode_ms": 1990.0,
        "recompute_ms": 0.0,
        "saved_ms": 0.0,
        "kv_block_seconds": 0.5,
        "peak_kv_bytes": 300,
        "peak_own_kv_bytes": 0,
        "cost": 1.99,  # at 1 per second
    }
    assert Billing(Kept()).usage(bill)["cost"] is None


def test_output_without_a_bill_is_logged(billing, kept, caplog):
    billing.engine_ended(ended(99))
    assert "no bill for the engine's request 99" in caplog.text
    assert kept.rows == []


def test_each_request_is_a_json_line(kept):
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("tritium")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        billing = Billing(kept, logs_requests=True)
        billing.close(billing.open("r"), "invalid_arg")
        logger.error("a line\nof two")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    request, other = (json.loads(JsonFormatter().format(record)) for record in records)
    assert request["message"] == "request ended"
    assert (request["request_id"], request["outcome"]) == ("r", "invalid_arg")
    assert (other["level"], other["message"]) == ("error", "a line\nof two")
    assert "\n" not in JsonFormatter().format(records[1])
