"""Logits to token ids: on small vocabularies, with frequencies and exact sets."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from tests.helpers import make_sequence
from tritium.backend.engine.request import SampledToken
from tritium.backend.engine.sequence import Sequence
from tritium.backend.runner.sampler import Sampler, make_keys
from tritium.kernels import reference

# Token i of this vocabulary has probability PROBS[i]; the ids are not sorted by probability.
PROBS = [0.05, 0.4, 0.02, 0.25, 0.08, 0.2]
LOGITS = torch.tensor(PROBS).log()


def drawing(seed=0, num_tokens=3, temperature=1.0, **fields) -> Sequence:
    return make_sequence([0] * num_tokens, seed=seed, temperature=temperature, **fields)


def ends(sequences) -> list[int]:
    return [sequence.num_tokens for sequence in sequences]


def sample(logits, sequences: list[Sequence], masks=None) -> list[SampledToken]:
    return Sampler().sample(logits.clone(), sequences, ends(sequences), masks).read()


def draw(logits, *sequences: Sequence) -> list[int]:
    """One token per sequence; all share the logits."""
    return [token.token_id for token in sample(logits.repeat(len(sequences), 1), list(sequences))]


def counts(logits, num_draws: int, **fields) -> torch.Tensor:
    """How often each token is drawn, with seeds 0, 1, 2, ..."""
    token_ids = draw(logits, *(drawing(seed, **fields) for seed in range(num_draws)))
    return torch.bincount(torch.tensor(token_ids), minlength=logits.shape[-1])


def support(logits, num_draws: int = 3000, **fields) -> set[int]:
    return set(counts(logits, num_draws, **fields).nonzero().flatten().tolist())


def assert_frequencies(drawn: torch.Tensor, probs) -> None:
    """Chi-square, at 6 standard deviations above its mean."""
    expected = torch.as_tensor(probs, dtype=torch.float64) * drawn.sum()
    possible = expected > 0
    assert drawn[~possible].sum() == 0
    statistic = ((drawn - expected)[possible].square() / expected[possible]).sum().item()
    freedom = possible.sum().item() - 1
    assert statistic < freedom + 6 * math.sqrt(2 * freedom)


# -- greedy --


def test_temperature_0_takes_the_most_likely():
    assert draw(LOGITS, *(drawing(seed, temperature=0) for seed in range(20))) == [1] * 20


@pytest.mark.parametrize("fields", [dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 50.0])
def test_filters_that_keep_one_token(fields, temperature):
    assert support(LOGITS, 200, temperature=temperature, **fields) == {1}


def test_each_row_has_its_own_logits_and_parameters():
    logits = torch.tensor([[0.0, 9.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    sequences = [drawing(temperature=0), drawing(top_k=1), drawing(temperature=0)]
    assert [token.token_id for token in sample(logits, sequences)] == [1, 0, 2]


def test_a_greedy_row_between_drawn_ones():
    drawn = draw(LOGITS, drawing(5), drawing(temperature=0), drawing(6))
    assert drawn == [*draw(LOGITS, drawing(5)), 1, *draw(LOGITS, drawing(6))]


# -- random numbers --


def test_keys_depend_on_seed_and_position_only():
    alone = [int(make_keys([seed], [position])[0]) for seed, position in [(7, 1), (7, 2), (8, 1)]]
    assert make_keys([7, 7, 8], [1, 2, 1]).tolist() == alone
    assert len(set(alone)) == 3


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, -(2**63)])
def test_keys_take_any_seed_of_64_bits(seed):
    assert len(set(make_keys([seed] * 1000, list(range(1000))).tolist())) == 1000


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize("half", [0, 1])
def test_keys_are_uniform_and_in_a_row_independent(by, half):
    many, one = list(range(20_000)), [3] * 20_000
    keys = make_keys(many, one) if by == "seed" else make_keys(one, many)
    bits = torch.from_numpy(keys.view(np.uint32)[half::2] >> 28).long()  # the first four
    assert_frequencies(torch.bincount(bits, minlength=16), [1 / 16] * 16)
    pairs = bits[:-1] * 16 + bits[1:]
    assert_frequencies(torch.bincount(pairs, minlength=256), [1 / 256] * 256)


@pytest.mark.parametrize("distance", [1, 2, 64, 1000])
def test_the_noise_of_two_tokens_is_independent(distance):
    keys = torch.from_numpy(make_keys(list(range(20_000)), [5] * 20_000))
    noise = reference.gumbel(torch.tensor([9, 9 + distance]).int(), keys)
    shares = (-(-noise).exp()).exp()  # uniform, by the distribution function
    first, second = (shares * 10).long().clamp(max=9).unbind(-1)
    assert_frequencies(torch.bincount(first * 10 + second, minlength=100), [0.01] * 100)


NEIGHBOURS = {
    "plain": [drawing(90), drawing(91)],
    "greedy": [drawing(temperature=0), drawing(temperature=0)],
    "filtered": [drawing(90, top_k=3), drawing(91, top_p=0.5), drawing(92, min_p=0.1)],
}


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
@pytest.mark.parametrize("fields", [{}, dict(top_k=4), dict(top_p=0.9), dict(min_p=0.05)])
def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(fields, neighbours):
    others = NEIGHBOURS[neighbours]
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for seed in range(50):
        [alone] = draw(logits, drawing(seed, **fields))
        assert draw(logits, drawing(seed, **fields), *others)[0] == alone
        assert draw(logits, *others, drawing(seed, **fields))[-1] == alone


def test_a_seed_gives_the_same_tokens_next_to_a_row_that_needs_the_whole_vocabulary():
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * 3
    flat = torch.zeros(3000)  # its top 90 % are more than the candidates
    for seed in range(50):
        [alone] = draw(logits, drawing(seed, top_p=0.5))
        both = sample(torch.stack([logits, flat]), [drawing(seed, top_p=0.5), drawing(top_p=0.9)])
        assert both[0].token_id == alone


def test_each_position_has_its_own_noise():
    drawn = draw(torch.zeros(1000), *(drawing(7, num_tokens=n) for n in range(1, 51)))
    assert len(set(drawn)) > 40


# -- frequencies --


def test_rare_tokens_have_the_right_frequency():
    probs = torch.tensor([0.7, 0.29869, 1e-3, 2e-4, 1e-4, 1e-5])
    n = 2_000_000
    keys = torch.from_numpy(make_keys(list(range(n)), [5] * n))
    scores = probs.log() + reference.gumbel(torch.arange(6).int(), keys)
    assert_frequencies(torch.bincount(scores.argmax(-1), minlength=6), probs)


def test_frequencies_are_the_probabilities():
    assert_frequencies(counts(LOGITS, 20_000), PROBS)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature(temperature):
    powers = [p ** (1 / temperature) for p in PROBS]
    drawn = counts(LOGITS, 20_000, temperature=temperature)
    assert_frequencies(drawn, [p / sum(powers) for p in powers])


@pytest.mark.parametrize(
    ("fields", "probs"),
    [
        (dict(top_k=2), [0, 0.4, 0, 0.25, 0, 0]),
        (dict(top_k=4), [0, 0.4, 0, 0.25, 0.08, 0.2]),
        (dict(top_k=6), PROBS),
        (dict(top_k=100), PROBS),
        (dict(top_k=-1, top_p=0.9), [0, 0.4, 0, 0.25, 0.08, 0.2]),
        (dict(top_p=0.5), [0, 0.4, 0, 0.25, 0, 0]),
        (dict(top_p=0.66), [0, 0.4, 0, 0.25, 0, 0.2]),
        (dict(min_p=0.19), [0, 0.4, 0, 0.25, 0.08, 0.2]),
        (dict(min_p=0.21), [0, 0.4, 0, 0.25, 0, 0.2]),
        # top-p of the tokens that top-k keeps: 0.4 / 0.85 = 0.47, 0.65 / 0.85 = 0.76
        (dict(top_k=3, top_p=0.75), [0, 0.4, 0, 0.25, 0, 0]),
        (dict(top_k=3, top_p=0.77), [0, 0.4, 0, 0.25, 0, 0.2]),
        (dict(top_k=3, top_p=0.47), [0, 1, 0, 0, 0, 0]),
        # top-p of the tokens that min-p keeps
        (dict(min_p=0.5, top_p=0.45), [0, 1, 0, 0, 0, 0]),
        (dict(min_p=0.5, top_p=0.77), [0, 0.4, 0, 0.25, 0, 0.2]),
    ],
)
def test_filters_keep_these_tokens_with_their_share(fields, probs):
    drawn = counts(LOGITS, 5000, **fields)
    assert {i for i, p in enumerate(probs) if p} == set(drawn.nonzero().flatten().tolist())
    if drawn.count_nonzero() > 1:
        assert_frequencies(drawn, [p / sum(probs) for p in probs])


def test_temperature_acts_before_the_filters():
    # At temperature 0.5 the probabilities are 0.57, 0.22, 0.14, ...
    assert support(LOGITS, top_p=0.56, temperature=0.5) == {1}
    assert support(LOGITS, min_p=0.5, temperature=0.5) == {1}


# -- vocabularies with more tokens than candidates --

FLAT_SIZE = 3000
# Nearly equal, so that the order is known: token 2999 is the most likely, token 0 the least.
FLAT = torch.arange(FLAT_SIZE) * 1e-4


def test_a_flat_distribution_is_drawn_from_beyond_the_candidates():
    drawn = counts(FLAT, 1500, top_p=0.9)
    token_ids = drawn.nonzero().flatten()
    # 90 % of the probability lies in the tokens from about 342 on.
    cut = int((FLAT.softmax(-1).cumsum(-1) < 0.1).sum())
    assert 340 < cut < 345
    assert cut <= token_ids.min() < cut + 20
    tenths = drawn[cut + (FLAT_SIZE - cut) % 10 :].reshape(10, -1).sum(-1)
    share = FLAT.softmax(-1)[cut + (FLAT_SIZE - cut) % 10 :].reshape(10, -1).sum(-1)
    assert_frequencies(tenths, share / share.sum())


def test_a_top_k_beyond_the_candidates():
    drawn = counts(FLAT, 1500, top_k=2000)
    token_ids = drawn.nonzero().flatten()
    assert 1000 <= token_ids.min() < 1020
    assert token_ids.max() > 2980


@pytest.mark.parametrize("fields", [dict(top_k=2000), dict(min_p=0.03)])
def test_top_p_of_the_tokens_that_other_filters_keep_beyond_the_candidates(fields):
    """900 tokens share 0.9 of the probability, 1100 share 0.05, the rest share 0.05.

    top_k and min_p leave the first 2000 with 0.95, of which top-p 0.9 is 0.855: 855 tokens.
    """
    probs = torch.tensor([0.9 / 900] * 900 + [0.05 / 1100] * 1100 + [0.05 / 2096] * 2096)
    logits = probs.log() - torch.arange(4096) * 2e-6  # so that the order is known
    drawn = counts(logits, 400, top_p=0.9, **fields)
    assert drawn.nonzero().max() < 860


# -- values at the edge of float32, all of them allowed in a request --


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-38, 1e-46])
@pytest.mark.parametrize("fields", [{}, dict(top_p=0.9)])
def test_a_tiny_temperature_is_greedy(temperature, fields):
    sequences = [drawing(seed, temperature=temperature, **fields) for seed in range(20)]
    assert draw(LOGITS * 20, *sequences) == [1] * 20


@pytest.mark.parametrize("top_p", [1e-30, 1e-46])
def test_a_tiny_top_p_is_greedy(top_p):
    assert draw(LOGITS, *(drawing(seed, top_p=top_p) for seed in range(20))) == [1] * 20


@pytest.mark.parametrize("top_k", [2**31, 2**63, 10**30])
def test_a_huge_top_k_cuts_nothing(top_k):
    assert_frequencies(counts(LOGITS, 2000, top_k=top_k), PROBS)


def test_a_high_temperature_draws_any_token():
    assert support(LOGITS * 10, temperature=100.0) == set(range(6))


@pytest.mark.parametrize("fields", [dict(top_k=2), dict(top_p=0.5), dict(min_p=0.9)])
def test_equally_likely_tokens_are_kept_together(fields):
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0])
    drawn = counts(logits, 1000, **fields)
    assert_frequencies(drawn, [0, 1 / 3, 1 / 3, 0, 1 / 3])


@pytest.mark.parametrize("fields", [{}, dict(top_k=5), dict(top_p=0.9999), dict(min_p=1e-9)])
def test_impossible_tokens_are_not_drawn(fields):
    logits = torch.tensor([-math.inf, 1.0, -math.inf, 1.5, 1.0, -math.inf])
    assert support(logits, 500, **fields) == {1, 3, 4}


@pytest.mark.parametrize("fields", [{}, dict(top_k=3), dict(top_p=0.9)])
def test_probabilities_do_not_depend_on_an_offset_of_the_logits(fields):
    """Up to rounding; an offset of 2^k does not round logits with few bits."""
    logits = torch.tensor([1.0, 3.5, 2.25, 0.5])
    assert torch.equal(counts(logits + 64, 500, **fields), counts(logits, 500, **fields))


# -- min_tokens --


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("num_output_tokens", "allowed"), [(0, False), (1, False), (2, True)])
def test_stop_tokens_are_not_drawn_before_min_tokens(num_output_tokens, allowed, temperature):
    sequences = []
    for seed in range(100):
        sequence = drawing(
            seed, temperature=temperature, min_tokens=2, stop_token_ids=frozenset({1, 3})
        )
        sequence.token_ids += [0] * num_output_tokens
        sequences.append(sequence)
    assert bool({1, 3} & set(draw(LOGITS, *sequences))) is allowed


def test_without_min_tokens_stop_tokens_are_drawn():
    sequence = drawing(temperature=0, stop_token_ids=frozenset({1}))
    assert draw(LOGITS, sequence) == [1]


@pytest.mark.parametrize("fields", [dict(temperature=0), {}, dict(top_p=0.9), dict(top_k=3)])
def test_with_every_token_forbidden_some_token_is_drawn(fields):
    """A request can forbid the whole vocabulary; the step must go on for the others."""
    sequence = drawing(min_tokens=1, stop_token_ids=frozenset(range(6)), **fields)
    assert draw(LOGITS, sequence)[0] in range(6)


# -- adjustments of the logits --


def adjusted(logits, *sequences: Sequence, masks=None) -> torch.Tensor:
    """The logits that tokens are drawn from, one row per sequence."""
    logits = logits.repeat(len(sequences), 1)
    Sampler().sample(logits, list(sequences), ends(sequences), masks)
    return logits


def with_output(output: list[int], prompt=(0, 0, 0), **fields) -> Sequence:
    sequence = make_sequence(prompt, max_tokens=len(output) + 1, **fields)
    sequence.token_ids += output
    return sequence


def differences(logits, sequence: Sequence) -> dict[int, float]:
    changes = (adjusted(logits, sequence)[0] - logits).tolist()
    return {i: change for i, change in enumerate(changes) if change}


def test_greedy_rows_are_adjusted_too():
    assert draw(LOGITS, drawing(temperature=0, logit_bias=((4, 3.0),))) == [4]
    assert draw(LOGITS, drawing(temperature=0, bad_words=((1,),))) == [3]
    assert draw(LOGITS, drawing(temperature=0, allowed_token_ids=(0, 2))) == [0]


def test_logit_bias():
    changes = differences(torch.zeros(6), with_output([], logit_bias=((0, 1.5), (5, -100.0))))
    assert changes == {0: 1.5, 5: -100.0}


def test_allowed_token_ids():
    rows = adjusted(
        LOGITS,
        with_output([], allowed_token_ids=(0, 5, 5)),
        with_output([]),
        with_output([], allowed_token_ids=(3,)),
    )
    assert rows.isfinite().tolist() == [
        [True, False, False, False, False, True],
        [True] * 6,
        [False, False, False, True, False, False],
    ]
    assert torch.equal(rows[rows.isfinite()], torch.cat((LOGITS[[0, 5]], LOGITS, LOGITS[[3]])))


@pytest.mark.parametrize(
    ("output", "forbidden"),
    [
        ([], {2}),
        ([4], {2, 5}),
        ([5], {2}),
        ([3, 4], {2, 5}),
        ([1, 3, 4], {0, 2, 5}),
        ([4, 1], {2}),
        ([0, 0], {2, 3}),
    ],
)
def test_bad_words(output, forbidden):
    """As in vLLM, the tokens before the last one must be in the output, not in the prompt."""
    words = ((2,), (4, 5), (1, 3, 4, 0), (0, 0, 3))
    sequence = with_output(output, prompt=[0, 0, 4], bad_words=words)
    assert set(differences(torch.zeros(6), sequence)) == forbidden


def test_grammar_mask():
    """Token i is bit i % 32 of word i // 32; the topmost bit makes a word negative."""
    logits = torch.zeros(70)
    masks = torch.tensor([[1 << 5, -(1 << 31), 1], [-1, -1, -1]], dtype=torch.int32)
    rows = adjusted(logits, with_output([]), with_output([]), masks=masks)
    assert rows[0].isfinite().nonzero().flatten().tolist() == [5, 63, 64]
    assert rows[1].isfinite().all()


