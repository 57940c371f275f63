"""The real model with and without drafts: the same tokens, in any batch, with any finish reason."""

import pytest

from tests.conftest import FLOAT32
from tests.greedy import SmallerRunner
from tests.helpers import Collector
from tritium.backend.config import SpeculativeConfig
from tritium.backend.engine.engine import Engine
from tritium.backend.engine.request import EngineRequest, SampledToken
from tritium.backend.runner.model_runner import ModelRunner
from tritium.kernels import cpu

pytestmark = pytest.mark.slow

TEXT = (
    "The harbour of Lindau lies on an island in the east of the lake. Its entrance is marked by a "
    "lighthouse of 1856 and a statue of a lion, six metres tall."
)
PROMPTS = [
    f"{TEXT}\n\n{TEXT}\n\nThe harbour",  # continues as before for some 40 tokens
    "Once upon a time, in a small village by the sea,",
    "x = 1\nx = 2\nx = 3\nx =",
]
# Bit-identical with the C operations. Elsewhere in float32, whose rounding depends on the number of
# rows.
CONFIG = FLOAT32.model_copy(update={"dtype": "bfloat16" if cpu.is_available() else "float32"})
SPECULATIVE = SpeculativeConfig(num_speculative_tokens=6)
GREEDY = {}
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 11}


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(CONFIG)


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


def run(runner, requests, **changes) -> tuple[dict[int, tuple[list[SampledToken], str]], Engine]:
    """Each request's tokens and finish reason."""
    config = CONFIG.model_copy(update={"speculative_config": SPECULATIVE, **changes})
    collector = Collector()
    engine = Engine(config, runner, collector)
    for request in requests:
        engine.reserve()
        engine.submit(request)
    in_flight = None
    while len(collector.reasons) < len(requests):
        in_flight = engine.step(in_flight)
        engine.scheduler.check_integrity()
    collector.raise_error()
    assert engine.stats().num_used_blocks == 0
    tokens: dict[int, list[SampledToken]] = {request.request_id: [] for request in requests}
    for output in collector.outputs:
        tokens[output.request_id] += output.tokens
    return {i: (tokens[i], reason) for i, [reason] in collector.reasons.items()}, engine


def same_with_drafts(runner, prompts, fields=None, max_tokens=40, **changes) -> Engine:
    """Run all prompts at once, without and with drafts; returns the engine with drafts."""

    def requests(speculative: bool) -> list[EngineRequest]:
        return [
            EngineRequest(i, prompt, max_tokens, speculative=speculative, **fields or {})
            for i, prompt in enumerate(prompts)
        ]

    plain, _ = run(runner, requests(False), **changes)
    drafted, engine = run(runner, requests(True), **changes)
    assert_same(drafted, plain)
    return engine


def assert_same(drafted, plain) -> None:
    for i, (tokens, reason) in plain.items():
        assert [t.token_id for t in drafted[i][0]] == [t.token_id for t in tokens]
        assert drafted[i][1] == reason
        for ours, theirs in zip(drafted[i][0], tokens, strict=True):
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            if ours.logprobs:
                assert ours.logprobs.rank == theirs.logprobs.rank
                assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-3)
                assert dict(ours.logprobs.top) == pytest.approx(dict(theirs.logprobs.top), abs=1e-3)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_in_one_batch(runner, prompts, sampling):
    stats = same_with_drafts(runner, prompts, sampling).stats()
    assert stats.num_accepted_tokens > 20


def test_a_repetitive_text_takes_a_fraction_of_the_steps(runner, prompts):
    stats = same_with_drafts(runner, prompts[:1]).stats()
    assert stats.num_steps < 16
    assert stats.num_accepted_tokens == 40 - stats.num_steps


def test_logprobs(runner, prompts):
    same_with_drafts(runner, prompts, {"num_logprobs": 3, "num_prompt_logprobs": 1}, 20)


@pytest.mark.parametrize("max_tokens", [1, 7])
def test_max_tokens(runner, prompts, max_tokens):
    same_with_drafts(runner, prompts[:1], max_tokens=max_tokens)


def test_stop_tokens_amid_a_draft(runner, prompts, tokenizer):
    in_the_text = tokenizer.encode(" marked")
    stop = {"stop_token_ids": frozenset(in_the_text)}
    same_with_drafts(runner, prompts[:1], stop)
    same_with_drafts(runner, prompts[:1], {**stop, "min_tokens": 30})


def test_requests_that_need_their_history_next_to_others(runner, prompts):
    mixed = [
        EngineRequest(0, prompts[0], 24, speculative=True),
        EngineRequest(1, prompts[0], 24, speculative=True, presence_penalty=1.0),
        EngineRequest(2, prompts[2], 24, speculative=True, logit_bias=((28, 3.0),)),
        EngineRequest(3, prompts[2], 24, speculative=True, bad_words=((198,),)),
        EngineRequest(4, prompts[1], 24, speculative=True, allowed_token_ids=(5, 198, 253, 260)),
    ]
    plain, _ = run(runner, mixed, speculative_config=None)
    drafted, engine = run(runner, mixed)
    assert_same(drafted, plain)
    assert engine.stats().num_accepted_tokens > 0


def test_several_answers_to_one_prompt(runner, prompts):
    def requests(speculative):
        first = dict(max_tokens=24, temperature=0.6, speculative=speculative)
        return [
            EngineRequest(i, prompts[0], seed=i, fork_of=0 if i else None, **first)
            for i in range(3)
        ]

    plain, _ = run(runner, requests(False))
    drafted, engine = run(runner, requests(True))
    assert_same(drafted, plain)
    assert engine.stats().num_accepted_tokens > 0


def test_preemptions_and_reused_prefixes(runner, prompts):
    longest = max(map(len, prompts))
    cramped = SmallerRunner(runner, -(-(longest + 40) // CONFIG.block_size) + 3)
    engine = same_with_drafts(cramped, prompts * 2, SEEDED, prefix_cache="on")
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_accepted_tokens > 20


def test_prompts_cut_into_chunks(runner, prompts):
    same_with_drafts(runner, prompts, max_tokens=20, max_num_batched_tokens=24)


def test_cached_blocks_hold_the_accepted_tokens(runner, prompts):
    """The next turn of a conversation reuses blocks in which drafts were rejected."""
    first = EngineRequest(0, prompts[2], 40, speculative=True)
    answers, engine = run(runner, [first], prefix_cache="on")
    turn = [*prompts[2], *(t.token_id for t in answers[0][0]), *prompts[1]]
    alone, _ = run(runner, [EngineRequest(1, turn, 16)])
    engine.reserve()
    engine.submit(EngineRequest(1, turn, 16))
    engine.on_outputs = collector = Collector()
    in_flight = None
    while not collector.reasons:
        in_flight = engine.step(in_flight)
    outputs = collector.outputs
    assert outputs[0].num_cached_tokens >= 32
    assert [t.token_id for o in outputs for t in o.tokens] == [t.token_id for t in alone[1][0]]
