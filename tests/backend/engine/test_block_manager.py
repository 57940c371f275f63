"""The block manager on literal block ids; blocks of 4 tokens unless a test says otherwise."""

import pytest

from tests.helpers import compute, make_sequence
from tritium.backend.engine.block_manager import BlockManager


def make_manager(num_blocks: int, block_size: int = 4, prefix_cache: bool = True) -> BlockManager:
    return BlockManager(num_blocks, block_size, prefix_cache)


def computed(manager: BlockManager, prompt, **fields):
    """A sequence whose prompt was computed in one step."""
    sequence = make_sequence(prompt, **fields)
    compute(manager, sequence, sequence.num_tokens)
    return sequence


def started(manager: BlockManager, prompt, **fields):
    """A sequence that holds its cached prefix."""
    sequence = make_sequence(prompt, **fields)
    manager.touch(sequence, manager.get_computed_blocks(sequence))
    return sequence


def found(manager: BlockManager, prompt, **fields) -> list[int]:
    return manager.get_computed_blocks(make_sequence(prompt, **fields))


# -- allocation --


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)]
)
def test_blocks_for_tokens(num_tokens, num_blocks):
    assert make_manager(1).blocks_for(num_tokens) == num_blocks


def test_fresh_blocks_are_handed_out_in_order():
    manager = make_manager(6)
    assert computed(manager, range(10)).block_table == [0, 1, 2]
    assert computed(manager, range(20, 24)).block_table == [3]
    assert (manager.num_free_blocks, manager.num_used_blocks, manager.num_blocks) == (2, 4, 6)


def test_a_sequence_gets_blocks_only_for_the_next_tokens():
    manager = make_manager(6)
    sequence = make_sequence(range(12))
    for num_new, table in [(3, [0]), (1, [0]), (1, [0, 1]), (3, [0, 1]), (4, [0, 1, 2])]:
        compute(manager, sequence, num_new)
        assert sequence.block_table == table


def test_an_allocation_that_fails_changes_nothing():
    manager = make_manager(4)
    holder = computed(manager, range(8))
    sequence = make_sequence(range(20, 32))
    compute(manager, sequence, 4)

    assert not manager.allocate(sequence, 8)

    assert sequence.block_table == [2]
    assert sequence.num_computed_tokens == 4
    assert manager.num_free_blocks == 1
    manager.check_integrity([holder, sequence])
    assert manager.allocate(sequence, 4)
    assert sequence.block_table == [2, 3]


def test_free_takes_all_blocks_back():
    manager = make_manager(3)
    sequence = computed(manager, range(10))
    manager.free(sequence)
    assert sequence.block_table == []
    assert (sequence.num_computed_tokens, sequence.num_published_blocks) == (0, 0)
    assert manager.num_used_blocks == 0
    manager.check_integrity([sequence])


# -- which free block is allocated next --


def test_the_tail_of_a_prefix_is_allocated_before_its_head():
    manager = make_manager(3)
    manager.free(computed(manager, range(12)))
    assert computed(manager, range(20, 32)).block_table == [2, 1, 0]


def test_the_least_recently_freed_block_is_allocated_first():
    manager = make_manager(3)
    first, second, third = (computed(manager, [i] * 4) for i in range(3))
    for sequence in (second, third, first):
        manager.free(sequence)
    assert computed(manager, range(20, 32)).block_table == [1, 2, 0]


def test_reuse_makes_a_block_the_most_recently_used():
    manager = make_manager(2)
    for prompt in ([1] * 4, [2] * 4):
        manager.free(computed(manager, prompt))
    reviving = started(manager, [1] * 5)
    assert reviving.block_table == [0]
    manager.free(reviving)
    assert computed(manager, range(20, 24)).block_table == [1]


def test_free_blocks_without_content_are_allocated_first():
    manager = make_manager(4)
    full = computed(manager, range(4))  # block 0
    half = computed(manager, range(20, 22))  # block 1, never full, so never published
    manager.free(half)
    manager.free(full)
    assert computed(manager, range(30, 46)).block_table == [1, 2, 3, 0]


def test_without_prefix_cache_the_latest_freed_block_is_allocated_first():
    manager = make_manager(3, prefix_cache=False)
    manager.free(computed(manager, range(8)))
    assert computed(manager, range(12)).block_table == [0, 1, 2]


# -- prefix hits --


