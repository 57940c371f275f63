"""Whether reusing prefixes would pay: hash chains of prompts, without any KV. Pure bookkeeping.

For each scope (the engine does not know what that is) it remembers which blocks of tokens prompts
were made of, as if in a memory of blocks, least recently used first out, the tail of a prompt
before its head. So it can tell how much of a new prompt would still be there: in a memory as large
as the KV cache, which decides whether the scope's prefixes are reused, and in a larger one, which
tells what more memory would bring.

Only prompts count, as in published traces. What a conversation's next turn could reuse of answers
comes on top.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import NamedTuple

logger = logging.getLogger("tritium")

WINDOW_BLOCKS = 1 << 16  # of the larger memory: with blocks of 16 tokens, a million tokens
# Of all memories together, some 40 MB; then the scope that is idle longest goes.
_MAX_BLOCKS = 1 << 18
_ON, _OFF = 0.20, 0.10  # shares of prompt tokens: reuse begins at the first, ends below the second
_MIN_REQUESTS = 16  # before anything is decided
_MEMORY = 256  # requests: older ones count less and less


class Overlap(NamedTuple):
    """Prompt tokens that came, and how many of them could have been reused."""

    num_tokens: int = 0
    num_pool_tokens: int = 0  # with the KV cache's memory
    num_window_tokens: int = 0  # with the larger one


class PrefixIndex:
    """Measures reuse by scope, and decides on it. Any thread may call.

    Args:
        num_blocks: Blocks of the KV cache.
        block_size: Tokens a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._scopes: OrderedDict[str, _Scope] = OrderedDict()  # the latest used last
        self._num_kept = 0
        self._lock = threading.Lock()
        self.total = Overlap()

    def observe(self, name: str, hashes: Seq[bytes], num_tokens: int) -> bool:
        """Count a prompt that has come.

        Args:
            name: Its scope.
            hashes: Of its full blocks, each with all before it; equal only where all of that and
                the scope are.
            num_tokens: Of the prompt.

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
                min(scope.pool.take_in(hashes), reusable) * self._block_size,
                min(scope.window.take_in(hashes), reusable) * self._block_size,
            )
            self._num_kept += scope.num_kept
            while self._num_kept > _MAX_BLOCKS and len(self._scopes) > 1:
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
    """A scope's memories, and what its requests could lately have reused."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = _Memory(min(num_blocks, WINDOW_BLOCKS))
        self.window = _Memory(WINDOW_BLOCKS)
        self.is_on = False
        self._num_requests = 0
        self._recent = (0.0, 0.0, 0.0)  # as Overlap, older ones less

    @property
    def num_kept(self) -> int:
        return len(self.pool) + len(self.window)

    @property
    def shares(self) -> tuple[float, float]:
        """Of prompt tokens, with each memory."""
        num_tokens, num_pool_tokens, num_window_tokens = self._recent
        return num_pool_tokens / num_tokens, num_window_tokens / num_tokens

    def decide(self, overlap: Overlap) -> bool:
        """Count a request; whether reuse was switched by it."""
        keep = 1 - 1 / _MEMORY
        old = self._recent
        self._recent = (
            old[0] * keep + overlap[0],
            old[1] * keep + overlap[1],
            old[2] * keep + overlap[2],
        )
        self._num_requests += 1
        share, _ = self.shares
        was_on = self.is_on
        if self._num_requests >= _MIN_REQUESTS:
            self.is_on = share >= (_OFF if was_on else _ON)
        return self.is_on is not was_on


class _Memory:
    """So many blocks, least recently used first out."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def take_in(self, hashes: Seq[bytes]) -> int:
        """Take in a prompt's blocks; how many of its first ones were there."""
        blocks = self._blocks
        num_found = 0
        for digest in hashes:
            if digest not in blocks:
                break
            num_found += 1
        for digest in reversed(hashes):
            blocks[digest] = None
            blocks.move_to_end(digest)
        while len(blocks) > self._num_blocks:
            blocks.popitem(last=False)
        return num_found
