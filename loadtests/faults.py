"""A model runner whose steps fail when a request asks for it, by its seed or its prompt."""

from collections.abc import Callable
from pathlib import Path

import torch

from tritium.backend.engine.request import SampledToken
from tritium.backend.engine.sequence import ScheduledSequence
from tritium.backend.engine.usage import DeviceTotals
from tritium.backend.runner.model_runner import ModelRunner

# Seeds.
FAILS = 1001  # each step with the sequence fails
NO_MEMORY = 1002  # steps of more than 8 tokens with the sequence find no memory
FAILS_LATE = 1003  # steps with the sequence can't be read once it has 4 tokens of output
BREAKS = 1004  # from the first step with the sequence on all steps fail
POISON = 8018  # a token of SmolLM2, " poison": steps with such a prompt fail

# Replaces a model folder's model.py.
MODEL_PY = """
import tritium.backend.runner.model_runner
from tritium.loadtests.faults import FaultyRunner

tritium.backend.runner.model_runner.ModelRunner = FaultyRunner

from tritium.backend.triton_model import TritonPythonModel
"""


# Replaces a model folder's model.py: the output thread raises once a file `fails` is beside it.
OUTPUT_PY = """
from pathlib import Path
from tritium.loadtests.faults import fail_output_thread

fail_output_thread(Path(__file__).with_name("fails"))

from tritium.backend.triton_model import TritonPythonModel
"""


class FaultyRunner(ModelRunner):
    _is_broken = False

    def _launch(self, batch: list[ScheduledSequence]) -> Callable[[], list[SampledToken]]:
        sequences = [scheduled.sequence for scheduled in batch]
        seeds = {sequence.request.seed for sequence in sequences}
        self._is_broken |= BREAKS in seeds
        is_poisoned = any(POISON in sequence.request.prompt_token_ids for sequence in sequences)
        if self._is_broken or FAILS in seeds or is_poisoned:
            raise RuntimeError("injected")
        if NO_MEMORY in seeds and sum(scheduled.num_new_tokens for scheduled in batch) > 8:
            torch.empty(1 << 46)  # raises the allocator's error
        read = super()._launch(batch)
        if any(s.request.seed == FAILS_LATE and s.num_output_tokens >= 4 for s in sequences):
            return _fail
        return read


def fail_output_thread(file: Path) -> None:
    """Make the output thread raise as soon as there is a file."""
    from tritium.backend.accounts.billing import Billing

    book = Billing.totals

    def totals(self: Billing, totals: DeviceTotals) -> None:
        if file.exists():
            raise RuntimeError("injected")
        book(self, totals)

    Billing.totals = totals  # type: ignore[method-assign]


def _fail() -> list[SampledToken]:
    raise RuntimeError("injected")