def test_tokens_forbidden_in_several_ways():
    """No adjustment allows a token that another one forbade."""
    sequence = with_output(
        [4],
        allowed_token_ids=(0, 1, 4, 5),
        bad_words=((1,), (4, 1)),
        min_tokens=2,
        stop_token_ids=frozenset({1, 5}),
        logit_bias=((1, 50.0), (2, 50.0), (4, 1.0)),
        repetition_penalty=2.0,
    )
    assert adjusted(torch.zeros(6), sequence)[0].isfinite().nonzero().flatten().tolist() == [0, 4]


def test_a_pending_token_counts_for_min_tokens():
    sequence = with_output([0], min_tokens=2, stop_token_ids=frozenset({1}))
    assert set(differences(torch.zeros(6), sequence)) == {1}
    sequence.num_pending_tokens = 1
    assert not differences(torch.zeros(6), sequence)


def test_penalties_come_after_logit_bias():
    """2 - 3 = -1; a repetition penalty of 2 then gives -2, not 2 / 2 - 3."""
    sequence = with_output([4], logit_bias=((4, -3.0),), repetition_penalty=2.0, prompt=[1])
    assert adjusted(torch.full((6,), 2.0), sequence)[0].tolist() == [2, 1, 2, 2, -2, 2]


@pytest.mark.parametrize("bias", [1e9, 1e35, 1e308])
def test_the_largest_biases_leave_differences_between_logits(bias):
    fields = dict(logit_bias=((0, bias), (2, bias), (5, -bias)), allowed_token_ids=(0, 2, 5))
    assert support(LOGITS, 100, **fields) == {0, 2}
    assert draw(LOGITS, drawing(temperature=0, **fields)) == [0]
    others = fields | dict(allowed_token_ids=(1, 5))
    assert draw(LOGITS, drawing(temperature=0, **others)) == [1]


