"""Causal attention over the paged KV cache: one kernel for any mix of prefill and decode.

A batch that only decodes is faster with `decode_attention`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.cuda.attention import LOG2_E, NUM_STAGES, attend, check_attention
from tritium.kernels.cuda.segments import find_segment
from tritium.kernels.metadata import AttentionMetadata, KVCache


# A value that varies from batch to batch must not cause another compilation. Vector loads need
# none of these, unlike the strides of q, out and the cache, which are specialised on.
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
    scales_ptr,  # [2, num_blocks, BLOCK_SIZE, num_kv_heads] float32; None: not quantised
    block_tables_ptr,  # [num_seqs, max_blocks] int32
    query_start_loc_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    num_seqs,
    scale,  # of the scores, times log2(e)
    q_stride,  # between tokens
    out_stride,  # between tokens
    values_stride,  # between the keys and the values
    block_tables_stride,
    C: tl.constexpr,  # see `Constants`
    SLIDING_WINDOW: tl.constexpr,  # 0: none
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out = softmax(scale * q k^T + mask) v, after FlashAttention-2 (Dao, 2023).

    With a soft cap, softmax(cap * tanh(scale / cap * q k^T) + mask) v (Gemma 2, 2024).

    One program computes one Q-block: BLOCK_Q tokens of one sequence, with all the query heads of
    one KV head, as the rows of one tile.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // C.GROUP
    q_block = tl.program_id(0)
    kv_head = tl.program_id(1)

    # -- which tokens: [first_token, end_token) of sequence `seq` --
    seq = find_segment(query_start_loc_ptr, q_block, num_seqs, BLOCK_Q)
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    first_token = (q_block - (query_start // BLOCK_Q + seq)) * BLOCK_Q
    if first_token >= query_len:
        return
    end_token = tl.minimum(first_token + BLOCK_Q, query_len)
    context_len = tl.load(seq_lens_ptr + seq) - query_len

    # -- load q: surplus rows repeat the last token and are not stored --
    row = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dim = tl.arange(0, C.BLOCK_D)  # [C.BLOCK_D]
    token = tl.minimum(first_token + row // C.GROUP, end_token - 1)  # [BLOCK_M]
    position = context_len + token  # [BLOCK_M]
    batch_token = (query_start + token).to(tl.int64)[:, None]  # [BLOCK_M, 1]
    head = (kv_head * C.GROUP + row % C.GROUP)[:, None]  # [BLOCK_M, 1]
    in_token = head * C.HEAD_DIM + dim[None, :]  # [BLOCK_M, C.BLOCK_D]
    in_head = (dim < C.HEAD_DIM)[None, :]  # [1, C.BLOCK_D]
    q = tl.load(q_ptr + batch_token * q_stride + in_token, mask=in_head, other=0.0)

    # -- which keys: see `attend` --
    end = context_len + end_token
    full_end = (context_len + first_token + 1) // BLOCK_N * BLOCK_N
    begin = 0
    full_begin = 0
    if SLIDING_WINDOW:
        begin = tl.maximum(context_len + first_token + 1 - SLIDING_WINDOW, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(end - SLIDING_WINDOW, 0), BLOCK_N) * BLOCK_N
        full_begin = tl.minimum(full_begin, end)

    # -- attend --
    out, _ = attend(
        q=q,
        position=position,
        cached_ptr=cached_ptr,
        scales_ptr=scales_ptr,
        values_stride=values_stride,
        block_table_ptr=block_tables_ptr + seq.to(tl.int64) * block_tables_stride,
        bounds=(begin, full_begin, tl.maximum(full_begin, full_end), end),
        scale=scale,
        C=C,
        SLIDING_WINDOW=SLIDING_WINDOW,
        BLOCK_N=BLOCK_N,
    )

    # -- store --
    stored = (row < (end_token - first_token) * C.GROUP)[:, None] & in_head
    out_ptrs = out_ptr + batch_token * out_stride + in_token  # [BLOCK_M, C.BLOCK_D]
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

    The launch depends only on the batch's shape, never on values on the device. A batch-invariant
    launch's tile does not depend on the shape, either.
    """
    constants = check_attention(q, kv_cache, metadata, scale, sliding_window, soft_cap)
    num_tokens, _, head_dim = q.shape
    num_kv_heads, num_seqs = kv_cache.data.shape[3], metadata.seq_lens.shape[0]
    group, block_d = constants.GROUP, constants.BLOCK_D

    # Rows for a short prefill or a long one; batch-invariant, always those of a short one. From 64
    # rows on Hopper uses wgmma. Chosen to spill nothing (a few bytes where the cache is quantised)
    # and to fit the shared memory of a multiprocessor: 227 KiB on Hopper; 99 on small GPUs, whose
    # code needs less of it. Not yet measured for speed.
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
    tables = (metadata.block_tables, metadata.query_start_loc, metadata.seq_lens)
    strides = (t.stride(0) for t in (q, out, kv_cache.data, metadata.block_tables))
    grid = (num_tokens // (block_m // group) + num_seqs, num_kv_heads)
    _paged_attention[grid](
        q,
        out,
        *kv_cache,
        *tables,
        num_seqs,
        scale * LOG2_E,
        *strides,
        C=constants,
        SLIDING_WINDOW=sliding_window or 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
        num_stages=NUM_STAGES,
    )
    return out
