"""A model runner whose steps fail when a request asks for it by its seed."""

from collections.abc import Callable

import torch

from tritium.backend.engine.request import SampledToken
from tritium.backend.engine.sequence import ScheduledSequence
from tritium.backend.runner.model_runner import ModelRunner

FAILS = 1001  # every step with a sequence of this seed fails
NO_MEMORY = 1002  # steps of more than 8 tokens with a sequence of this seed find no memory

# Replaces a model folder's model.py.
MODEL_PY = """
import tritium.backend.runner.model_runner
from tritium.loadtests.faults import FaultyRunner

tritium.backend.runner.model_runner.ModelRunner = FaultyRunner

from tritium.backend.triton_model import TritonPythonModel
"""


class FaultyRunner(ModelRunner):
    def _launch(self, batch: list[ScheduledSequence]) -> Callable[[], list[SampledToken]]:
        seeds = {scheduled.sequence.request.seed for scheduled in batch}
        if FAILS in seeds:
            raise RuntimeError("injected")
        if NO_MEMORY in seeds and sum(scheduled.num_new_tokens for scheduled in batch) > 8:
            torch.empty(1 << 46)  # raises the allocator's error
        return super()._launch(batch)
