"""Custom metrics of Triton Server, which it serves under /metrics.

Tritium's own start with `tritium:`. The metrics of vLLM's Triton Server backend are added, under
vLLM's names, if the parameter REPORT_CUSTOM_METRICS is "true", as in that backend.
"""

import ctypes
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import triton_python_backend_utils as pb_utils

from tritium.backend.accounts.request_usage import RequestRow
from tritium.backend.engine.engine import EngineStats, StepRecord
from tritium.backend.engine.request import FinishReason, RequestClass
from tritium.backend.engine.usage import DeviceTotals
from tritium.backend.errors import ERRORS, RefusalReason
from tritium.backend.supervisor import Supervisor

logger = logging.getLogger("tritium")

# How a request may end: a finish reason or an error's code.
_OUTCOMES = sorted({*map(str, FinishReason), *(error.code.lower() for error in ERRORS)})
# Histogram boundaries in seconds, those of vLLM.
_TTFT = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
_TPOT = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
_E2E = [
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
]
_QUEUE_TIME = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]


_POWERS = [float(2**i) for i in range(15)]
_KINDS = {
    "prompt": "Prompt tokens of requests that ran",
    "cached": "Prompt tokens found in the prefix cache",
    "output": "Tokens of answers that ended",
}


class _Line(NamedTuple):
    """The counters of a business line."""

    busy: Any
    kv_block_seconds: Any
    saved: Any
    tokens: dict[str, Any]  # by kind