def test_a_cached_prefix_is_found_and_shared():
    manager = make_manager(6)
    first = computed(manager, range(10))
    second = started(manager, range(10))
    assert (second.num_computed_tokens, second.num_published_blocks) == (8, 2)
    compute(manager, second, 2)
    assert first.block_table == [0, 1, 2]
    assert second.block_table == [0, 1, 3]
    assert [block.ref_count for block in manager.blocks] == [2, 2, 1, 1, 0, 0]
    assert manager.num_used_blocks == 4
    manager.check_integrity([first, second])


def test_a_shared_block_is_free_only_after_its_last_holder():
    manager = make_manager(4)
    first = computed(manager, range(8))
    second = started(manager, range(9))
    manager.free(first)
    assert [block.ref_count for block in manager.blocks] == [1, 1, 0, 0]
    assert manager.num_free_blocks == 2
    manager.check_integrity([second])
    manager.free(second)
    assert manager.num_free_blocks == 4


def test_the_last_token_is_always_computed():
    manager = make_manager(6)
    manager.free(computed(manager, range(8)))  # an exact multiple of the block size
    assert found(manager, range(8)) == [0]
    assert found(manager, range(9)) == [0, 1]
    assert found(manager, range(4)) == []


def test_257_tokens_at_block_256():
    manager = make_manager(4, block_size=256)
    first = computed(manager, range(257))
    assert first.block_table == [0, 1]
    assert manager.num_cached_blocks == 1
    second = started(manager, range(257))
    assert second.num_computed_tokens == 256
    compute(manager, second, 1)
    assert second.block_table == [0, 2]


def test_the_257th_token_at_block_256_opens_a_block():
    manager = make_manager(4, block_size=256)
    sequence = computed(manager, range(256))
    assert sequence.block_table == [0]
    sequence.token_ids.append(256)
    compute(manager, sequence, 1)
    assert sequence.block_table == [0, 1]


def test_a_hit_ends_at_the_first_block_that_differs():
    manager = make_manager(6)
    computed(manager, [*range(4), *range(4, 8), *range(8, 12)])
    assert found(manager, [*range(4), 99, *range(5, 8), *range(8, 13)]) == [0]


def test_equal_tokens_behind_another_prefix_are_not_a_hit():
    manager = make_manager(6)
    red, blue, green, grey = ([i] * 4 for i in range(4))
    computed(manager, [*red, *green])
    assert computed(manager, [*blue, *grey]).block_table == [2, 3]
    assert found(manager, [*blue, *green, 9]) == [2]
    assert found(manager, [*green, 9]) == []


def test_prompts_under_different_salts_share_nothing():
    manager = make_manager(6)
    computed(manager, range(8), cache_salt=b"red")
    assert found(manager, range(9), cache_salt=b"red") == [0, 1]
    assert found(manager, range(9), cache_salt=b"blue") == []
    assert found(manager, range(9)) == []


def test_a_hash_collision_does_not_mix_two_prompts(monkeypatch):
    monkeypatch.setattr("tritium.backend.engine.block_manager._digest", lambda data: b"same")
    manager = make_manager(6)
    computed(manager, [1, 2, 3, 4])
    assert found(manager, [1, 2, 3, 4, 5]) == [0]
    assert found(manager, [6, 7, 8, 9, 5]) == []


def test_hashes_cannot_be_foreseen_from_outside():
    first, second = (computed(make_manager(2), range(4)) for _ in range(2))
    assert first.block_hashes != second.block_hashes


def test_blocks_of_an_answer_are_found():
    manager = make_manager(6)
    sequence = computed(manager, range(6))
    for token_id in (6, 7):
        sequence.token_ids.append(token_id)
        compute(manager, sequence, 1)
    assert found(manager, range(9)) == [0, 1]


def test_a_preempted_sequence_finds_its_own_blocks():
    manager = make_manager(4)
    sequence = computed(manager, range(9))
    manager.free(sequence)
    assert manager.get_computed_blocks(sequence) == [0, 1]
    manager.touch(sequence, [0, 1])
    compute(manager, sequence, 1)
    assert sequence.block_table == [0, 1, 2]
    assert sequence.num_computed_tokens == 9
    manager.check_integrity([sequence])


def test_without_prefix_cache_nothing_is_found():
    manager = make_manager(4, prefix_cache=False)
    computed(manager, range(8))
    assert found(manager, range(9)) == []
    assert manager.num_cached_blocks == 0


# -- publication --


