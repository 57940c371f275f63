"""The same tokens as transformers' greedy output in float32, for any schedule."""

import pytest

from tests.conftest import FLOAT32
from tests.greedy import SmallerRunner, generate
from tests.prompts import NUM_TOKENS
from tritium.backend.engine.engine import Engine

pytestmark = pytest.mark.slow


def make_engine(runner, **changes) -> Engine:
    config = FLOAT32.model_copy(update=changes)
    return Engine(config, runner, on_outputs=lambda outputs: None)


def test_alone(runner, prompt_token_ids, greedy_token_ids):
    """Every third prompt, and the last, long one."""
    engine = make_engine(runner)
    pairs = list(zip(prompt_token_ids, greedy_token_ids, strict=True))
    for token_ids, expected in [*pairs[::3], pairs[-1]]:
        assert generate(engine, [token_ids]) == [expected]


def test_in_a_batch_of_24(runner, prompt_token_ids, greedy_token_ids):
    assert generate(make_engine(runner), prompt_token_ids) == greedy_token_ids


def test_prefill_cut_into_chunks(runner, prompt_token_ids, greedy_token_ids):
    engine = make_engine(runner, max_num_batched_tokens=32)
    assert generate(engine, prompt_token_ids) == greedy_token_ids
    assert engine.stats().num_steps > sum(map(len, prompt_token_ids)) / 32


def test_preempted_several_times(runner, prompt_token_ids, greedy_token_ids):
    num_blocks = -(-(len(prompt_token_ids[-1]) + NUM_TOKENS) // FLOAT32.block_size)
    engine = make_engine(SmallerRunner(runner, num_blocks), reserve_blocks_per_seq=0)
    # The long prompt first: the others share the few blocks that remain.
    order = [len(prompt_token_ids) - 1, *range(len(prompt_token_ids) - 1)]
    generated = generate(engine, [prompt_token_ids[i] for i in order])
    assert generated == [greedy_token_ids[i] for i in order]
    assert engine.stats().num_preemptions >= 3


def test_prefix_reuse_on_the_second_pass(runner, prompt_token_ids, greedy_token_ids):
    engine = make_engine(runner, prefix_cache="on")
    assert generate(engine, prompt_token_ids) == greedy_token_ids
    first = engine.stats().num_computed_tokens
    assert generate(engine, prompt_token_ids) == greedy_token_ids
    second = engine.stats().num_computed_tokens - first
    reusable = sum((len(token_ids) - 1) // FLOAT32.block_size for token_ids in prompt_token_ids)
    assert second == first - reusable * FLOAT32.block_size
