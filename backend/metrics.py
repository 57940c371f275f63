"""What the server shows under /metrics: Triton Server custom metrics, named `tritium:`."""

import logging
from typing import Any

import triton_python_backend_utils as pb_utils

from backend.engine import EngineStats
from backend.output import Usage

logger = logging.getLogger("tritium")

_OUTCOMES = [
    "stop",
    "length",
    "cancelled",
    "shutdown",
    "error",
    "invalid_arg",
    "unsupported",
    "unavailable",
    "internal",
]


class Metrics:
    """Counts requests and tokens as requests end, and shows the engine's state as it is told.

    Where Triton Server runs without metrics, nothing is counted.
    """

    def __init__(self, model: str, version: str) -> None:
        self._labels = {"model": model, "version": version}
        self._families: list[Any] = []  # a metric lives as long as its family
        self._num_preemptions = 0
        try:
            self._create()
            self._enabled = True
        except pb_utils.TritonModelException as error:
            logger.warning(f"no custom metrics: {error}")
            self._enabled = False

    def request_finished(self, outcome: str, usage: Usage | None) -> None:
        if not self._enabled:
            return
        self._requests[outcome].increment(1)
        if usage and usage.output_tokens:  # not of those that never ran
            self._prompt_tokens.increment(usage.prompt_tokens)
            self._cached_tokens.increment(usage.cached_tokens)
            self._output_tokens.increment(usage.output_tokens)

    def update(self, stats: EngineStats) -> None:
        """Set the gauges; called a few times a second, since `set` holds the GIL."""
        if not self._enabled:
            return
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._blocks.set(stats.num_blocks)
        self._used_blocks.set(stats.num_used_blocks)
        self._cached_blocks.set(stats.num_cached_blocks)
        self._preemptions.increment(stats.num_preemptions - self._num_preemptions)
        self._num_preemptions = stats.num_preemptions

    def _create(self) -> None:
        counter, gauge = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE
        requests = self._family("requests_total", "Requests that ended, by outcome", counter)
        self._requests = {
            outcome: requests.Metric(labels={**self._labels, "outcome": outcome})
            for outcome in _OUTCOMES
        }
        self._prompt_tokens = self._metric(
            "prompt_tokens_total", "Prompt tokens of requests that ran", counter
        )
        self._cached_tokens = self._metric(
            "cached_tokens_total", "Prompt tokens found in the prefix cache", counter
        )
        self._output_tokens = self._metric(
            "output_tokens_total", "Tokens of answers that ended", counter
        )
        self._preemptions = self._metric(
            "preemptions_total", "Sequences sent back to the queue for want of blocks", counter
        )
        self._running = self._metric("requests_running", "Requests in the batch", gauge)
        self._waiting = self._metric("requests_waiting", "Requests in the queue", gauge)
        self._blocks = self._metric("kv_blocks", "Blocks of the KV cache", gauge)
        self._used_blocks = self._metric("kv_blocks_used", "Blocks that requests hold", gauge)
        self._cached_blocks = self._metric(
            "kv_blocks_cached", "Blocks whose content can be found and reused", gauge
        )

    def _family(self, name: str, description: str, kind: Any) -> Any:
        family = pb_utils.MetricFamily(name=f"tritium:{name}", description=description, kind=kind)
        self._families.append(family)
        return family

    def _metric(self, name: str, description: str, kind: Any) -> Any:
        return self._family(name, description, kind).Metric(labels=self._labels)
