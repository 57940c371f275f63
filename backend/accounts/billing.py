"""Bills: joins what the front knows about a request with what the engine measured.

A bill is complete once the front is done with the request and the engine has ended all of its
sequences. Its row then goes to the metrics, the ledger and, if configured, the log.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Protocol

from tritium.backend.accounts.ledger import Ledger, TotalsRow
from tritium.backend.accounts.request_usage import AnswerUsage, RequestRow
from tritium.backend.engine.request import EngineOutput, SequenceUsage
from tritium.backend.engine.usage import DeviceTotals

logger = logging.getLogger("tritium")


class Counters(Protocol):
    """Counts for the metrics."""

    def request_finished(self, row: RequestRow, gaps: list[float]) -> None: ...

    def count_totals(self, totals: DeviceTotals) -> None: ...


@dataclass(slots=True, eq=False)
class Bill:
    """An open bill: from a request's arrival until its row is written."""

    number: int
    request_id: str
    arrival: float  # seconds since 1970

    # -- set by the front, as soon as it has read the request --
    trace_id: str = ""
    business_line: str = ""
    request_class: str = ""
    n: int = 1

    # -- set by Billing --
    engine_ids: set[int] = field(default_factory=set)  # sequences that have not ended
    device: SequenceUsage = field(
        default_factory=SequenceUsage
    )  # sum over the sequences that have ended
    outcome: str = ""  # "": the front is not done
    answers: AnswerUsage = field(default_factory=AnswerUsage)
    gaps: list[float] = field(default_factory=list)  # seconds between tokens

    def row(self, server: str) -> RequestRow:
        device = self.device
        return RequestRow(
            key=f"{server}/{self.number}",
            request_id=self.request_id,
            trace_id=self.trace_id,
            business_line=self.business_line,
            request_class=self.request_class,
            arrival=self.arrival,
            outcome=self.outcome,
            n=self.n,
            **self.answers._asdict(),
            prefill_ns=device.prefill_ns,
            decode_ns=device.decode_ns,
            recompute_ns=device.recompute_ns,
            saved_ns=device.saved_ns,
            kv_block_seconds=device.block_seconds,
            peak_blocks=device.peak_blocks,
            peak_own_blocks=device.peak_own_blocks,
            preemptions=device.num_preemptions,
        )


class Billing:
    """Collects bills.

    The output thread calls everything except `open`, `submitted`, `withdrawn`, and `close` for a
    request that never reached the engine.

    Args:
        metrics: Counts each request.
        ledger: Stores each request's row; None: rows are not stored.
        block_bytes: Size of a KV block.
        price_per_hour: Price of the device; None: usage has no cost.
        logs_requests: Whether each request is written to the log.
    """

    def __init__(
        self,
        metrics: Counters,
        ledger: Ledger | None = None,
        block_bytes: int = 0,
        price_per_hour: float | None = None,
        logs_requests: bool = False,
    ) -> None:
        self._metrics = metrics
        self._ledger = ledger
        self._block_bytes = block_bytes
        self._price_per_hour = price_per_hour
        self._logs_requests = logs_requests
        self._server = ledger.server if ledger else ""
        self._numbers = count()
        self._running: dict[int, Bill] = {}  # by the engine's request id
        self._unwritten: set[Bill] = set()  # bills without a row of which a sequence has ended

    def open(self, request_id: str) -> Bill:
        return Bill(next(self._numbers), request_id, time.time())

    def submitted(self, bill: Bill, engine_ids: Iterable[int]) -> None:
        bill.engine_ids.update(engine_ids)
        for engine_id in engine_ids:
            self._running[engine_id] = bill

    def withdrawn(self, bill: Bill) -> None:
        """The engine has refused the request."""
        for engine_id in bill.engine_ids:
            del self._running[engine_id]
        bill.engine_ids.clear()

    def engine_ended(self, output: EngineOutput) -> None:
        """Take in a sequence's last output; call it in the engine's order, before answering."""
        bill = self._running.pop(output.request_id, None)
        if bill is None:  # must not happen, and must not end the output thread
            logger.error(f"no bill for the engine's request {output.request_id}")
            return
        bill.engine_ids.remove(output.request_id)
        bill.device = SequenceUsage.total([bill.device, output.usage])
        self._unwritten.add(bill)
        self._write_if_complete(bill)

    def close(
        self,
        bill: Bill,
        outcome: str,
        answers: AnswerUsage | None = None,
        gaps: Iterable[float] = (),
    ) -> None:
        """The front is done with the request; without `answers`, its tokens and times are 0."""
        bill.outcome, bill.answers, bill.gaps = outcome, answers or AnswerUsage(), list(gaps)
        self._write_if_complete(bill)

    def usage(self, bill: Bill) -> dict[str, float | None]:
        """The `usage` output; complete once the engine has ended all of the sequences."""
        return bill.row(self._server).usage(self._block_bytes, self._price_per_hour)

    def totals(self, totals: DeviceTotals) -> None:
        """Take in the engine's totals; call it before `engine_ended` for anything later."""
        self._metrics.count_totals(totals)
        if not self._ledger:
            return
        self._ledger.add(
            TotalsRow(
                time=time.time(),
                busy_ns=totals.busy,
                idle_ns=totals.idle,
                open_ns=totals.open + sum(bill.device.busy_ns for bill in self._unwritten),
                warmup_ns=totals.warmup,
                preemption_ns=totals.preemption,
                fault_ns=totals.fault,
                overrun_ns=totals.overrun,
                kv_block_ns=totals.block_ns,
                is_quiet=int(totals.is_quiet and not self._unwritten),
            )
        )

    def _write_if_complete(self, bill: Bill) -> None:
        if bill.engine_ids or not bill.outcome:
            return
        self._unwritten.discard(bill)
        row = bill.row(self._server)
        self._metrics.request_finished(row, bill.gaps)
        if self._ledger:
            self._ledger.add(row)
        if self._logs_requests:
            logger.info("request ended", extra={"fields": asdict(row)})
