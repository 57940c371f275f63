"""What the server shows under /metrics: Triton Server custom metrics.

Ours are named `tritium:`. Those of vLLM's Triton backend stand beside them under its names, where
the parameter REPORT_CUSTOM_METRICS is "true", as there.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from backend.engine import EngineStats
from backend.errors import ERRORS, RefusalReason
from backend.output import Usage
from backend.sequence import FinishReason, RequestClass

logger = logging.getLogger("tritium")

# How a request may end: as a sequence may, or with an error's code.
_OUTCOMES = sorted({*map(str, FinishReason), *(error.code.lower() for error in ERRORS)})
# vLLM's boundaries, in seconds.
_TTFT = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
_TPOT = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
_E2E = [
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
]
_QUEUE_TIME = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]


class Metrics:
    """Counts requests and tokens as requests end, and shows the engine's state as it is told.

    A metric of Triton Server takes a hop to the server's process, so a thread of its own makes
    them. Where Triton Server runs without metrics, nothing is counted.

    Args:
        model, version: Labels.
        max_model_len: Bounds vLLM's histograms of tokens.
        vllm: Whether vLLM's families are there.
    """

    def __init__(self, model: str, version: str, max_model_len: int, vllm: bool) -> None:
        self._labels = {"model": model, "version": version}
        self._families: list[Any] = []  # a metric lives as long as its family
        self._counted: dict[str, int] = {}  # of the engine's own counters
        self._vllm = vllm
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        try:
            self._create()
            if vllm:
                self._create_vllm(max_model_len)
        except pb_utils.TritonModelException as error:
            logger.warning(f"no custom metrics: {error}")
            return
        self._thread = threading.Thread(target=self._run, name="metrics")
        self._thread.start()

    def request_finished(
        self,
        outcome: str,
        usage: Usage | None = None,
        n: int = 1,
        gaps: list[float] | None = None,
        request_class: RequestClass = RequestClass.INTERACTIVE,
    ) -> None:
        """Count a request.

        Args:
            outcome: Its finish reason, or the code of its error.
            usage: What it used, where it ran.
            n: Its sampling parameter.
            gaps: Seconds between the tokens of its answers.
        """
        if not self._thread:
            return
        self._later(self._requests[outcome].increment, 1)
        if not usage or not usage.output_tokens:  # it never ran
            return
        self._later(self._prompt_tokens.increment, usage.prompt_tokens)
        self._later(self._cached_tokens.increment, usage.cached_tokens)
        self._later(self._output_tokens.increment, usage.output_tokens)
        self._later(self._queue_time[request_class].observe, usage.queue_ms / 1e3)
        if not self._vllm:
            return
        self._later(self._vllm_prompt_tokens.increment, usage.prompt_tokens)
        self._later(self._vllm_generation_tokens.increment, usage.output_tokens)
        self._later(self._vllm_ttft.observe, usage.ttft_ms / 1e3)
        for gap in gaps or ():
            self._later(self._vllm_tpot.observe, gap)
        self._later(self._vllm_e2e.observe, usage.total_ms / 1e3)
        self._later(self._vllm_request_prompt_tokens.observe, usage.prompt_tokens)
        self._later(self._vllm_request_generation_tokens.observe, usage.output_tokens)
        self._later(self._vllm_params_n.observe, n)

    def request_refused(self, reason: RefusalReason) -> None:
        """Count a request that a limit kept out, beside its error's code."""
        if self._thread:
            self._later(self._refused[reason].increment, 1)

    def prompt_tokenized(self) -> None:
        if self._thread:
            self._later(self._tokenized.increment, 1)

    def update(self, stats: EngineStats) -> None:
        """Set the gauges; called a few times a second, since `set` holds the GIL."""
        if not self._thread:
            return
        self._later(self._running.set, stats.num_running)
        self._later(self._waiting.set, stats.num_waiting)
        self._later(self._blocks.set, stats.num_blocks)
        self._later(self._used_blocks.set, stats.num_used_blocks)
        self._later(self._cached_blocks.set, stats.num_cached_blocks)
        for name, counters in self._engine_counters.items():
            value = getattr(stats, name)
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
        """Count what is to be counted, then end."""
        if self._thread:
            self._calls.put(None)
            self._thread.join()

    def _later(self, function: Callable[[float], None], value: float) -> None:
        self._calls.put(partial(function, value))

    def _run(self) -> None:
        while call := self._calls.get():
            call()

    def _create(self) -> None:
        counter, gauge = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE
        requests = self._family(
            "tritium:requests_total", "Requests that ended, by outcome", counter
        )
        self._requests = {
            outcome: requests.Metric(labels={**self._labels, "outcome": outcome})
            for outcome in _OUTCOMES
        }
        refused = self._family(
            "tritium:requests_refused_total", "Requests that a limit kept out, by reason", counter
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
            request_class: queue_time.Metric(
                labels={**self._labels, "request_class": request_class.name.lower()},
                buckets=_QUEUE_TIME,
            )
            for request_class in RequestClass
        }
        self._prompt_tokens = self._metric(
            "tritium:prompt_tokens_total", "Prompt tokens of requests that ran", counter
        )
        self._cached_tokens = self._metric(
            "tritium:cached_tokens_total", "Prompt tokens found in the prefix cache", counter
        )
        self._output_tokens = self._metric(
            "tritium:output_tokens_total", "Tokens of answers that ended", counter
        )
        # By what `EngineStats` calls them.
        self._engine_counters = {
            "num_preemptions": [
                self._metric(
                    "tritium:preemptions_total",
                    "Sequences sent back to the queue for want of blocks",
                    counter,
                )
            ],
            "num_draft_tokens": [
                self._metric("tritium:draft_tokens_total", "Draft tokens verified", counter)
            ],
            "num_accepted_tokens": [
                self._metric("tritium:accepted_tokens_total", "Draft tokens accepted", counter)
            ],
        }
        self._running = self._metric("tritium:requests_running", "Requests in the batch", gauge)
        self._waiting = self._metric("tritium:requests_waiting", "Requests in the queue", gauge)
        self._blocks = self._metric("tritium:kv_blocks", "Blocks of the KV cache", gauge)
        self._used_blocks = self._metric(
            "tritium:kv_blocks_used", "Blocks that requests hold", gauge
        )
        self._cached_blocks = self._metric(
            "tritium:kv_blocks_cached", "Blocks whose content can be found and reused", gauge
        )

        # What Triton Server makes its ORCA load header of.
        load = self._family("nv_trt_llm_kv_cache_block_metrics", "The KV cache's blocks", gauge)
        self._load = {
            kind: load.Metric(labels={**self._labels, "kv_cache_block_type": kind})
            for kind in ("tokens_per", "used", "max")
        }

    def _create_vllm(self, max_model_len: int) -> None:
        counter = pb_utils.MetricFamily.COUNTER
        self._vllm_prompt_tokens = self._metric(
            "vllm:prompt_tokens_total", "Number of prefill tokens processed.", counter
        )
        self._vllm_generation_tokens = self._metric(
            "vllm:generation_tokens_total", "Number of generation tokens processed.", counter
        )
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
        what = name.removeprefix("vllm:").replace("_", " ")
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
