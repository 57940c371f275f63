"""The prefix index: reusable tokens, compared with a slow calculation, and its decisions."""

import logging
import random

import pytest

from tests.backend.engine.test_engine import make_engine, step_until_idle, submit
from tests.helpers import make_request, make_sequence
from tritium.backend.engine import prefix_index
from tritium.backend.engine.block_manager import BlockManager
from tritium.backend.engine.prefix_index import Overlap, PrefixIndex

BLOCK_SIZE = 4


def chain(*blocks: int) -> list[bytes]:
    """Hashes of a prompt that consists of these blocks, each with all blocks before it."""
    return [str(blocks[: i + 1]).encode() for i in range(len(blocks))]


def observe(index: PrefixIndex, *blocks: int, scope: str = "a", more: int = 1) -> bool:
    return index.observe(scope, chain(*blocks), len(blocks) * BLOCK_SIZE + more)


def reusable(prompts: list[list[int]], num_blocks: int) -> int:
    """Leading blocks of the prompts that are among the last `num_blocks` different used blocks.

    Found by searching back through all used blocks; a prompt's head counts as used after its tail.
    """
    used: list[bytes] = []
    num_reusable = 0
    for blocks in prompts:
        hashes = chain(*blocks)
        kept = list(dict.fromkeys(reversed(used)))[:num_blocks]
        leading = next((i for i, h in enumerate(hashes) if h not in kept), len(hashes))
        num_reusable += leading
        used += reversed(hashes)
    return num_reusable


@pytest.mark.parametrize("num_blocks", [1, 5, 20, 60, 1000])
def test_counts_match_a_slow_calculation(num_blocks, monkeypatch):
    monkeypatch.setattr(prefix_index, "WINDOW_BLOCKS", 1000)
    rng = random.Random(num_blocks)
    # Conversations that continue, and prompts with a common beginning.
    prompts = [[rng.randrange(3)] for _ in range(3)]
    for _ in range(300):
        earlier = rng.choice(prompts[-20:])
        prompts.append(
            [
                *earlier[: rng.randrange(1, 12)],
                *(rng.randrange(50) for _ in range(rng.randrange(5))),
            ]
        )
    index = PrefixIndex(num_blocks, BLOCK_SIZE)
    for prompt in prompts:
        observe(index, *prompt)
    assert index.total == Overlap(
        sum(len(prompt) * BLOCK_SIZE + 1 for prompt in prompts),
        reusable(prompts, num_blocks) * BLOCK_SIZE,
        reusable(prompts, 1000) * BLOCK_SIZE,
    )
    assert num_blocks == 1000 or index.total.num_pool_tokens < index.total.num_window_tokens


def test_the_last_token_of_a_prompt_is_not_reused():
    index = PrefixIndex(100, BLOCK_SIZE)
    observe(index, 1, 2, more=0)
    observe(index, 1, 2, more=0)
    assert index.total == Overlap(16, 4, 4)
    observe(index, 1, 2, 3)  # its second block is found nevertheless
    assert index.total == Overlap(29, 12, 12)


def switches(index: PrefixIndex, prompts, scope: str = "a") -> list[bool]:
    return [observe(index, *prompt, scope=scope) for prompt in prompts]


def test_a_common_beginning_switches_reuse_on_and_other_traffic_switches_it_off(caplog):
    index = PrefixIndex(1000, BLOCK_SIZE)
    caplog.set_level(logging.INFO, "tritium")
    on = switches(index, ([*range(8), 100 + i] for i in range(64)))
    assert on == [False] * 15 + [True] * 49
    # 8 of 9 blocks of all but the first: about 15 x 32 of 16 x 37 tokens.
    assert "prefix cache on for scope 'a': 81.2% of its prompts' tokens" in caplog.text
    off = switches(index, ([1000 + i] * 9 for i in range(1000)))
    assert off.index(False) > 200  # not before most remembered requests agree
    assert not any(off[off.index(False) :])
    assert caplog.text.count("prefix cache") == 2


