"""Joins what the front knows of a request with what the engine has measured: its bill.

A bill is complete when the front is done with the request and the engine with all of its answers,
whichever comes last. Then it goes to the metrics, the ledger and, where wanted, the log.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Protocol

from tritium.backend.accounts.ledger import Ledger, RequestRow, TotalsRow
from tritium.backend.accounts.request_usage import RequestUsage
from tritium.backend.engine.request import EngineOutput, Figures
from tritium.backend.engine.usage import Totals

logger = logging.getLogger("tritium")

_NS_PER_HOUR = 3_600_000_000_000
_NO_USAGE = RequestUsage(0, 0, 0, 0.0, 0.0, 0.0)


class Counters(Protocol):
    """Counts for those who watch."""

    def request_finished(self, row: RequestRow, gaps: list[float]) -> None: ...

    def count_totals(self, totals: Totals) -> None: ...


@dataclass(slots=True, eq=False)
class Bill:
    """A request's, from its arrival to its row. The front fills in what it knows of it."""

    number: int
    request_id: str
    arrival: float  # seconds since 1970
    trace_id: str = ""
    business_line: str = ""
    request_class: str = ""
    n: int = 1
    engine_ids: set[int] = field(default_factory=set)  # of answers that the engine has not ended
    figures: list[Figures] = field(default_factory=list)  # of those that it has
    outcome: str = ""  # set when the front is done
    usage: RequestUsage = _NO_USAGE
    gaps: list[float] = field(default_factory=list)

    @property
    def busy_ns(self) -> int:
        return sum(f.prefill_ns + f.decode_ns for f in self.figures)


class Billing:
    """Collects bills. All but `open` and `close` of what never ran is for the output thread.

    Args:
        metrics: Counts each request.
        ledger: Keeps each request, if there is one.
        block_bytes: Of one block of the KV cache.
        price_per_hour: Of the device; None: bills have no cost.
        logs_requests: Whether each request is a line of the log.
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
        self._running: dict[int, Bill] = {}  # by the engine's request ids
        self._unwritten: set[Bill] = set()  # those with figures

    def open(self, request_id: str) -> Bill:
        return Bill(next(self._numbers), request_id, time.time())

    def submitted(self, bill: Bill, engine_ids: Iterable[int]) -> None:
        bill.engine_ids.update(engine_ids)
        for engine_id in engine_ids:
            self._running[engine_id] = bill

    def withdrawn(self, bill: Bill) -> None:
        """The engine has not taken it."""
        for engine_id in bill.engine_ids:
            del self._running[engine_id]
        bill.engine_ids.clear()

    def engine_ended(self, output: EngineOutput) -> None:
        """To be called for all last outputs, in their order, before they are answered."""
        bill = self._running.pop(output.request_id, None)
        if bill is None:  # never: but the thread that calls serves all
            logger.error(f"no bill for the engine's request {output.request_id}")
            return
        bill.engine_ids.remove(output.request_id)
        bill.figures.append(output.figures)
        self._unwritten.add(bill)
        self._write_if_complete(bill)

    def close(
        self,
        bill: Bill,
        outcome: str,
        usage: RequestUsage | None = None,
        gaps: Iterable[float] = (),
    ) -> None:
        """The front is done with the request."""
        bill.outcome, bill.usage, bill.gaps = outcome, usage or _NO_USAGE, list(gaps)
        self._write_if_complete(bill)

    def usage(self, bill: Bill, usage: RequestUsage) -> RequestUsage:
        """With what the engine has measured, as far as it has ended the answers."""
        figures = bill.figures
        price = self._price_per_hour
        return replace(
            usage,
            prefill_ms=_ms(f.prefill_ns for f in figures),
            decode_ms=_ms(f.decode_ns for f in figures),
            recompute_ms=_ms(f.recompute_ns for f in figures),
            saved_ms=_ms(f.saved_ns for f in figures),
            kv_block_seconds=round(sum(f.block_seconds for f in figures), 6),
            peak_kv_bytes=sum(f.peak_blocks for f in figures) * self._block_bytes,
            peak_own_kv_bytes=sum(f.peak_own_blocks for f in figures) * self._block_bytes,
            cost=None if price is None else bill.busy_ns / _NS_PER_HOUR * price,
        )

    def totals(self, totals: Totals) -> None:
        """To be called before what the engine ended after them."""
        self._metrics.count_totals(totals)
        if not self._ledger:
            return
        self._ledger.add(
            TotalsRow(
                time=time.time(),
                busy_ns=totals.busy,
                idle_ns=totals.idle,
                open_ns=totals.open + sum(bill.busy_ns for bill in self._unwritten),
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
        row = _row(bill, self._server)
        self._metrics.request_finished(row, bill.gaps)
        if self._ledger:
            self._ledger.add(row)
        if self._logs_requests:
            logger.info("request ended", extra={"fields": asdict(row)})


def _ms(durations: Iterable[int]) -> float:
    return round(sum(durations) / 1e6, 3)


def _row(bill: Bill, server: str) -> RequestRow:
    figures, usage = bill.figures, bill.usage
    return RequestRow(
        key=f"{server}/{bill.number}",
        request_id=bill.request_id,
        trace_id=bill.trace_id,
        business_line=bill.business_line,
        request_class=bill.request_class,
        arrival=bill.arrival,
        outcome=bill.outcome,
        n=bill.n,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        queue_ms=usage.queue_ms,
        ttft_ms=usage.ttft_ms,
        total_ms=usage.total_ms,
        prefill_ns=sum(f.prefill_ns for f in figures),
        decode_ns=sum(f.decode_ns for f in figures),
        recompute_ns=sum(f.recompute_ns for f in figures),
        saved_ns=sum(f.saved_ns for f in figures),
        kv_block_seconds=sum(f.block_seconds for f in figures),
        peak_blocks=sum(f.peak_blocks for f in figures),
        peak_own_blocks=sum(f.peak_own_blocks for f in figures),
        preemptions=sum(f.num_preemptions for f in figures),
    )
