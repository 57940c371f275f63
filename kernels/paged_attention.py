"""Causal attention over the paged KV cache: one kernel for any mix of prefill and decode."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.metadata import AttentionMetadata

INTERPRETED = triton.knobs.runtime.interpret  # read when @triton.jit does: at import
LOG2_E = 1.4426950408889634


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
def _attend(
    acc,  # [BLOCK_M, BLOCK_D] float32: sum of p * v so far
    row_sum,  # [BLOCK_M] float32: sum of p so far
    row_max,  # [BLOCK_M] float32: the largest score so far, times `scale`
    q,  # [BLOCK_M, BLOCK_D]
    position,  # [BLOCK_M] int32: of each query in its sequence
    key_ptr,  # [num_blocks * BLOCK_SIZE, HEAD_DIM], rows `slot_stride` apart: one KV head
    value_ptr,  # the same
    block_table_ptr,  # [max_blocks] int32: this sequence's
    begin,  # int32, as end: positions of keys
    end,
    slot_stride,
    scale,
    MASKED: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Takes the keys [begin, end) into the online softmax (Milakov & Gimelshein, 2018):

    m' = max(m, s);  p = 2^(s - m');  l' = l * 2^(m - m') + sum p;  acc' = acc * 2^(m - m') + p v

    Without MASKED, every query sees every key and `end - begin` is a multiple of BLOCK_N.
    """
    dim = tl.arange(0, q.shape[1])  # [BLOCK_D]
    for start in range(begin, end, BLOCK_N):
        # -- locate the keys: int64, as a large cache has more elements than int32 counts --
        key = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        # Past the end the cache holds anything, and NaN would survive p = 0.
        in_range = key < end if MASKED else tl.full([BLOCK_N], True, tl.int1)
        block = tl.load(block_table_ptr + key // BLOCK_SIZE, mask=in_range, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        offsets = slot[:, None] * slot_stride + dim[None, :]  # [BLOCK_N, BLOCK_D]
        loaded = in_range[:, None] & (dim < HEAD_DIM)[None, :]  # [BLOCK_N, BLOCK_D]

        # -- scores --
        k = tl.load(key_ptr + offsets, mask=loaded, other=0.0)  # [BLOCK_N, BLOCK_D]
        s = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N] float32
        if MASKED:
            seen = key[None, :] <= position[:, None]  # [BLOCK_M, BLOCK_N]
            if SLIDING_WINDOW:
                seen &= key[None, :] > position[:, None] - SLIDING_WINDOW
            s = tl.where(seen, s, float("-inf"))

        # -- online softmax --
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new_max[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        row_max = new_max

        # -- values --
        v = tl.load(value_ptr + offsets, mask=loaded, other=0.0)  # [BLOCK_N, BLOCK_D]
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, row_sum, row_max


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
    kv_cache_ptr,  # [2, num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    block_tables_ptr,  # [num_seqs, max_blocks] int32
    query_start_loc_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    num_seqs,
    scale,  # of the scores, times log2(e)
    q_stride,  # between tokens, as out_stride
    out_stride,
    values_stride,  # between the keys and the values
    slot_stride,
    block_tables_stride,
    GROUP: tl.constexpr,  # query heads a KV head
    SLIDING_WINDOW: tl.constexpr,  # 0: none
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out = softmax(scale * q k^T + mask) v, after FlashAttention-2 (Dao, 2023).

    One program takes one Q-block: BLOCK_Q tokens of one sequence, with all the query heads of
    one KV head, as the rows of one tile. The keys that its rows see, as half-open ranges::

        [begin, full_begin)      [full_begin, full_end)    [full_end, end)
          front edge of windows    seen by every row         causal edge
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    q_block = tl.program_id(0)
    kv_head = tl.program_id(1)

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
    key_ptr = kv_cache_ptr + kv_head * HEAD_DIM
    value_ptr = key_ptr + values_stride
    block_table_ptr = block_tables_ptr + seq.to(tl.int64) * block_tables_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Not -inf: a row that sees nothing of its first tile would get 2^(-inf + inf), NaN.
    row_max = tl.full([BLOCK_M], -1e30, tl.float32)
    if SLIDING_WINDOW:
        acc, row_sum, row_max = _attend(
            acc, row_sum, row_max, q, position, key_ptr, value_ptr, block_table_ptr,
            begin, full_begin, slot_stride, scale,
            True, SLIDING_WINDOW, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, q, position, key_ptr, value_ptr, block_table_ptr,
        full_begin, full_end, slot_stride, scale,
        False, SLIDING_WINDOW, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, q, position, key_ptr, value_ptr, block_table_ptr,
        tl.maximum(full_begin, full_end), end, slot_stride, scale,
        True, SLIDING_WINDOW, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip

    # -- store --
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)  # [BLOCK_M, BLOCK_D]
    stored = (row < (end_token - first_token) * GROUP)[:, None] & in_head
    tl.store(out_ptr + batch_token * out_stride + in_token, out, mask=stored)


def paged_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]; tokens may lie apart, as in a view of qkv
    kv_cache: Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim]
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """See `kernels.attention`.

    The launch depends on the batch's shape only, never on values that lie on the device.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_cache.shape[2:4]
    num_seqs = metadata.seq_lens.shape[0]
    group = num_heads // num_kv_heads
    tables = (metadata.block_tables, metadata.query_start_loc, metadata.seq_lens)

    assert kv_cache.dim() == 5 and kv_cache.shape[0] == 2 and kv_cache.shape[4] == head_dim
    assert num_heads == group * num_kv_heads and group > 0
    assert head_dim % 16 == 0 and head_dim <= 256
    assert block_size >= 16 and block_size & (block_size - 1) == 0
    assert block_size == metadata.block_size
    assert metadata.block_tables.shape[0] == num_seqs
    assert metadata.query_start_loc.shape == (num_seqs + 1,)
    assert q.stride()[1:] == (head_dim, 1) and kv_cache.is_contiguous()
    assert q.dtype == kv_cache.dtype and q.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in tables)
    assert all(t.device == q.device for t in (kv_cache, *tables))
    assert scale > 0 and (sliding_window is None or sliding_window > 0)
    if INTERPRETED and q.dtype == torch.bfloat16:
        raise NotImplementedError("Triton-lang's interpreter computes tl.dot of bfloat16 wrongly")

    # Rows for what there is: one token, a short prefill or a long one; from 64 on Hopper's wgmma
    # takes them. Chosen to spill nothing and to fit 99 KiB of shared memory, which for exact
    # float32 only the smallest tile does, up to head_dim 128. Not yet measured for speed.
    if metadata.max_query_len == 1 or q.dtype == torch.float32:
        block_m, block_n, num_warps = 16, 64, 4
    elif head_dim > 128:
        block_m, block_n, num_warps = 64, 32, 8
    elif metadata.max_query_len * group <= 64:
        block_m, block_n, num_warps = 64, 64, 4
    else:
        block_m, block_n, num_warps = 128, 64, 8
    block_m = max(block_m, triton.next_power_of_2(group))  # at least one token

    out = q.new_empty(q.shape)
    grid = (num_tokens // (block_m // group) + num_seqs, num_kv_heads)
    _paged_attention[grid](
        q,
        out,
        kv_cache,
        *tables,
        num_seqs,
        scale * LOG2_E,
        q.stride(0),
        out.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(2),
        metadata.block_tables.stride(0),
        GROUP=group,
        SLIDING_WINDOW=sliding_window or 0,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=num_warps,
        num_stages=3,  # the fewest that fetch block ids ahead of the keys they lead to
    )
    return out
