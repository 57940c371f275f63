"""Causal attention over the paged KV cache: one kernel for any mix of prefill and decode.

Knows of no batch that only decodes: that is faster with `decode_attention`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.metadata import AttentionMetadata, KVCache

INTERPRETED = triton.knobs.runtime.interpret  # read when @triton.jit does: at import
LOG2_E = 1.4426950408889634
# Triton-lang deals a loop's stages out evenly along its chain of loads, here block ids -> keys and
# values -> products. From five on it fetches those of the next tile during the products of this
# one; with fewer it asks for them afterwards, and waits.
NUM_STAGES = 5


@triton.jit
def _find_sequence(query_start_loc_ptr, q_block, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence i with query_start_loc[i] // BLOCK_Q + i <= q_block.

    That sum is where sequence i's Q-blocks start: each sequence before it owns one more than
    its whole blocks, enough for any remainder. So the host need not know the lengths.
    """
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= q_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def attend(
    acc,  # [BLOCK_M, BLOCK_D] float32: sum of p * v so far
    row_sum,  # [BLOCK_M] float32: sum of p so far
    row_max,  # [BLOCK_M] float32: the largest score so far, times `scale`; what p is relative to
    q,  # [BLOCK_M, BLOCK_D]
    position,  # [BLOCK_M] int32: of each query in its sequence
    key_ptr,  # [num_slots, num_kv_heads, HEAD_DIM], from this KV head on; as value_ptr
    value_ptr,
    key_scale_ptr,  # [num_slots, num_kv_heads] float32, from this KV head on; as value_scale_ptr
    value_scale_ptr,
    block_table_ptr,  # [max_blocks] int32: this sequence's
    begin,  # int32, as end: positions of keys
    end,
    num_kv_heads,
    scale,  # of the scores, times log2(e)
    QUANTISED: tl.constexpr,
    MASKED: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,  # 0: none
    SOFT_CAP: tl.constexpr,  # of the scores before `scale`; 0: none
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Takes the keys [begin, end) into the online softmax (Milakov & Gimelshein, 2018):

    m' = max(m, s);  p = 2^(s - m');  l' = l * 2^(m - m') + sum p;  acc' = acc * 2^(m - m') + p v

    Without MASKED, every query sees every key and `end - begin` is a multiple of BLOCK_N.
    """
    if q.dtype == tl.bfloat16 and key_ptr.dtype.element_ty == tl.float8e4nv:
        # GPUs turn float8 into float16 with one instruction for two numbers, into bfloat16 with
        # five, too many to keep up with the memory. Of its range queries need little.
        q = q.to(tl.float16)
    dim = tl.arange(0, q.shape[1])  # [BLOCK_D]
    for start in range(begin, end, BLOCK_N):
        # -- locate the keys: int64, as a large cache has more elements than int32 counts --
        key = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        # Past the end the cache holds anything, and NaN would survive p = 0.
        in_range = key < end if MASKED else tl.full([BLOCK_N], True, tl.int1)
        block = tl.load(block_table_ptr + key // BLOCK_SIZE, mask=in_range, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        row = slot * num_kv_heads  # [BLOCK_N]
        offsets = row[:, None] * HEAD_DIM + dim[None, :]  # [BLOCK_N, BLOCK_D]
        loaded = in_range[:, None] & (dim < HEAD_DIM)[None, :]  # [BLOCK_N, BLOCK_D]

        # -- scores --
        k = tl.load(key_ptr + offsets, mask=loaded, other=0.0)  # [BLOCK_N, BLOCK_D]
        s = tl.dot(q, k.to(q.dtype).T, input_precision="ieee")  # [BLOCK_M, BLOCK_N] float32
        if QUANTISED:
            key_scale = tl.load(key_scale_ptr + row, mask=in_range, other=0.0)  # [BLOCK_N]
            s *= key_scale[None, :]
        if SOFT_CAP > 0:
            s = SOFT_CAP * _tanh(s / SOFT_CAP)
        if MASKED:
            seen = key[None, :] <= position[:, None]  # [BLOCK_M, BLOCK_N]
            if SLIDING_WINDOW:
                seen &= key[None, :] > position[:, None] - SLIDING_WINDOW
            s = tl.where(seen, s, float("-inf"))

        # -- online softmax --
        # p up to 2^6 where it will be multiplied by the values' scales, which are small numbers:
        # float16 has no bits to lose, and room for the largest scale that its values can have.
        tile_max = tl.max(s, 1) * scale - 6 if QUANTISED else tl.max(s, 1) * scale  # [BLOCK_M]
        new_max = tl.maximum(row_max, tile_max)
        p = tl.exp2(s * scale - new_max[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        row_max = new_max

        # -- values --
        v = tl.load(value_ptr + offsets, mask=loaded, other=0.0)  # [BLOCK_N, BLOCK_D]
        if QUANTISED:
            value_scale = tl.load(value_scale_ptr + row, mask=in_range, other=0.0)  # [BLOCK_N]
            p *= value_scale[None, :]
        acc *= rescale[:, None]
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
    return acc, row_sum, row_max


@triton.jit
def _tanh(x):
    return 1 - 2 / (tl.exp(2 * x) + 1)  # where exp overflows, 1


# What varies from batch to batch must not compile a kernel anew. None of it is needed for
# vector loads, unlike the strides of q, out and the cache, which are specialised on.
@triton.jit(
    do_not_specialize=[
        "block_tables_ptr",
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "num_seqs",
        "block_tables_stride",
    ]
)
def _paged_attention(
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    cached_ptr,  # [2, num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    scales_ptr,  # [2, num_blocks, BLOCK_SIZE, num_kv_heads] float32, where QUANTISED
    block_tables_ptr,  # [num_seqs, max_blocks] int32
    query_start_loc_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    num_seqs,
    scale,  # of the scores, times log2(e)
    q_stride,  # between tokens, as out_stride
    out_stride,
    values_stride,  # between the keys and the values
    block_tables_stride,
    GROUP: tl.constexpr,  # query heads a KV head
    QUANTISED: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,  # 0: none
    SOFT_CAP: tl.constexpr,  # of the scores before `scale`; 0: none
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out = softmax(scale * q k^T + mask) v, after FlashAttention-2 (Dao, 2023).

    With a soft cap, softmax(cap * tanh(scale / cap * q k^T) + mask) v (Gemma 2, 2024).

    One program takes one Q-block: BLOCK_Q tokens of one sequence, with all the query heads of
    one KV head, as the rows of one tile. The keys that its rows see, as half-open ranges::

        [begin, full_begin)      [full_begin, full_end)    [full_end, end)
          front edge of windows    seen by every row         causal edge
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    q_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)

    # -- which tokens: [first_token, end_token) of sequence `seq` --
    seq = _find_sequence(query_start_loc_ptr, q_block, num_seqs, BLOCK_Q)
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    first_token = (q_block - (query_start // BLOCK_Q + seq)) * BLOCK_Q
    if first_token >= query_len:
        return
    end_token = tl.minimum(first_token + BLOCK_Q, query_len)
    context_len = tl.load(seq_lens_ptr + seq) - query_len

    # -- load q: rows left over repeat the last token and are not stored --
    row = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dim = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    token = tl.minimum(first_token + row // GROUP, end_token - 1)  # [BLOCK_M]
    position = context_len + token  # [BLOCK_M]
    batch_token = (query_start + token).to(tl.int64)[:, None]  # [BLOCK_M, 1]
    head = (kv_head * GROUP + row % GROUP)[:, None]  # [BLOCK_M, 1]
    in_token = head * HEAD_DIM + dim[None, :]  # [BLOCK_M, BLOCK_D]
    in_head = (dim < HEAD_DIM)[None, :]  # [1, BLOCK_D]
    q = tl.load(q_ptr + batch_token * q_stride + in_token, mask=in_head, other=0.0)

    # -- which keys --
    end = context_len + end_token
    full_end = (context_len + first_token + 1) // BLOCK_N * BLOCK_N
    begin = 0
    full_begin = 0
    if SLIDING_WINDOW:
        begin = tl.maximum(context_len + first_token + 1 - SLIDING_WINDOW, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(end - SLIDING_WINDOW, 0), BLOCK_N) * BLOCK_N
        full_begin = tl.minimum(full_begin, end)

    # -- attend --
    key_ptr = cached_ptr + kv_head * HEAD_DIM
    value_ptr = key_ptr + values_stride
    key_scale_ptr = scales_ptr + kv_head if QUANTISED else None
    value_scale_ptr = key_scale_ptr + values_stride // HEAD_DIM if QUANTISED else None
    block_table_ptr = block_tables_ptr + seq.to(tl.int64) * block_tables_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Not -inf: a row that sees nothing of its first tile would get 2^(-inf + inf), NaN.
    row_max = tl.full([BLOCK_M], -1e30, tl.float32)
    if SLIDING_WINDOW:
        acc, row_sum, row_max = attend(
            acc, row_sum, row_max, q, position,
            key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, block_table_ptr,
            begin, full_begin, num_kv_heads, scale,
            QUANTISED, True, SLIDING_WINDOW, SOFT_CAP, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
    acc, row_sum, row_max = attend(
        acc, row_sum, row_max, q, position,
        key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, block_table_ptr,
        full_begin, full_end, num_kv_heads, scale,
        QUANTISED, False, SLIDING_WINDOW, SOFT_CAP, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    acc, row_sum, row_max = attend(
        acc, row_sum, row_max, q, position,
        key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, block_table_ptr,
        tl.maximum(full_begin, full_end), end, num_kv_heads, scale,
        QUANTISED, True, SLIDING_WINDOW, SOFT_CAP, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip

    # -- store: a row that saw no key has acc 0, and is to be 0, not 0 / 0 --
    out = acc / tl.where(row_sum > 0, row_sum, 1)[:, None]  # [BLOCK_M, BLOCK_D]
    stored = (row < (end_token - first_token) * GROUP)[:, None] & in_head
    out_ptrs = out_ptr + batch_token * out_stride + in_token  # [BLOCK_M, BLOCK_D]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=stored)


def paged_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]; tokens may lie apart, as in a view of qkv
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """See `kernels.attention`.

    The launch depends on the batch's shape only, never on values that lie on the device, and a
    batch-invariant one's tile not even on that.
    """
    check(q, kv_cache, metadata, scale, sliding_window, soft_cap)
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_cache.data.shape[2:4]
    num_seqs = metadata.seq_lens.shape[0]
    group = num_heads // num_kv_heads

    # Rows for what there is, a short prefill or a long one, or, batch-invariant, those of a short
    # one always; from 64 on Hopper's wgmma takes them. Chosen to spill nothing (a few bytes where
    # the cache is quantised) and to fit the shared memory of a multiprocessor: 227 KiB on Hopper;
    # 99 on small GPUs, whose code needs less of it. Not yet measured for speed.
    block_d = triton.next_power_of_2(head_dim)
    if q.dtype == torch.float32:  # exact, on no tensor core
        block_m, block_n, num_warps = 16, min(4096 // block_d, 64), 4
    elif head_dim > 128:
        block_m, block_n, num_warps = (64, 16, 4) if kv_cache.scales is None else (64, 32, 8)
    elif batch_invariant or metadata.max_query_len * group <= 64:
        block_m, block_n, num_warps = 64, 64, 4
    else:
        block_m, block_n, num_warps = 128, 64, 8
    block_m = max(block_m, triton.next_power_of_2(group))  # at least one token

    out = q.new_empty(q.shape)
    grid = (num_tokens // (block_m // group) + num_seqs, num_kv_heads)
    _paged_attention[grid](
        q,
        out,
        kv_cache.data,
        kv_cache.scales,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        num_seqs,
        scale * LOG2_E,
        q.stride(0),
        out.stride(0),
        kv_cache.data.stride(0),
        metadata.block_tables.stride(0),
        GROUP=group,
        QUANTISED=kv_cache.scales is not None,
        SLIDING_WINDOW=sliding_window or 0,
        SOFT_CAP=soft_cap / scale if soft_cap else 0.0,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=num_warps,
        num_stages=NUM_STAGES,
    )
    return out


def check(
    q: Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    """Asserts what the attention kernels take for granted of their arguments."""
    _, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_cache.data.shape[2:4]
    num_seqs = metadata.seq_lens.shape[0]
    tables = (metadata.block_tables, metadata.query_start_loc, metadata.seq_lens)

    kv_cache.check(q)
    assert q.stride()[1:] == (head_dim, 1)
    assert num_heads > 0
    assert num_heads % num_kv_heads == 0
    assert head_dim % 16 == 0
    assert head_dim <= 256
    assert block_size >= 16
    assert block_size & (block_size - 1) == 0
    assert block_size == metadata.block_size
    assert metadata.block_tables.shape[0] == num_seqs
    assert metadata.query_start_loc.shape == (num_seqs + 1,)
    assert all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in tables)
    assert all(t.device == q.device for t in tables)
    assert scale > 0
    assert sliding_window is None or sliding_window > 0
    assert soft_cap is None or soft_cap > 0
    if INTERPRETED and q.dtype == torch.bfloat16 and kv_cache.data.dtype != torch.float8_e4m3fn:
        raise NotImplementedError("Triton-lang's interpreter computes tl.dot of bfloat16 wrongly")