def test_blocks_are_found_only_after_the_pass_that_filled_them():
    manager = make_manager(6)
    sequence = make_sequence(range(12))
    assert manager.allocate(sequence, 12)
    assert found(manager, range(12)) == []
    for num_computed, blocks in [(3, []), (4, [0]), (7, [0]), (9, [0, 1])]:
        sequence.num_computed_tokens = num_computed
        manager.cache_full_blocks(sequence, sequence.num_computed_tokens)
        assert found(manager, range(13)) == blocks


def test_of_equal_blocks_the_older_one_is_found():
    manager = make_manager(6)
    first, second = make_sequence(range(8)), make_sequence(range(8))
    assert manager.allocate(first, 8)
    assert manager.allocate(second, 8)
    for sequence in (first, second):
        sequence.num_computed_tokens = 8
        manager.cache_full_blocks(sequence, sequence.num_computed_tokens)
    assert second.block_table == [2, 3]
    assert found(manager, range(9)) == [0, 1]
    assert manager.num_cached_blocks == 2
    manager.free(first)
    manager.free(second)
    assert computed(manager, range(20, 24)).block_table == [2]  # the copy is allocated first
    assert found(manager, range(9)) == [0, 1]


def test_an_allocated_block_is_no_longer_found():
    manager = make_manager(2)
    manager.free(computed(manager, range(8)))
    assert found(manager, range(9)) == [0, 1]
    assert manager.num_cached_blocks == 2
    taker = make_sequence([9, 9])
    assert manager.allocate(taker, 2)
    assert taker.block_table == [1]
    assert found(manager, range(9)) == [0]
    assert manager.num_cached_blocks == 1
    manager.check_integrity([taker])


def test_an_allocated_block_is_found_under_its_new_content():
    manager = make_manager(1)
    manager.free(computed(manager, [1] * 4))
    manager.free(computed(manager, [2] * 4))
    assert found(manager, [1] * 5) == []
    assert found(manager, [2] * 5) == [0]


def test_a_revived_block_is_not_allocated_again():
    manager = make_manager(3)
    manager.free(computed(manager, range(4)))
    holder = started(manager, range(5))
    other = make_sequence(range(20, 32))
    assert not manager.allocate(other, 12)
    assert manager.allocate(other, 8)
    assert (holder.block_table, other.block_table) == ([0], [1, 2])


# -- admission --


@pytest.mark.parametrize(("num_tokens", "fits"), [(12, True), (13, False)])
def test_revived_blocks_are_not_counted_twice(num_tokens, fits):
    manager = make_manager(3)
    manager.free(computed(manager, range(8)))
    sequence = make_sequence(range(num_tokens))
    blocks = manager.get_computed_blocks(sequence)
    assert blocks == [0, 1]
    assert manager.num_free_blocks == 3  # including the two found ones
    assert (manager.num_missing_blocks(blocks, num_tokens) <= 0) is fits


@pytest.mark.parametrize(("num_tokens", "fits"), [(12, True), (13, False)])
def test_blocks_that_another_sequence_holds_are_not_missing(num_tokens, fits):
    manager = make_manager(3)
    computed(manager, range(8))
    sequence = make_sequence(range(num_tokens))
    assert manager.num_free_blocks == 1
    missing = manager.num_missing_blocks(manager.get_computed_blocks(sequence), num_tokens)
    assert (missing <= 0) is fits


@pytest.mark.parametrize(("num_tokens", "missing"), [(12, -1), (16, 0), (20, 1)])
def test_blocks_that_would_be_free_and_found_are_not_counted_twice(num_tokens, missing):
    """Without two sequences that share the found blocks."""
    manager = make_manager(6)
    holder = computed(manager, range(8))
    other = make_sequence([*range(8), 50])
    manager.touch(other, manager.get_computed_blocks(other))
    assert manager.allocate(other, 1)
    computed(manager, range(100, 108))  # stays
    blocks = manager.get_computed_blocks(make_sequence(range(20)))
    assert blocks == holder.block_table
    assert manager.num_missing_blocks(blocks, num_tokens, [holder, other]) == missing
    for sequence in (holder, other):
        manager.free(sequence)
    assert manager.num_missing_blocks(blocks, num_tokens) == missing


# -- check_integrity --


def test_check_integrity_notices_a_leak():
    manager = make_manager(2)
    sequence = computed(manager, range(4))
    manager.check_integrity([sequence])
    with pytest.raises(AssertionError, match="block 0"):
        manager.check_integrity([])


def test_check_integrity_notices_a_block_held_and_free():
    manager = make_manager(2)
    first = computed(manager, range(4))
    second = make_sequence(range(4))
    second.block_table = [1]
    with pytest.raises(AssertionError, match="block 1"):
        manager.check_integrity([first, second])
