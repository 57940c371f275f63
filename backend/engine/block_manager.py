"""Which sequences hold which blocks of the KV cache, and which blocks can be reused.

Pure bookkeeping. A block holds the keys and values of `block_size` tokens. Blocks are reference
counted, so that sequences with equal prefixes share them. A freed block keeps its content and can
be found until it is allocated again: least recently used first, the tail of a prefix before its
head. Free blocks can be promised to a sequence; then no other sequence gets them.

The cost of holding blocks is updated when holders change, not in each step. Each block sums up one
holder's share since the block was first held, the integral of 1/k(t) dt while k sequences hold it.
A holder is charged the difference between the sums when it leaves and when it joined.
"""

import hashlib
import secrets
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from tritium.backend.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Block:
    """One block of the KV cache. `digest` and `token_ids` are set while it is published."""

    block_id: int
    ref_count: int = 0
    digest: bytes | None = None
    token_ids: list[int] | None = None
    ns_per_holder: float = 0.0  # one holder's share, from the first holder until `since`
    since: int = 0  # when the number of holders last changed

    def change_holders(self, change: int, now: int) -> float:
        """Add (+1) or remove (-1) a holder; returns ns_per_holder, in seconds."""
        if self.ref_count:
            self.ns_per_holder += (now - self.since) / self.ref_count
        else:
            self.ns_per_holder = 0.0
        self.since = now
        self.ref_count += change
        return self.ns_per_holder / 1e9


