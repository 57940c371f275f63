"""In bfloat16, too, an answer does not depend on its batch or on the schedule."""

import pytest

from tests.conftest import FLOAT32
from tests.greedy import SmallerRunner, generate
from tritium.backend.config import ConfigError
from tritium.backend.engine.engine import Engine
from tritium.backend.runner.model_runner import ModelRunner
from tritium.kernels import cpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cpu.is_available(), reason="needs AVX2 and a compiler"),
]

CONFIG = FLOAT32.model_copy(
    update={"dtype": "bfloat16", "max_num_seqs": 16, "batch_invariant": True}
)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(CONFIG)


@pytest.fixture(scope="module")
def prompts(prompt_token_ids) -> list[list[int]]:
    """A third of the prompts; the last one is cut to 600 tokens."""
    return [*prompt_token_ids[:-1:3], prompt_token_ids[-1][:600]]


@pytest.fixture(
    scope="module",
    params=[{}, {"temperature": 1.0, "top_p": 0.9, "seed": 7, "repetition_penalty": 1.1}],
    ids=["greedy", "seeded"],
)
def sampling(request) -> dict:
    return request.param


@pytest.fixture(scope="module")
def alone(runner, prompts, sampling) -> list[list[int]]:
    engine = make_engine(runner)
    return [generate(engine, [prompt], **sampling)[0] for prompt in prompts]


def make_engine(runner, **changes) -> Engine:
    return Engine(CONFIG.model_copy(update=changes), runner, on_outputs=lambda outputs: None)


def test_in_a_batch(runner, prompts, sampling, alone):
    assert generate(make_engine(runner), prompts, **sampling) == alone


def test_in_a_prefill_cut_into_chunks(runner, prompts, sampling, alone):
    assert generate(make_engine(runner, max_num_batched_tokens=24), prompts, **sampling) == alone


def test_preempted(runner, prompts, sampling, alone):
    engine = make_engine(SmallerRunner(runner, num_blocks=48))
    order = [len(prompts) - 1, *range(len(prompts) - 1)]
    generated = generate(engine, [prompts[i] for i in order], **sampling)
    assert generated == [alone[i] for i in order]
    assert engine.stats().num_preemptions >= 2


def test_with_a_prefix_that_was_computed_before(runner, prompts, sampling, alone):
    engine = make_engine(runner, prefix_cache="on")
    assert generate(engine, prompts, **sampling) == alone
    first = engine.stats().num_computed_tokens
    assert generate(engine, prompts, **sampling) == alone
    assert engine.stats().num_computed_tokens - first < first


@pytest.mark.parametrize("changes", [{"kv_cache_dtype": "int8"}, {"block_size": 8}], ids=str)
def test_a_configuration_that_c_does_not_support_is_refused(runner, changes):
    with pytest.raises(ConfigError, match="'batch_invariant': on CPU it needs"):
        ModelRunner(CONFIG.model_copy(update=changes), model=runner.model)
