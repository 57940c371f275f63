"""Attention of one query token per sequence over the paged KV cache, split along the keys.

Flash-Decoding (Dao et al., 2023): a sequence's keys are split over as many programs as fill the
GPU, and a second kernel merges the parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.cuda.attention import LOG2_E, NUM_STAGES, attend, check_attention
from tritium.kernels.metadata import AttentionMetadata, KVCache


@triton.jit(do_not_specialize=["block_tables_ptr", "seq_lens_ptr", "block_tables_stride"])
def _decode_attention(
    q_ptr,  # [num_seqs, num_heads, HEAD_DIM]
    out_ptr,  # [num_seqs, num_heads, SPLITS, HEAD_DIM]
    log_sum_ptr,  # [num_seqs, num_heads, SPLITS] float32; None: SPLITS is 1
    cached_ptr,  # [2, num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    scales_ptr,  # [2, num_blocks, BLOCK_SIZE, num_kv_heads] float32; None: not quantised
    block_tables_ptr,  # [num_seqs, max_blocks] int32
    seq_lens_ptr,  # [num_seqs] int32
    scale,  # of the scores, times log2(e)
    q_stride,  # between tokens
    values_stride,  # between the keys and the values
    block_tables_stride,
    C: tl.constexpr,  # see `Constants`
    SPLITS: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,  # 0: none
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out = softmax(scale * q k^T) v and log_sum = log2(sum(2^(scale * q k^T))), of a split's keys.

    One program computes the query heads of one KV head, as the rows of one tile, for one split.
    The keys that the token sees are divided in whole tiles, as half-open ranges::

        first_key                                                       seq_len
        [begin, end) of split 0 | [begin, end) of split 1 | ... | cut short | empty ...
    """
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    split = tl.program_id(2)

    # -- which keys --
    seq_len = tl.load(seq_lens_ptr + seq)
    first_key = tl.maximum(seq_len - SLIDING_WINDOW, 0) if SLIDING_WINDOW else 0
    split_len = tl.cdiv(tl.cdiv(seq_len - first_key, BLOCK_N), SPLITS) * BLOCK_N
    begin = tl.minimum(first_key + split * split_len, seq_len)
    end = tl.minimum(begin + split_len, seq_len)
    full_end = begin + (end - begin) // BLOCK_N * BLOCK_N

    # -- load q: surplus rows repeat the last head and are not stored --
    row = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dim = tl.arange(0, C.BLOCK_D)  # [C.BLOCK_D]
    head = kv_head * C.GROUP + tl.minimum(row, C.GROUP - 1)  # [BLOCK_M]
    in_head = (dim < C.HEAD_DIM)[None, :]  # [1, C.BLOCK_D]
    q_ptrs = q_ptr + seq.to(tl.int64) * q_stride + head[:, None] * C.HEAD_DIM + dim[None, :]
    q = tl.load(q_ptrs, mask=in_head, other=0.0)  # [BLOCK_M, C.BLOCK_D]

    # -- attend: no window, as it only moves the first key --
    out, log_sum = attend(
        q=q,
        position=tl.zeros([BLOCK_M], tl.int32) + seq_len - 1,
        cached_ptr=cached_ptr,
        scales_ptr=scales_ptr,
        values_stride=values_stride,
        block_table_ptr=block_tables_ptr + seq.to(tl.int64) * block_tables_stride,
        bounds=(begin, begin, full_end, end),
        scale=scale,
        C=C,
        SLIDING_WINDOW=0,
        BLOCK_N=BLOCK_N,
    )

    # -- store: of an empty split only log_sum, -inf; of a padded sequence's only split zeros --
    is_head = row < C.GROUP  # [BLOCK_M]
    part = (seq.to(tl.int64) * num_kv_heads * C.GROUP + head) * SPLITS + split  # [BLOCK_M]
    stored = is_head[:, None] & in_head  # [BLOCK_M, C.BLOCK_D]
    if SPLITS > 1:
        tl.store(log_sum_ptr + part, log_sum, mask=is_head)
        stored &= begin < end
    out_ptrs = out_ptr + part[:, None] * C.HEAD_DIM + dim[None, :]  # [BLOCK_M, C.BLOCK_D]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _merge_splits(
    parts_ptr,  # [num_seqs, num_heads, SPLITS, HEAD_DIM] float32
    log_sum_ptr,  # [num_seqs, num_heads, SPLITS] float32
    out_ptr,  # [num_seqs, num_heads, HEAD_DIM]
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out = sum(2^log_sum * part) / sum(2^log_sum) over the splits; 0 where all are empty.

    One program computes one head of one token.
    """
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)  # [SPLITS]
    dim = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    log_sum = tl.load(log_sum_ptr + head * SPLITS + split)  # [SPLITS]
    # If all are empty, the largest must not be -inf: 2^(-inf + inf) is NaN.
    weight = tl.exp2(log_sum - tl.maximum(tl.max(log_sum, 0), -1e30))  # [SPLITS]
    # An empty split's part was never written.
    loaded = (log_sum > float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :]  # [SPLITS, BLOCK_D]
    part_ptrs = parts_ptr + (head * SPLITS + split)[:, None] * HEAD_DIM + dim[None, :]
    part = tl.load(part_ptrs, mask=loaded, other=0.0)  # [SPLITS, BLOCK_D]
    total = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1)  # [BLOCK_D]
    tl.store(out_ptr + head * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty), dim < HEAD_DIM)


def decode_attention(
    q: Tensor,  # [num_seqs, num_heads, head_dim]; tokens may lie apart, as in a view of qkv
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    splits: int | None = None,
) -> Tensor:
    """See `kernels.attention`, for sequences of one query token. A seq_len of 0 gives zeros.

    The launch depends only on the batch's shape, never on values on the device: a CUDA graph that
    was captured with one batch serves every other batch of its size.

    Args:
        splits: Into how many parts a sequence's keys are split; None: `num_splits` decides.
    """
    constants = check_attention(q, kv_cache, metadata, scale, sliding_window, soft_cap)
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, block_d = kv_cache.data.shape[3], constants.BLOCK_D
    assert metadata.seq_lens.shape == (num_seqs,)
    if splits is None:
        properties = torch.cuda.get_device_properties(q.device)
        splits = num_splits(num_seqs, num_kv_heads, properties.multi_processor_count)

    block_m = max(triton.next_power_of_2(constants.GROUP), 16)
    # Tiles of 16 KiB (8 if quantised), two of keys and two of values at a time: three to five
    # programs run at once on a multiprocessor of Hopper, with some 100 KiB in flight to it, three
    # times what its share of the bandwidth transfers in a microsecond.
    block_n = min(2**14 // (block_d * q.itemsize), 128)
    # Fewer warps need fewer instructions in total. Where numbers are converted, four warps would
    # take longer to issue theirs than the memory takes to transfer the numbers.
    num_warps = 2 if kv_cache.scales is not None and block_m == 16 else 4
    if head_dim > 128:
        num_warps *= 2
    out = q.new_empty(q.shape)
    if splits == 1:
        parts, log_sum = out, None
    else:
        parts = q.new_empty((num_seqs, num_heads, splits, head_dim), dtype=torch.float32)
        log_sum = q.new_empty((num_seqs, num_heads, splits), dtype=torch.float32)
    strides = (t.stride(0) for t in (q, kv_cache.data, metadata.block_tables))
    _decode_attention[(num_seqs, num_kv_heads, splits)](
        q,
        parts,
        log_sum,
        *kv_cache,
        metadata.block_tables,
        metadata.seq_lens,
        scale * LOG2_E,
        *strides,
        C=constants,
        SPLITS=splits,
        SLIDING_WINDOW=sliding_window or 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
        num_stages=NUM_STAGES,
    )
    if splits > 1:
        _merge_splits[(num_seqs * num_heads,)](
            parts, log_sum, out, SPLITS=splits, HEAD_DIM=head_dim, BLOCK_D=block_d, num_warps=4
        )
    return out


def num_splits(num_seqs: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """A power of two that gives each multiprocessor about eight programs; at most 64.

    Three to five run at once on each. More and shorter programs even out sequences of unequal
    lengths, on which a CUDA graph can't depend. 1, and no merge, if the batch alone has that many
    programs. 64 parts of a head are as much as one program merges in registers.
    """
    most = 8 * num_multiprocessors // (num_seqs * num_kv_heads)
    return min(1 << max(most.bit_length() - 1, 0), 64)
