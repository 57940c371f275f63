"""Whether reusing prefixes would pay: hash chains of prompts, without any KV. Pure bookkeeping.

For each scope (a name whose meaning the engine does not know) it remembers the blocks of recent
prompts like a cache does: least recently used out first, the tail of a prompt before its head. So
it can tell how much of a new prompt would be found: in a memory as large as the KV cache, which
decides whether the scope's prefixes are reused, and in a larger one, which shows what more memory
would bring.

Only prompts count, as in published traces. A conversation's next turn could also reuse answers.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import NamedTuple

logger = logging.getLogger("tritium")

WINDOW_BLOCKS = 1 << 16  # size of the larger memory; a million tokens with blocks of 16
# In all memories together, about 40 MB; beyond that, the scope that was idle longest is forgotten.
_MAX_BLOCKS = 1 << 18
_MAX_SCOPES = 1 << 12  # each a few hundred bytes, even without a block
_ON, _OFF = 0.20, 0.10  # reusable share of prompt tokens at which reuse begins, below which it ends
_MIN_REQUESTS = 16  # before reuse can begin
_MEMORY = 256  # requests; the weight of an older one decays with this time constant


class Overlap(NamedTuple):
    """Prompt tokens, and how many of them could have been reused."""

    num_tokens: int = 0
    num_pool_tokens: int = 0  # reusable with the KV cache's memory
    num_window_tokens: int = 0  # reusable with the larger memory


class PrefixIndex:
    """Measures possible reuse per scope, and decides on reuse. Thread-safe.

    Args:
        num_blocks: Blocks of the KV cache.
        block_size: Tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._scopes: OrderedDict[str, _Scope] = OrderedDict()  # least recently used first
        self._num_kept = 0
        self._lock = threading.Lock()
        self.total = Overlap()

    def observe(self, name: str, hashes: Seq[bytes], num_tokens: int) -> bool:
        """Count a new prompt.

        Args:
            name: Its scope.
            hashes: One per full block, of the block and all before it; equal only for equal tokens
                in the same scope.
            num_tokens: Length of the prompt.

        Returns:
            Whether its prefix should be reused, and published for reuse.
        """
        with self._lock:
            scope = self._scopes.get(name)
            if scope is None:
                scope = self._scopes[name] = _Scope(self._num_blocks)
            self._scopes.move_to_end(name)
            self._num_kept -= scope.num_kept
            # The last token is always computed.
            reusable = (num_tokens - 1) // self._block_size
            overlap = Overlap(
                num_tokens,
                min(scope.pool.insert(hashes), reusable) * self._block_size,
                min(scope.window.insert(hashes), reusable) * self._block_size,
            )
            self._num_kept += scope.num_kept
            while len(self._scopes) > (1 if self._num_kept > _MAX_BLOCKS else _MAX_SCOPES):
                _, idle = self._scopes.popitem(last=False)
                self._num_kept -= idle.num_kept
            self.total = Overlap(*map(sum, zip(self.total, overlap, strict=True)))
            if scope.decide(overlap):
                pool, window = scope.shares
                logger.info(
                    f"prefix cache {'on' if scope.is_on else 'off'} for scope '{name:.100}': "
                    f"{pool:.1%} of its prompts' tokens could lately be reused with this KV cache, "
                    f"{window:.1%} with one of {WINDOW_BLOCKS * self._block_size} tokens"
                )
            return scope.is_on


class _Scope:
    """A scope's memories, and what its recent requests could have reused."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = _Memory(min(num_blocks, WINDOW_BLOCKS))
        self.window = _Memory(WINDOW_BLOCKS)
        self.is_on = False
        self._num_requests = 0
        self._recent = [0.0, 0.0, 0.0]  # sums of the fields of Overlap, older requests count less

    @property
    def num_kept(self) -> int:
        return len(self.pool) + len(self.window)

    @property
    def shares(self) -> tuple[float, float]:
        """Reusable share of recent prompt tokens, with each memory."""
        num_tokens, num_pool_tokens, num_window_tokens = self._recent
        return num_pool_tokens / num_tokens, num_window_tokens / num_tokens

    def decide(self, overlap: Overlap) -> bool:
        """Count a request. Returns whether that switched reuse on or off."""
        keep = 1 - 1 / _MEMORY
        self._recent = [old * keep + new for old, new in zip(self._recent, overlap, strict=True)]
        self._num_requests += 1
        share, _ = self.shares
        was_on = self.is_on
        if self._num_requests >= _MIN_REQUESTS:
            self.is_on = share >= (_OFF if was_on else _ON)
        return self.is_on is not was_on


class _Memory:
    """The hashes of at most `num_blocks` blocks, least recently used out first."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def insert(self, hashes: Seq[bytes]) -> int:
        """Insert a prompt's blocks. Returns how many of its leading blocks were found."""
        blocks = self._blocks
        num_found = sum(1 for _ in takewhile(blocks.__contains__, hashes))
        for digest in reversed(hashes):
            blocks[digest] = None
            blocks.move_to_end(digest)
        while len(blocks) > self._num_blocks:
            blocks.popitem(last=False)
        return num_found
