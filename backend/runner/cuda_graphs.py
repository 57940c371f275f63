"""CUDA graphs of the steps that only decode: one launch instead of hundreds."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tritium.backend.runner.models import DecoderModel
from tritium.kernels import AttentionMetadata, KVCache

_NO_SLOT = -1  # the slot of padding, which is not written


class DecodeGraphs:
    """The model's forward pass, captured for some batch sizes and replayed for all sizes below.

    A graph repeats launches with the addresses that they had. So a step's inputs are copied to the
    addresses that the graph reads, and surplus rows are padding, without a slot and without keys.
    The kernels read the lengths on the device.

    Args:
        max_num_seqs: The largest batch.
        max_model_len: The longest sequence.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_caches: Sequence[KVCache],
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._block_size = block_size
        device = model.device
        max_blocks = -(-max_model_len // block_size)
        self._input_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._input_ids)
        self._slot_mapping = torch.full_like(self._input_ids, _NO_SLOT)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self._query_start_loc = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)

        self._sizes = batch_sizes(max_num_seqs)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        # Largest first: the smaller graphs then fit in its memory.
        self._graphs = {size: self._capture(size) for size in reversed(self._sizes)}

    def run(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Like `DecoderModel.forward`. The next run overwrites the result."""
        num_seqs = len(input_ids)
        size = next(size for size in self._sizes if size >= num_seqs)
        self._input_ids[:num_seqs].copy_(input_ids)
        self._positions[:num_seqs].copy_(positions)
        self._slot_mapping[:num_seqs].copy_(metadata.slot_mapping)
        self._slot_mapping[num_seqs:size].fill_(_NO_SLOT)
        self._seq_lens[:num_seqs].copy_(metadata.seq_lens)
        self._seq_lens[num_seqs:size].zero_()
        width = metadata.block_tables.shape[1]
        self._block_tables[:num_seqs, :width].copy_(metadata.block_tables)
        replay, hidden = self._graphs[size]
        replay()
        return hidden[:num_seqs]

    def _capture(self, size: int) -> tuple[Callable[[], None], Tensor]:
        """(replay, the hidden states [size, hidden] that it writes) of a batch of this size."""
        self._forward(size)  # compiles this size's kernels, which a capture can't
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = self._forward(size)
        return graph.replay, hidden

    @torch.inference_mode()
    def _forward(self, size: int) -> Tensor:
        metadata = AttentionMetadata(
            query_start_loc=self._query_start_loc[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=self._block_tables[:size],
            slot_mapping=self._slot_mapping[:size],
            block_size=self._block_size,
            num_decodes=size,
            max_query_len=1,
        )
        input_ids, positions = self._input_ids[:size], self._positions[:size]
        return self._model.forward(input_ids, positions, self._kv_caches, metadata)


def batch_sizes(largest: int) -> list[int]:
    """Ascending; close enough for little padding, few enough for a capture in seconds."""
    sizes = {1, 2, 4, *range(8, min(largest, 128), 8), *range(128, largest, 32), largest}
    return sorted(size for size in sizes if size <= largest)
