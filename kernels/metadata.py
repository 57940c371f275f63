"""What the attention kernels need to know of a step's batch; the same for every layer."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """The shape of one step's batch. The model runner fills it once a step.

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
    num_decodes: int  # how many of the sequences have query_len 1
    max_query_len: int
    max_seq_len: int

    # -- derived once for all layers, used by the CPU twin only --

    @cached_property
    def decode_block_ids(self) -> Tensor:
        """[num_decodes * num_blocks of the longest decoding sequence] int64."""
        longest = int(self.seq_lens[: self.num_decodes].max())
        num_blocks = -(-longest // self.block_size)
        return self.block_tables[: self.num_decodes, :num_blocks].flatten().long()

    @cached_property
    def decode_bias(self) -> Tensor:
        """[num_decodes, 1, 1, positions in decode_block_ids] float32: 0, or -inf past seq_len."""
        width = self.decode_block_ids.shape[0] // self.num_decodes * self.block_size
        past_end = torch.arange(width) >= self.seq_lens[: self.num_decodes, None]
        return torch.zeros(past_end.shape).masked_fill_(past_end, float("-inf"))[:, None, None]

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
