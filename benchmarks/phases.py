"""What the check on a GPU is made of: phases of cases, and what each phase is told."""

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
        """What models run in where they are to be fast."""
        return torch.bfloat16 if self.on_gpu else torch.float32


class Case(NamedTuple):
    """One measurement. What it returns goes into the results; `passed` is for a check."""

    name: str
    run: Callable[[], dict[str, Any]]
    goals: Mapping[str, float] = {}  # that some of the numbers should reach


class Phase(NamedTuple):
    """Cases that share a process, so that they can share a model."""

    name: str
    seconds: float  # that it may take
    cases: Callable[[Setup], Iterator[Case]]
