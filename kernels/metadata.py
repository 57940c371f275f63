"""The inputs of attention: a layer's KV cache, and the shape of a step's batch for all layers."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

_SHORT = 128  # tokens; padding to this length costs less than another group

# A vector x is quantised as x / scale, with scale = max |x| / the largest number of the dtype.
QUANTISED_MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SMALLEST_MAX = 1e-30  # replaces a smaller max |x|, so that nothing is divided by 0


class KVCache(NamedTuple):
    """One layer's keys ([0]) and values ([1]), in blocks of `block_size` tokens.

    If quantised, a vector is `data * scales`, with one scale per token and KV head.
    """

    # [2, num_blocks, block_size, num_kv_heads, head_dim]; the model's dtype, float8_e4m3fn or int8
    data: Tensor
    scales: Tensor | None = None  # [2, num_blocks, block_size, num_kv_heads] float32

    @classmethod
    def empty(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> "KVCache":
        """A cache of zeros, with scales if `dtype` is a quantised one."""
        shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
        data = torch.zeros(shape, dtype=dtype, device=device)
        scales = torch.zeros(shape[:-1], device=device) if dtype in QUANTISED_MAX else None
        return cls(data, scales)

    @staticmethod
    def block_bytes(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one block in one layer."""
        scale_bytes = 4 if dtype in QUANTISED_MAX else 0
        return 2 * block_size * num_kv_heads * (head_dim * dtype.itemsize + scale_bytes)

    def check(self, x: Tensor) -> None:
        """Assert what the kernels assume, for queries, keys or values x [..., head_dim]."""
        data, scales = self
        assert data.dim() == 5
        assert data.shape[0] == 2
        assert data.shape[4] == x.shape[-1]
        assert data.is_contiguous()
        assert data.device == x.device
        assert x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        if scales is None:
            assert data.dtype == x.dtype
            return
        assert data.dtype in QUANTISED_MAX
        assert scales.shape == data.shape[:-1]
        assert scales.dtype == torch.float32
        assert scales.is_contiguous()
        assert scales.device == x.device
        if data.dtype == torch.float8_e4m3fn and x.is_cuda:
            capability = torch.cuda.get_device_capability(x.device)
            assert capability >= (8, 9), (
                f"A KV cache in float8_e4m3fn needs a GPU of compute capability 8.9 or newer; "
                f"this one has {'.'.join(map(str, capability))}: use int8."
            )


class DecodeGroup(NamedTuple):
    """Sequences with one query token each, padded to the longest one."""

    rows: Tensor | slice  # the sequences: [num_rows] int64, or a slice from 0 on
    block_ids: Tensor  # [num_rows * num_blocks] int64
    bias: Tensor  # [num_rows, 1, 1, num_blocks * block_size] float32: 0, or -inf past the end


@dataclass(frozen=True)
class AttentionMetadata:
    """The shape of one step's batch. The model runner fills it once per step.

    A sequence's tokens, as half-open ranges::

        |<--------------- seq_len --------------->|
        |<-- context_len -->|<----- query_len --->|
        [ 0, context_len )  [ context_len, seq_len )
          already cached      computed in this step

    Sequences that decode (query_len 1) come first, those with a longer query after them.
    """

    query_start_loc: Tensor  # [num_seqs + 1] int32: where each sequence's query tokens start
    seq_lens: Tensor  # [num_seqs] int32
    block_tables: Tensor  # [num_seqs, max_blocks] int32: physical block of each logical block
    slot_mapping: Tensor  # [num_tokens] int64: block * block_size + offset; -1: not written
    block_size: int
    num_decodes: int  # sequences with query_len 1
    max_query_len: int

    # -- derived once for all layers, only for `reference.attention` --

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """The decoding sequences, grouped by similar lengths.

        A group is padded to its longest sequence. At most half of a sequence's keys are padding,
        except for short sequences.
        """
        seq_lens = self.seq_lens[: self.num_decodes]
        ascending, order = seq_lens.sort()
        groups = []
        end = self.num_decodes
        while end:
            longest = int(ascending[end - 1])
            too_short = longest // 2 if longest > _SHORT else 0
            start = int(torch.searchsorted(ascending, too_short))
            # If all are in one group, a slice avoids a copy.
            whole = start == 0 and end == self.num_decodes
            groups.append(self._decode_group(slice(0, end) if whole else order[start:end], longest))
            end = start
        return groups

    def _decode_group(self, rows: Tensor | slice, longest: int) -> DecodeGroup:
        num_blocks = -(-longest // self.block_size)
        past_end = torch.arange(num_blocks * self.block_size) >= self.seq_lens[rows][:, None]
        bias = torch.zeros(past_end.shape).masked_fill_(past_end, float("-inf"))
        block_ids = self.block_tables[rows, :num_blocks].flatten().long()
        return DecodeGroup(rows, block_ids, bias[:, None, None])

    @cached_property
    def prefills(self) -> list[tuple[int, int, int, Tensor]]:
        """(first query token, query_len, seq_len, block ids [num_blocks] int64) of each prefill."""
        starts = self.query_start_loc.tolist()
        seq_lens = self.seq_lens.tolist()
        return [
            (
                starts[i],
                starts[i + 1] - starts[i],
                seq_lens[i],
                self.block_tables[i, : -(-seq_lens[i] // self.block_size)].long(),
            )
            for i in range(self.num_decodes, len(seq_lens))
        ]