class Metrics:
    """Counts requests and tokens as requests end, and shows the engine's state.

    Each update of a metric is a call to Triton Server's process, so a thread of its own makes them.
    If Triton Server runs without metrics, nothing is counted.

    Args:
        model, version: Labels of all metrics.
        max_model_len: The upper bound of vLLM's token histograms.
        vllm: Whether to add vLLM's metrics.
        business_lines: Business lines with a label of their own; all others count as "other".
        supervisor: Starts the thread.
    """

    def __init__(
        self,
        model: str,
        version: str,
        max_model_len: int,
        vllm: bool,
        business_lines: list[str],
        supervisor: Supervisor,
    ) -> None:
        self._labels = {"model": model, "version": version}
        # A metric dies with its family, so these are kept, even beyond this object's life:
        # destroying one crashes a process that exits, and if an old and a new instance of a model
        # have the same metrics, the server (2.51) goes on using what it has removed.
        self._families: list[Any] = []
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._families))
        self._counted: dict[str, int] = {}  # last values of the engine's counters
        self._vllm = vllm
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        try:
            self._create(business_lines)
            if vllm:
                self._create_vllm(max_model_len)
        except pb_utils.TritonModelException as error:
            logger.warning(f"no custom metrics: {error}")
            return
        self._thread = supervisor.start("metrics", self._run, daemon=False)

    def request_finished(self, row: RequestRow, gaps: list[float]) -> None:
        """Count a request.

        Args:
            row: The request's usage.
            gaps: Seconds between the tokens of its answers.
        """
        if not self._thread:
            return
        self._later(self._requests[row.outcome].increment, 1)
        line = self._lines.get(row.business_line, self._lines["other"])
        self._later(line.busy.increment, row.busy_ns / 1e9)
        self._later(line.kv_block_seconds.increment, row.kv_block_seconds)
        self._later(line.saved.increment, row.saved_ns / 1e9)
        if not row.output_tokens:  # it never ran
            return
        for kind in _KINDS:
            num_tokens = getattr(row, f"{kind}_tokens")
            self._later(self._tokens[kind].increment, num_tokens)
            self._later(line.tokens[kind].increment, num_tokens)
        self._later(self._queue_time[row.request_class].observe, row.queue_ms / 1e3)
        self._later(self._ttft.observe, row.ttft_ms / 1e3)
        self._later(self._e2e.observe, row.total_ms / 1e3)
        if gaps:
            self._later(self._tpot.observe, sum(gaps) / len(gaps))
            self._later(self._stall.observe, max(gaps))
        if not self._vllm:
            return
        self._later(self._vllm_ttft.observe, row.ttft_ms / 1e3)
        for gap in gaps:
            self._later(self._vllm_tpot.observe, gap)
        self._later(self._vllm_e2e.observe, row.total_ms / 1e3)
        self._later(self._vllm_request_prompt_tokens.observe, row.prompt_tokens)
        self._later(self._vllm_request_generation_tokens.observe, row.output_tokens)
        self._later(self._vllm_params_n.observe, row.n)

    def request_refused(self, reason: RefusalReason) -> None:
        """Count a request refused by a limit, in addition to its error's code."""
        if self._thread:
            self._later(self._refused[reason].increment, 1)

    def prompt_tokenized(self) -> None:
        if self._thread:
            self._later(self._tokenized.increment, 1)

    def count_totals(self, totals: DeviceTotals) -> None:
        """Count the device time that is billed to no request."""
        if not self._thread:
            return
        for account, counter in self._accounts.items():
            value = getattr(totals, account)
            self._later(counter.increment, (value - self._counted.get(account, 0)) / 1e9)
            self._counted[account] = value

    def update(self, stats: EngineStats, steps: list[StepRecord]) -> None:
        """Set the gauges; called a few times a second, since `set` holds the GIL.

        Args:
            steps: The steps since the last call.
        """
        if not self._thread:
            return
        for step in steps:
            self._later(self._batch_size.observe, step.num_sequences)
            self._later(self._step_tokens.observe, step.num_tokens)
            self._later(self._step_seconds.observe, step.duration_ns / 1e9)
        self._later(self._alive.set, int(stats.is_alive))
        self._later(self._running.set, stats.num_running)
        self._later(self._waiting.set, stats.num_waiting)
        self._later(self._blocks.set, stats.num_blocks)
        self._later(self._used_blocks.set, stats.num_used_blocks)
        self._later(self._free_blocks.set, stats.num_blocks - stats.num_used_blocks)
        self._later(self._cached_blocks.set, stats.num_cached_blocks)
        for name, counters in self._engine_counters.items():
            value = attrgetter(name)(stats)
            for counter in counters:
                self._later(counter.increment, value - self._counted.get(name, 0))
            self._counted[name] = value
        for kind, value in (
            ("tokens_per", stats.block_size),
            ("used", stats.num_used_blocks),
            ("max", stats.num_blocks),
        ):
            self._later(self._load[kind].set, value)

    def close(self) -> None:
        """Make all queued updates, then stop."""
        if self._thread:
            self._calls.put(None)
            self._thread.join()

    def _later(self, function: Callable[[float], None], value: float) -> None:
        self._calls.put(partial(function, value))

    def _run(self) -> None:
        while call := self._calls.get():
            call()

    def _create(self, business_lines: list[str]) -> None:
        counter, gauge = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE
        requests = self._family(
            "tritium:requests_total", "Requests that ended, by outcome", counter
        )
        self._requests = {
            outcome: requests.Metric(labels={**self._labels, "outcome": outcome})
            for outcome in _OUTCOMES
        }
        refused = self._family(
            "tritium:requests_refused_total", "Requests refused by a limit, by reason", counter
        )
        self._refused = {
            reason: refused.Metric(labels={**self._labels, "reason": str(reason)})
            for reason in RefusalReason
        }
        self._tokenized = self._metric(
            "tritium:prompts_tokenized_total", "Prompts that were tokenised", counter
        )
        queue_time = self._family(
            "tritium:queue_time_seconds",
            "Seconds from arrival to the first step, of requests that ran",
            pb_utils.MetricFamily.HISTOGRAM,
        )
        self._queue_time = {
            request_class.name.lower(): queue_time.Metric(
                labels={**self._labels, "request_class": request_class.name.lower()},
                buckets=_QUEUE_TIME,
            )
            for request_class in RequestClass
        }
        self._tokens = {
            kind: self._metric(f"tritium:{kind}_tokens_total", description, counter)
            for kind, description in _KINDS.items()
        }
        # Keyed by the attribute of `EngineStats`.
        self._engine_counters = {
            "num_preemptions": [
                self._metric(
                    "tritium:preemptions_total",
                    "Sequences sent back to the queue for lack of KV blocks",
                    counter,
                )
            ],
            "num_draft_tokens": [
                self._metric("tritium:draft_tokens_total", "Draft tokens verified", counter)
            ],
            "num_accepted_tokens": [
                self._metric("tritium:accepted_tokens_total", "Draft tokens accepted", counter)
            ],
            "prefix_overlap.num_tokens": [
                self._metric(
                    "tritium:prefix_query_tokens_total",
                    "Prompt tokens looked up in the prefix cache's shadow index",
                    counter,
                )
            ],
            "prefix_overlap.num_pool_tokens": [
                self._metric(
                    "tritium:prefix_pool_tokens_total",
                    "Looked-up prompt tokens reusable with the KV cache's memory",
                    counter,
                )
            ],
            "prefix_overlap.num_window_tokens": [
                self._metric(
                    "tritium:prefix_window_tokens_total",
                    "Looked-up prompt tokens reusable with a memory of 65536 blocks",
                    counter,
                )
            ],
        }
        self._create_lines(business_lines)
        self._running = self._metric("tritium:requests_running", "Requests in the batch", gauge)
        self._waiting = self._metric("tritium:requests_waiting", "Requests in the queue", gauge)
        self._blocks = self._metric("tritium:kv_blocks", "Blocks of the KV cache", gauge)
        self._used_blocks = self._metric(
            "tritium:kv_blocks_used", "Blocks that requests hold", gauge
        )
        self._free_blocks = self._metric(
            "tritium:kv_blocks_free", "Blocks that no request holds", gauge
        )
        self._cached_blocks = self._metric(
            "tritium:kv_blocks_cached", "Blocks whose content can be reused by a prefix", gauge
        )
        self._alive = self._metric("tritium:engine_alive", "1 while the engine can serve", gauge)
        self._ttft = self._histogram("tritium:time_to_first_token_seconds", _TTFT)
        self._tpot = self._histogram("tritium:time_per_output_token_seconds", _TPOT)
        self._stall = self._histogram("tritium:longest_inter_token_seconds", _TPOT)
        self._e2e = self._histogram("tritium:e2e_seconds", _E2E)
        self._batch_size = self._histogram("tritium:step_sequences", _POWERS[:11])
        self._step_tokens = self._histogram("tritium:step_tokens", _POWERS)
        self._step_seconds = self._histogram("tritium:step_seconds", _TTFT)

        # Triton Server builds its ORCA load header from these.
        load = self._family("nv_trt_llm_kv_cache_block_metrics", "The KV cache's blocks", gauge)
        self._load = {
            kind: load.Metric(labels={**self._labels, "kv_cache_block_type": kind})
            for kind in ("tokens_per", "used", "max")
        }

    def _create_lines(self, business_lines: list[str]) -> None:
        counter = pb_utils.MetricFamily.COUNTER
        tokens = self._family(
            "tritium:line_tokens_total", "Tokens of business lines, by kind", counter
        )
        busy = self._family(
            "tritium:line_busy_seconds_total",
            "Device time by business line; names that begin with _ are system accounts",
            counter,
        )
        blocks = self._family(
            "tritium:line_kv_block_seconds_total", "KV blocks held, by business line", counter
        )
        saved = self._family(
            "tritium:line_saved_seconds_total", "Time saved by the prefix cache", counter
        )
        self._lines = {}
        for name in dict.fromkeys([*business_lines, "other"]):
            labels = {**self._labels, "business_line": name}
            self._lines[name] = _Line(
                busy.Metric(labels=labels),
                blocks.Metric(labels=labels),
                saved.Metric(labels=labels),
                {kind: tokens.Metric(labels={**labels, "kind": kind}) for kind in _KINDS},
            )
        # Keyed by the attribute of `DeviceTotals`.
        self._accounts = {
            name: busy.Metric(labels={**self._labels, "business_line": f"_{name}"})
            for name in ("warmup", "preemption", "fault", "overrun", "idle")
        }

    def _create_vllm(self, max_model_len: int) -> None:
        counter = pb_utils.MetricFamily.COUNTER
        for attribute, name, description in (
            ("num_prompt_tokens", "prompt", "Number of prefill tokens processed."),
            ("num_output_tokens", "generation", "Number of generation tokens processed."),
        ):
            metric = self._metric(f"vllm:{name}_tokens_total", description, counter)
            self._engine_counters[attribute] = [metric]
        for what in ("draft", "accepted"):
            self._engine_counters[f"num_{what}_tokens"].append(
                self._metric(
                    f"vllm:spec_decode_num_{what}_tokens_total",
                    f"Number of {what} tokens in speculative decoding.",
                    counter,
                )
            )
        self._vllm_ttft = self._histogram("vllm:time_to_first_token_seconds", _TTFT)
        self._vllm_tpot = self._histogram("vllm:time_per_output_token_seconds", _TPOT)
        self._vllm_e2e = self._histogram("vllm:e2e_request_latency_seconds", _E2E)
        lengths = [float(bound) for bound in one_two_five(max_model_len)]
        self._vllm_request_prompt_tokens = self._histogram("vllm:request_prompt_tokens", lengths)
        self._vllm_request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", lengths
        )
        self._vllm_params_n = self._histogram("vllm:request_params_n", [1.0, 2.0, 5.0, 10.0, 20.0])

    def _family(self, name: str, description: str, kind: Any) -> Any:
        family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        self._families.append(family)
        return family

    def _metric(self, name: str, description: str, kind: Any) -> Any:
        return self._family(name, description, kind).Metric(labels=self._labels)

    def _histogram(self, name: str, buckets: list[float]) -> Any:
        what = name.partition(":")[2].replace("_", " ")
        family = self._family(name, f"Histogram of {what}.", pb_utils.MetricFamily.HISTOGRAM)
        return family.Metric(labels=self._labels, buckets=buckets)


def one_two_five(largest: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power > largest:
                return
            yield factor * power
        power *= 10