def test_between_the_bounds_reuse_is_not_switched():
    """One prompt in 6 or 7 repeats an earlier one: about 15 %."""

    def mixed(start: int):
        return ([start + i // 6 * 6 if i % 6 == 5 else start + i] * 9 for i in range(600))

    cold = PrefixIndex(10_000, BLOCK_SIZE)
    assert not any(switches(cold, mixed(0)))
    warm = PrefixIndex(10_000, BLOCK_SIZE)
    switches(warm, ([0] * 9 for _ in range(64)))
    assert all(switches(warm, mixed(10)))


def test_unrelated_prompts_leave_reuse_off():
    index = PrefixIndex(1000, BLOCK_SIZE)
    assert not any(switches(index, ([i] * 9 for i in range(64))))
    assert index.total.num_window_tokens == 0


def test_prefixes_that_do_not_fit_in_the_kv_cache_do_not_switch_reuse_on():
    index = PrefixIndex(100, BLOCK_SIZE)
    prompts = [[i] * 9 for i in range(20)]  # 180 blocks, repeated
    assert not any(switches(index, prompts * 5))
    assert index.total.num_pool_tokens == 0
    assert index.total.num_window_tokens / index.total.num_tokens > 0.7


def test_scopes_are_independent():
    index = PrefixIndex(1000, BLOCK_SIZE)
    for i in range(32):
        repeating = observe(index, 1, 2, 3, scope="a")
        changing = observe(index, i, i, i, scope="b")
    assert (repeating, changing) == (True, False)


def test_memory_is_bounded_for_any_number_of_scopes(monkeypatch):
    monkeypatch.setattr(prefix_index, "_MAX_BLOCKS", 500)
    index = PrefixIndex(50, BLOCK_SIZE)
    for i in range(200):
        observe(index, *range(40), scope=f"line {i}")
        busy = observe(index, 1, 2, 3, scope="busy")
        assert index._num_kept <= 500
        assert index._num_kept == sum(scope.num_kept for scope in index._scopes.values())
    assert busy  # a busy scope is not forgotten
    assert len(index._scopes) < 10


# -- with the engine --


def test_scopes_without_blocks_are_bounded_too():
    """Names that callers invent, with prompts shorter than a block."""
    index = PrefixIndex(num_blocks=64, block_size=16)
    for number in range(10_000):
        index.observe(f"line {number}", [], 3)
    assert len(index._scopes) == 4096
    assert index.total.num_tokens == 30_000


def test_the_engine_reuses_prefixes_that_repeat():
    engine, collector = make_engine(prefix_cache="auto", max_queue_size=100)
    for i in range(40):
        submit(engine, i, max_tokens=1, prompt=[*range(12), 100 + i])
        step_until_idle(engine, collector, i + 1)
    cached = {output.request_id: output.num_cached_tokens for output in collector.outputs}
    # The 16th request is the first that publishes its blocks.
    assert [cached[i] for i in range(40)] == [0] * 16 + [12] * 24
    overlap = engine.stats().prefix_overlap
    assert overlap == Overlap(40 * 13, 39 * 12, 39 * 12)


def test_the_engine_publishes_nothing_if_prompts_do_not_repeat():
    engine, collector = make_engine(prefix_cache="auto")
    for i in range(40):
        submit(engine, i, max_tokens=1, prompt=[100 + i] * 9)
        step_until_idle(engine, collector, i + 1)
    assert engine.stats().num_cached_blocks == 0
    assert engine.stats().prefix_overlap.num_tokens == 40 * 9


def test_several_answers_to_one_prompt_count_once():
    engine, collector = make_engine(prefix_cache="auto")
    engine.reserve(3)
    engine.submit(*(make_request(range(9), 2, i, fork_of=0 if i else None) for i in range(3)))
    step_until_idle(engine, collector, 3)
    assert engine.stats().prefix_overlap == Overlap(9, 0, 0)


def test_hashes_depend_on_tokens_and_salt():
    manager = BlockManager(16, BLOCK_SIZE, prefix_cache=True)
    sequence = make_sequence(range(11), cache_salt=b"x")
    hashes = list(manager.hash_prompt(sequence))
    assert len(set(hashes)) == 2
    again = make_sequence(range(11), cache_salt=b"x")
    manager.hash_prompt(again)
    other = make_sequence(range(11), cache_salt=b"y")
    manager.hash_prompt(other)
    assert again.block_hashes == hashes
    assert not set(other.block_hashes) & set(hashes)
