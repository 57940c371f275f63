"""The parts of the GPU check: phases, cases, and their settings."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch


class Setup(NamedTuple):
    device: torch.device
    small: bool  # tiny shapes, for a test without a GPU

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of models whose speed is measured."""
        return torch.bfloat16 if self.on_gpu else torch.float32


class Case(NamedTuple):
    """One measurement. Its return value goes into the results; `passed` marks a check."""

    name: str
    run: Callable[[], dict[str, Any]]
    goals: Mapping[str, float] = {}  # targets of some of the numbers


class Phase(NamedTuple):
    """Cases that share a process, and so can share a model."""

    name: str
    seconds: float  # time limit
    cases: Callable[[Setup], Iterator[Case]]