def penalised(logits, sequence: Sequence) -> list[float]:
    """vLLM's formula, one token at a time."""
    request = sequence.request
    seen = set(sequence.token_ids)
    in_output = Counter(sequence.token_ids[sequence.num_prompt_tokens :])
    expected = logits.tolist()
    for token_id in seen:
        x, r = expected[token_id], request.repetition_penalty
        expected[token_id] = x / r if x > 0 else x * r
    for token_id, count in in_output.items():
        expected[token_id] -= request.frequency_penalty * count + request.presence_penalty
    return expected


PENALTIES = [
    dict(repetition_penalty=1.3),
    dict(presence_penalty=0.7),
    dict(frequency_penalty=-0.4),
    dict(repetition_penalty=0.8, presence_penalty=-1.0, frequency_penalty=0.5),
    {},
]


def test_penalties_from_step_to_step():
    """Each step counts its new tokens; a sequence that missed a step is recounted."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 3
    sampler = Sampler()
    everyone = [make_sequence([1, 2, 2, 30 + i], 9, **p) for i, p in enumerate(PENALTIES)]
    for step in range(9):
        batch = [sequence for i, sequence in enumerate(everyone) if (step + i) % 4]
        rows = logits.repeat(len(batch), 1)
        tokens = sampler.sample(rows, batch, ends(batch)).read()
        for sequence, row, token in zip(batch, rows, tokens, strict=True):
            assert row.tolist() == pytest.approx(penalised(logits, sequence), rel=1e-5)
            sequence.token_ids.append(token.token_id if step % 2 else 2)


def test_a_frequency_penalty_ends_repetition():
    sequence = make_sequence([0], max_tokens=30, frequency_penalty=0.5)
    sampler = Sampler()
    for _ in range(30):
        [token] = sampler.sample(LOGITS[None].clone(), [sequence], ends([sequence])).read()
        sequence.token_ids.append(token.token_id)
    assert min(Counter(sequence.token_ids[1:])[i] for i in range(6)) >= 1


# -- logprobs --


def sampled(logits, *sequences) -> list[SampledToken]:
    return sample(logits.repeat(len(sequences), 1), list(sequences))


def test_no_logprobs_unless_asked_for():
    assert sampled(LOGITS, drawing(temperature=0))[0] == SampledToken(1, None)


def test_logprobs_of_the_chosen_token_alone():
    _, logprobs = sampled(LOGITS, drawing(temperature=0, num_logprobs=0))[0]
    assert logprobs.logprob == pytest.approx(math.log(0.4), abs=1e-6)
    assert (logprobs.rank, logprobs.top) == (1, [])


def test_top_logprobs_are_in_descending_order():
    _, logprobs = sampled(LOGITS, drawing(temperature=0, num_logprobs=3))[0]
    assert [token_id for token_id, _ in logprobs.top] == [1, 3, 5]
    assert [math.exp(value) for _, value in logprobs.top] == pytest.approx([0.4, 0.25, 0.2])


def test_rank_and_logprob_of_the_drawn_token():
    ranks = {1: 1, 3: 2, 5: 3, 4: 4, 0: 5, 2: 6}
    tokens = sampled(LOGITS, *(drawing(seed, num_logprobs=1) for seed in range(300)))
    assert {token.token_id for token in tokens} == set(range(6))
    for token_id, logprobs in tokens:
        assert logprobs.rank == ranks[token_id]
        assert logprobs.logprob == pytest.approx(math.log(PROBS[token_id]), abs=1e-6)
        assert [i for i, _ in logprobs.top] == [1]


def test_logprobs_are_the_model_s_own():
    """Temperature, filters and min_tokens do not change them."""
    fields = dict(temperature=3.0, top_k=2, min_tokens=1, stop_token_ids=frozenset({1}))
    token_id, logprobs = sampled(LOGITS, drawing(num_logprobs=2, **fields))[0]
    assert token_id in (3, 5)
    assert logprobs.logprob == pytest.approx(math.log(PROBS[token_id]), abs=1e-6)
    assert [i for i, _ in logprobs.top] == [1, 3]


def test_logprobs_against_log_softmax_in_float64():
    logits = torch.randn(8, 2000, generator=torch.Generator().manual_seed(0)) * 4
    expected = logits.double().log_softmax(-1)
    sequences = [drawing(seed, num_logprobs=20) for seed in range(8)]
    for (token_id, logprobs), row in zip(sample(logits, sequences), expected, strict=True):
        assert logprobs.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert logprobs.rank == (row.argsort(descending=True) == token_id).nonzero().item() + 1
        assert [i for i, _ in logprobs.top] == row.topk(20).indices.tolist()
        assert [v for _, v in logprobs.top] == pytest.approx(row.topk(20).values.tolist(), abs=1e-4)


def test_some_rows_with_logprobs_and_some_without():
    tokens = sampled(LOGITS, drawing(), drawing(num_logprobs=0), drawing(num_logprobs=2))
    assert [token.logprobs is None for token in tokens] == [True, False, False]
    assert [len(token.logprobs.top) for token in tokens[1:]] == [0, 2]


def test_the_candidates_are_fewer_than_the_flat_vocabulary():
    """Otherwise the tests above would not test the code that they are for."""
    assert reference._NUM_CANDIDATES < 1200 < FLAT_SIZE


def test_log_probabilities_are_taken_before_anything_changes_the_logits():
    fields = dict(logit_bias=((0, 9.0),), bad_words=((1,),), presence_penalty=1.0)
    token_id, logprobs = sampled(LOGITS, drawing(temperature=0, num_logprobs=1, **fields))[0]
    assert token_id == 0
    assert logprobs.logprob == pytest.approx(math.log(0.05), abs=1e-6)
    assert [i for i, _ in logprobs.top] == [1]
