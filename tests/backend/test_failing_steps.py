"""The real model with steps that fail: the other sequences' tokens and log probabilities stay."""

import pytest

from tests.conftest import FLOAT32
from tests.helpers import Collector
from tritium.backend.engine.engine import Engine
from tritium.backend.engine.request import EngineRequest, FinishReason

pytestmark = pytest.mark.slow

NUM_TOKENS = 6
POISONED = {1, 6}
SAMPLING = [
    {},
    {},
    {"num_logprobs": 2, "num_prompt_logprobs": 1},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_p": 0.9, "seed": 11},
    {"bad_words": ((28,), (30, 28))},
    {},
    {"logit_bias": ((28, 3.0),), "num_logprobs": 0},
]


class FailingRunner:
    """The real runner; steps with a poisoned sequence fail once it has some tokens of output."""

    def __init__(self, runner, when: str, overlaps: bool, num_good: int) -> None:
        self._runner, self._when, self._num_good = runner, when, num_good
        self.num_blocks, self.overlaps = runner.num_blocks, overlaps

    def launch(self, batch):
        fails = any(
            s.sequence.request_id in POISONED and s.sequence.num_output_tokens >= self._num_good
            for s in batch
        )
        if fails and self._when == "launch":
            raise RuntimeError("poison")
        read = self._runner.launch(batch)

        def fail():
            raise RuntimeError("poison")

        return fail if fails else read


def run(runner, prompts) -> Collector:
    collector = Collector()
    engine = Engine(FLOAT32, runner, collector)
    for number, (prompt, sampling) in enumerate(zip(prompts, SAMPLING, strict=True)):
        engine.reserve()
        engine.submit(EngineRequest(number, prompt, NUM_TOKENS, **sampling))
    in_flight = None
    while len(collector.reasons) < len(prompts):
        in_flight = engine.step(in_flight)
        engine.check_integrity()
    return collector


@pytest.fixture(scope="module")
def prompts(prompt_token_ids):
    return [prompt_token_ids[number][:40] for number in range(1, 9)]


@pytest.fixture(scope="module")
def expected(runner, prompts):
    return run(runner, prompts)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("when", "num_good"), [("launch", 0), ("launch", 3), ("read", 2)])
def test_other_sequences_get_the_same_tokens(runner, prompts, expected, when, num_good, overlaps):
    found = run(FailingRunner(runner, when, overlaps, num_good), prompts)
    for number in range(len(prompts)):
        if number in POISONED:
            assert found.reasons[number] == [FinishReason.ERROR]
            assert found.token_ids(number) == expected.token_ids(number)[:num_good]
        else:
            assert found.reasons[number] == [FinishReason.LENGTH]
            assert found.token_ids(number) == expected.token_ids(number)
            assert logprobs(found, number) == pytest.approx(logprobs(expected, number), abs=1e-4)


def logprobs(collector: Collector, number: int) -> list[float]:
    """Of the answer's tokens and of the prompt's, where the request asks for them."""
    outputs = [output for output in collector.outputs if output.request_id == number]
    tokens = [*(token for output in outputs for token in output.tokens)]
    tokens += outputs[-1].prompt_logprobs
    return [token.logprobs.logprob for token in tokens if token.logprobs]
