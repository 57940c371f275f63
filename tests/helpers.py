"""Helpers of several test files: small requests, sequences and engines without a model."""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tritium.backend.config import EngineConfig
from tritium.backend.engine.block_manager import BlockManager
from tritium.backend.engine.request import EngineOutput, EngineRequest, FinishReason, SampledToken
from tritium.backend.engine.sequence import ScheduledSequence, Sequence

ROOT = Path(__file__).resolve().parents[1]


def make_request(
    prompt: Iterable[int] = (1, 2, 3), max_tokens: int = 8, request_id: int = 0, **fields
) -> EngineRequest:
    return EngineRequest(request_id, list(prompt), max_tokens, **fields)


def make_sequence(
    prompt: Iterable[int] = (1, 2, 3), max_tokens: int = 8, request_id: int = 0, **fields
) -> Sequence:
    return Sequence(make_request(prompt, max_tokens, request_id, **fields))


def make_config(**changes) -> EngineConfig:
    small: dict = dict(model="none", max_num_seqs=4, max_num_batched_tokens=16, block_size=4)
    small["prefix_cache"] = "off"
    return EngineConfig(**{**small, **changes})


def compute(manager: BlockManager, sequence: Sequence, num_new_tokens: int) -> None:
    """Compute a sequence's next tokens like a step: allocate blocks, publish the full ones."""
    assert manager.allocate(sequence, num_new_tokens)
    sequence.num_computed_tokens += num_new_tokens
    manager.cache_full_blocks(sequence, sequence.num_computed_tokens)


class CountingRunner:
    """Samples the number of tokens that a sequence has: each token is its own position."""

    def __init__(self, num_blocks: int = 64, seconds: float = 0.0, overlaps: bool = False) -> None:
        self.num_blocks = num_blocks
        self.seconds = seconds  # per step
        self.overlaps = overlaps

    def start(self) -> None:
        pass

    def token_at(self, position: int) -> int:
        return position

    def launch(self, batch: list[ScheduledSequence]) -> Callable[[], list[SampledToken]]:
        sampled = [
            SampledToken(self.token_at(position), None)
            for s in batch
            for position in range(s.end - s.num_samples + 1, s.end + 1)
        ]

        def read() -> list[SampledToken]:
            time.sleep(self.seconds)
            return sampled

        return read


class Collector:
    """Collects an engine's outputs, and lets a test wait for requests to finish."""

    def __init__(self) -> None:
        self.outputs: list[EngineOutput] = []
        self._changed = threading.Condition()

    def __call__(self, outputs: list[EngineOutput]) -> None:
        with self._changed:
            self.outputs += outputs
            self._changed.notify_all()

    @property
    def reasons(self) -> dict[int, list[FinishReason]]:
        """All finish reasons per request; there should be exactly one."""
        reasons: dict[int, list[FinishReason]] = {}
        for output in list(self.outputs):
            if output.finish_reason:
                reasons.setdefault(output.request_id, []).append(output.finish_reason)
        return reasons

    def raise_error(self) -> None:
        """Raise the error of a request that failed, if there is one."""
        for output in list(self.outputs):
            if output.error:
                raise RuntimeError(output.error)

    def token_ids(self, request_id: int) -> list[int]:
        return [
            token.token_id
            for output in list(self.outputs)
            if output.request_id == request_id
            for token in output.tokens
        ]

    def wait_until_finished(self, *request_ids: int) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: self.reasons.keys() >= set(request_ids), 20)
        assert done, f"finished in time are only {sorted(self.reasons)}"

    def wait_for_a_token(self, request_id: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.token_ids(request_id), 20)