class BlockManager:
    """Allocates blocks to sequences and finds computed prefixes.

    Args:
        num_blocks: Blocks in the KV cache.
        block_size: Tokens per block.
        prefix_cache: Whether full blocks are published for reuse.
        clock: Integer ns.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._published: dict[bytes, Block] = {}
        self.num_promises = 0  # sequences that have a promise
        self.num_promised_blocks = 0  # free blocks that are promised
        # Unknown to clients, so that none can construct a prompt with the hash of another one.
        self._root = secrets.token_bytes(16)
        self._clock = clock
        self._used_block_ns = 0  # time integral of num_used_blocks, up to `_since`
        self._since = clock()

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, with reusable content or without."""
        return len(self._free)

    @property
    def num_available_blocks(self) -> int:
        """Free blocks that are not promised."""
        return len(self._free) - self.num_promised_blocks

    @property
    def num_used_blocks(self) -> int:
        return len(self.blocks) - len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Published blocks, held by a sequence or not."""
        return len(self._published)

    def used_block_ns(self) -> int:
        """The time integral of `num_used_blocks`, in ns."""
        self._note_used_blocks()
        return self._used_block_ns

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_prompt_blocks(self, sequence: Sequence) -> int:
        """Full blocks of the prompt."""
        return sequence.num_prompt_tokens // self.block_size

    def reuses(self, sequence: Sequence) -> bool:
        """Whether the sequence's blocks may be found and published."""
        return self.prefix_cache and sequence.reuses_prefix

    def shares_block(self, first: Sequence, second: Sequence, index: int) -> bool:
        """Whether two sequences agree in the tokens of a block and of all blocks before it."""
        return self._block_hash(first, index) == self._block_hash(second, index)

    def hash_prompt(self, sequence: Sequence) -> list[bytes]:
        """The hashes of the prompt's full blocks.

        Any thread may call this before the engine has the sequence.
        """
        self._extend_hashes(sequence, self.num_prompt_blocks(sequence))
        return sequence.block_hashes

    def get_computed_blocks(self, sequence: Sequence) -> list[int]:
        """The published blocks of the sequence's longest known prefix.

        The last token is always left to compute, since its logits are needed.
        """
        computed: list[int] = []
        if not self.reuses(sequence):
            return computed
        for i in range((sequence.num_tokens - 1) // self.block_size):
            block = self._published.get(self._block_hash(sequence, i))
            if block is None or block.token_ids != self._block_tokens(sequence, i):
                break
            computed.append(block.block_id)
        return computed

    def num_missing_blocks(
        self, computed: list[int], num_tokens: int, without: Iterable[Sequence] = ()
    ) -> int:
        """Blocks that `num_tokens` tokens, starting with the computed blocks, need beyond those
        that are available, if the sequences in `without` held none. At most 0: they fit."""
        left = Counter(chain.from_iterable(sequence.block_table for sequence in without))
        freed = {block_id for block_id, n in left.items() if n == self.blocks[block_id].ref_count}
        revived = sum(1 for i in computed if i in freed or self.blocks[i].ref_count == 0)
        needed = self.blocks_for(num_tokens) - len(computed) + revived
        return needed - self.num_available_blocks - len(freed)

    def touch(self, sequence: Sequence, computed: list[int]) -> None:
        """Let a sequence that holds no blocks start with these computed blocks."""
        assert not sequence.block_table
        now = self._note_used_blocks()
        for block_id in computed:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
            sequence.usage.block_seconds -= block.change_holders(+1, now)
        sequence.block_table.extend(computed)
        sequence.num_found_blocks = len(computed)
        sequence.num_published_blocks = len(computed)
        sequence.num_computed_tokens = len(computed) * self.block_size

    def promise(self, sequence: Sequence, num_tokens: int) -> None:
        """Keep the blocks free that the sequence lacks for `num_tokens` tokens, until it ends."""
        sequence.num_promised_blocks = self.blocks_for(num_tokens)
        self.num_promises += 1
        self.num_promised_blocks += _num_owed(sequence)
        assert self.num_promised_blocks <= self.num_free_blocks

    def allocate(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Allocate blocks for the sequence's next tokens, or change nothing and return False."""
        num_tokens = sequence.num_computed_tokens + num_new_tokens
        missing = self.blocks_for(num_tokens) - len(sequence.block_table)
        owed = _num_owed(sequence)
        if missing > self.num_available_blocks + owed:
            return False
        if missing <= 0:
            return True
        now, usage = self._note_used_blocks(), sequence.usage
        for _ in range(missing):
            block_id, _ = self._free.popitem(last=False)
            block = self.blocks[block_id]
            if block.digest is not None:
                del self._published[block.digest]
                block.digest = block.token_ids = None
            usage.block_seconds -= block.change_holders(+1, now)
            sequence.block_table.append(block_id)
        num_held = len(sequence.block_table)
        usage.peak_blocks = max(usage.peak_blocks, num_held)
        usage.peak_own_blocks = max(usage.peak_own_blocks, num_held - sequence.num_found_blocks)
        self.num_promised_blocks -= owed - _num_owed(sequence)
        return True

    def cache_full_blocks(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Publish the full blocks of the first `num_computed_tokens` tokens, which are computed.

        If equal content is already published, the older block remains the one that is found.
        """
        if not self.reuses(sequence):
            return
        num_full = num_computed_tokens // self.block_size
        for i in range(sequence.num_published_blocks, num_full):
            digest = self._block_hash(sequence, i)
            if digest not in self._published:
                block = self.blocks[sequence.block_table[i]]
                block.digest = digest
                block.token_ids = self._block_tokens(sequence, i)
                self._published[digest] = block
        sequence.num_published_blocks = max(sequence.num_published_blocks, num_full)

    def free(self, sequence: Sequence) -> None:
        """Take all blocks and the promise from the sequence."""
        if sequence.num_promised_blocks:
            self.num_promises -= 1
            self.num_promised_blocks -= _num_owed(sequence)
            sequence.num_promised_blocks = 0
        self.trim(sequence, 0)
        sequence.num_published_blocks = 0
        sequence.num_computed_tokens = 0

    def trim(self, sequence: Sequence, num_tokens: int) -> None:
        """Take the blocks from the sequence that its first `num_tokens` tokens do not need."""
        owed = _num_owed(sequence)
        num_left = self.blocks_for(num_tokens)
        if len(sequence.block_table) <= num_left:
            return
        now = self._note_used_blocks()
        while len(sequence.block_table) > num_left:
            block = self.blocks[sequence.block_table.pop()]
            sequence.usage.block_seconds += block.change_holders(-1, now)
            if block.ref_count == 0:
                self._free[block.block_id] = None
                if block.digest is None:  # no reusable content: allocated first
                    self._free.move_to_end(block.block_id, last=False)
        self.num_promised_blocks += _num_owed(sequence) - owed

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that reference counts, free list, promises and published blocks agree with the
        holders."""
        holders = [0] * len(self.blocks)
        sequences = list(sequences)
        assert self.num_promises == sum(bool(s.num_promised_blocks) for s in sequences)
        assert self.num_promised_blocks == sum(map(_num_owed, sequences)) <= self.num_free_blocks
        for sequence in sequences:
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            assert len(sequence.block_table) * self.block_size >= sequence.num_computed_tokens
            for block_id in sequence.block_table:
                holders[block_id] += 1
        for block, held in zip(self.blocks, holders, strict=True):
            assert block.ref_count == held, f"block {block.block_id}"
            assert (block.block_id in self._free) == (held == 0), f"block {block.block_id}"
            if block.digest is not None:
                assert self._published[block.digest] is block
        assert sum(block.digest is not None for block in self.blocks) == len(self._published)

    def _note_used_blocks(self) -> int:
        """Call before the number of used blocks changes. Returns the time."""
        now = self._clock()
        self._used_block_ns += self.num_used_blocks * (now - self._since)
        self._since = now
        return now

    def _block_tokens(self, sequence: Sequence, index: int) -> list[int]:
        return sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def _block_hash(self, sequence: Sequence, index: int) -> bytes:
        """The hash of block `index` and all before it: H(parent, tokens), salted at the root."""
        if len(sequence.block_hashes) <= index:
            self._extend_hashes(sequence, index + 1)
        return sequence.block_hashes[index]

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        hashes = sequence.block_hashes
        first = len(hashes) * self.block_size
        tokens = array("q", sequence.token_ids[first : num_blocks * self.block_size]).tobytes()
        digest = hashes[-1] if hashes else self._root + sequence.request.cache_salt
        size = self.block_size * 8  # bytes
        for start in range(0, len(tokens), size):
            digest = _digest(digest + tokens[start : start + size])
            hashes.append(digest)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _num_owed(sequence: Sequence) -> int:
    """Promised blocks that the sequence does not have yet."""
    return max(sequence.num_promised_blocks - len(sequence.block_table), 0)
