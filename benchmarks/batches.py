"""Random batches for the attention kernels: queries, a KV cache and its tables."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritium.kernels import AttentionMetadata, KVCache

BLOCK_SIZE = 16
NAN = float("nan")


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Batch(NamedTuple):
    """The first arguments of `kernels.attention`."""

    q: Tensor  # [num_tokens, num_heads, head_dim]
    kv_cache: KVCache
    metadata: AttentionMetadata


def random_batch(
    lengths: Sequence[tuple[int, int]],  # (query_len, seq_len) of each sequence, decodes first
    heads: Heads,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
    unseen: float = NAN,  # value of slots that no query may read
    num_blocks: int = 0,  # blocks of the cache; 0: as many as needed
) -> Batch:
    """Block tables with blocks in random order."""
    max_blocks = max(-(-seq_len // BLOCK_SIZE) for _, seq_len in lengths)
    num_used = len(lengths) * max_blocks
    num_blocks = num_blocks or num_used + 1
    block_tables = torch.randperm(num_blocks)[:num_used].view(len(lengths), max_blocks)
    kv_cache = KVCache.empty(num_blocks, BLOCK_SIZE, *heads[1:], cache_dtype, device)
    positions = torch.arange(max_blocks * BLOCK_SIZE)
    slots = (block_tables[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)
    written = torch.cat([slots[i, positions < n] for i, (_, n) in enumerate(lengths)]).to(device)
    _fill(kv_cache, written, unseen)
    num_tokens = sum(query_len for query_len, _ in lengths)
    # Queries, keys and values are in one tensor, as in the model.
    qkv = torch.randn(num_tokens, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
    q = qkv.to(device, dtype)[:, : heads.num_heads]
    return Batch(q, kv_cache, metadata_of(lengths, block_tables, device))


def metadata_of(
    lengths: Sequence[tuple[int, int]], block_tables: Tensor, device: torch.device
) -> AttentionMetadata:
    query_lens, seq_lens = (torch.tensor(numbers) for numbers in zip(*lengths, strict=True))
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)))
    owners = torch.repeat_interleave(torch.arange(len(lengths)), query_lens)
    positions = torch.arange(int(starts[-1])) + (seq_lens - starts[1:])[owners]
    blocks = block_tables[owners, positions // BLOCK_SIZE].long()
    return AttentionMetadata(
        query_start_loc=starts.int().to(device),
        seq_lens=seq_lens.int().to(device),
        block_tables=block_tables.int().to(device),
        slot_mapping=(blocks * BLOCK_SIZE + positions % BLOCK_SIZE).to(device),
        block_size=BLOCK_SIZE,
        num_decodes=int((query_lens == 1).sum()),
        max_query_len=int(query_lens.max()),
    )


def dense_attention(
    batch: Batch, scale: float, sliding_window: int | None = None, soft_cap: float | None = None
) -> Tensor:
    """softmax(scale * q k^T + mask) v in float64, sequence by sequence."""
    q, kv_cache, metadata = batch
    data = kv_cache.data.float()
    if kv_cache.scales is not None:
        data *= kv_cache.scales[..., None]
    group = q.shape[1] // data.shape[3]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    starts = metadata.query_start_loc.tolist()
    for i, seq_len in enumerate(metadata.seq_lens.tolist()):
        rows = q[starts[i] : starts[i + 1]].double()
        block_ids = metadata.block_tables[i, : -(-seq_len // BLOCK_SIZE)].long()
        keys, values = (
            cached[block_ids].flatten(0, 1)[:seq_len].double().repeat_interleave(group, dim=1)
            for cached in data
        )
        scores = torch.einsum("qhd,khd->hqk", rows, keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(seq_len - len(rows), seq_len, device=q.device)[:, None]
        distance = position - torch.arange(seq_len, device=q.device)
        unseen = (distance < 0) | (distance >= (sliding_window or seq_len))
        weights = scores.masked_fill_(unseen, float("-inf")).softmax(-1)
        out[starts[i] : starts[i + 1]] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def _fill(kv_cache: KVCache, written: Tensor, unseen: float) -> None:
    """Random numbers in the slots `written`, the value `unseen` in all others."""
    data, scales = kv_cache
    numbers = torch.full(data.shape, unseen, device=data.device)
    of_slots = numbers.view(2, -1, *data.shape[3:])
    random = torch.randn(2, len(written), *data.shape[3:], device=data.device)
    if scales is None:
        of_slots[:, written] = random
    else:
        of_slots[:, written] = (random * 32).clamp_(-127, 127).round_()
        scales.fill_(unseen)  # int8 has no NaN, so the scale is NaN
        of_slots = scales.view(2, -1, data.shape[3])
        of_slots[:, written] = torch.rand_like(of_slots[:, written]) / 32
    data.copy_(numbers)
