"""Drafts by prompt lookup: what is found, the length of drafts, pauses."""

import random
import time
from itertools import pairwise

import pytest
from pydantic import ValidationError

from tritium.backend.config import SpeculativeConfig
from tritium.backend.engine.speculative import NgramProposer


def make_proposer(**changes) -> NgramProposer:
    lengths = {"num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    return NgramProposer(SpeculativeConfig(**{**lengths, **changes}))


def propose(token_ids: list[int], limit: int = 99, **changes) -> list[int]:
    return make_proposer(**changes).propose(token_ids, limit)


# -- look-up --


def test_tokens_that_followed_before_are_proposed():
    assert propose([1, 2, 3, 4, 5, 6, 7, 1, 2]) == [3, 4, 5]


def test_nothing_is_proposed_if_the_last_tokens_did_not_occur_before():
    assert propose([1, 2, 3, 4, 5]) == []
    assert propose([1]) == []
    assert propose([1, 2, 3, 1]) == []  # one repeated token is too few
    assert propose([1, 2, 3, 1], prompt_lookup_min=1) == [2, 3, 1]


def test_the_latest_of_several_occurrences_counts():
    assert propose([1, 2, 3, 1, 2, 4, 5, 6, 7, 1, 2])[0] == 4


def test_a_longer_match_is_preferred_to_a_later_one():
    token_ids = [9, 1, 2, 3, 5, 5, 1, 2, 4, 5, 5, 9, 1, 2]
    assert propose(token_ids)[0] == 3
    assert propose(token_ids, prompt_lookup_max=2)[0] == 4


def test_a_loop_is_followed_beyond_its_end():
    assert propose([7, 7, 7]) == [7, 7, 7]
    assert propose([0, 1, 2, 3, 2, 3]) == [2, 3, 2]


def test_a_draft_is_no_longer_than_the_limit():
    token_ids = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    assert [len(propose(token_ids, limit)) for limit in (-1, 0, 1, 3, 9)] == [0, 0, 1, 3, 3]
    assert len(propose(token_ids, num_speculative_tokens=2)) == 2


def test_tokens_may_come_one_by_one_or_many_at_once():
    rng = random.Random(0)
    token_ids = [rng.randrange(4) for _ in range(300)]
    steady, late = make_proposer(), make_proposer()
    length = 0
    while length < len(token_ids):
        length += rng.randint(1, 5)
        known = token_ids[:length]
        at_once = propose(known)
        assert steady.propose(known, 99) == at_once
        if length > 200:
            assert late.propose(known, 99) == at_once


def test_a_proposal_matches_a_plain_search():
    rng = random.Random(1)
    for _ in range(200):
        token_ids = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        expected = None
        for size in (4, 3, 2):
            ends = [
                end
                for end in range(size, len(token_ids))
                if token_ids[end - size : end] == token_ids[-size:]
            ]
            if ends:
                expected = token_ids[ends[-1]]
                break
        assert propose(token_ids, 1) == ([] if expected is None else [expected])


def test_a_look_up_is_not_slower_in_a_long_text():
    rng = random.Random(0)
    token_ids = [rng.randrange(50) for _ in range(8000)]
    proposer = make_proposer()
    proposer.propose(token_ids, 4)
    start = time.thread_time()
    for _ in range(1000):
        token_ids.append(rng.randrange(50))
        proposer.propose(token_ids, 4)
    assert time.thread_time() - start < 0.1  # 100 us each; a search would take ten times as long


# -- length and pauses --

LOOP = [1, 2, 3] * 10


def test_a_draft_is_at_most_one_longer_than_twice_the_last_accepted_length():
    proposer = make_proposer(num_speculative_tokens=8)
    lengths = []
    for num_accepted in (3, 7, 8, 3, 1, 1, 2):
        lengths.append(len(proposer.propose(LOOP, 99)))
        proposer.observe(len(LOOP), num_accepted)
    assert lengths == [3, 7, 8, 8, 7, 3, 3]


def test_pauses_double_while_drafts_fail():
    proposer = make_proposer()
    drafted_at = []
    token_ids = [0]
    for num_tokens in range(1, 150):
        token_ids.append(0)
        if draft := proposer.propose(token_ids, 99):
            assert len(draft) == (1 if drafted_at else 3)
            drafted_at.append(num_tokens)
            proposer.observe(len(token_ids) + 1, 0)
    gaps = [b - a for a, b in pairwise(drafted_at)]
    assert gaps == [2, 3, 5, 9, 17, 33, 33, 33]


def test_an_accepted_draft_resets_the_pause():
    proposer = make_proposer()
    for _ in range(4):
        proposer.observe(10, 0)
    assert proposer.is_paused(17)
    assert not proposer.is_paused(18)
    proposer.observe(20, 1)
    proposer.observe(30, 0)
    assert proposer.is_paused(30)
    assert not proposer.is_paused(31)


# -- configuration --


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"method": "eagle"}, "'ngram'"),
        ({"num_speculative_tokens": 0}, "greater than or equal to 1"),
        ({"num_speculative_tokens": "many"}, "valid integer"),
        ({"prompt_lookup_min": 0}, "greater than or equal to 1"),
        ({"prompt_lookup_min": 6}, "prompt_lookup_min (6) should be at most prompt_lookup_max (5)"),
        ({"disable_by_batch_size": 0}, "greater than or equal to 1"),
        ({"model": "small"}, "Extra inputs are not permitted"),
    ],
    ids=str,
)
def test_invalid_values_are_refused(values, allowed):
    with pytest.raises(ValidationError) as refused:
        SpeculativeConfig.model_validate(values)
    assert allowed in str(refused.value)
