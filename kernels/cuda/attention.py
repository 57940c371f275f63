"""What both attention kernels share: one sequence's keys and values through the online softmax."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.cuda.launch import check, check_dot
from tritium.kernels.metadata import AttentionMetadata, KVCache

LOG2_E = 1.4426950408889634
# Triton-lang spreads the stages of a loop evenly over its chain of loads, here block ids -> keys
# and values -> products. From five stages on it loads the keys and values of the next tile during
# the products of this one; with fewer it loads them afterwards, and waits.
NUM_STAGES = 5


class Constants(NamedTuple):
    """What both kernels are compiled for; their parameter C."""

    GROUP: int  # query heads per KV head
    HEAD_DIM: int
    BLOCK_D: int  # HEAD_DIM, rounded up to a power of two
    BLOCK_SIZE: int
    SOFT_CAP: float  # of the scores before `scale`; 0: none


@triton.jit
def attend(
    q,  # [BLOCK_M, BLOCK_D]
    position,  # [BLOCK_M] int32: of each query in its sequence
    cached_ptr,  # [2, num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    scales_ptr,  # [2, num_blocks, BLOCK_SIZE, num_kv_heads] float32; None: not quantised
    values_stride,  # between the keys and the values
    block_table_ptr,  # [max_blocks] int32: this sequence's
    bounds,  # (begin, full_begin, full_end, end) int32: positions of keys
    scale,  # of the scores, times log2(e)
    C: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,  # 0: none
    BLOCK_N: tl.constexpr,
):
    """softmax(scale * q k^T + mask) v and log2(sum(2^(scale * q k^T + mask))) of the keys.

    Of the KV head `program_id(1)`. Tile by tile, with scores s, by the online softmax (Milakov &
    Gimelshein, 2018):

        m' = max(m, s);  p = 2^(s - m');  l' = l 2^(m - m') + sum p;  acc' = acc 2^(m - m') + p v

    The keys are in three half-open ranges. The middle one is whole tiles, without a mask::

        [begin, full_begin)      [full_begin, full_end)    [full_end, end)
          front edge of windows    seen by every row         causal edge

    Returns:
        ([BLOCK_M, BLOCK_D] float32, [BLOCK_M] float32): (0, -inf) in a row that sees no key.
    """
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    key_ptr = cached_ptr + kv_head * C.HEAD_DIM
    value_ptr = key_ptr + values_stride
    if scales_ptr is not None:
        key_scale_ptr = scales_ptr + kv_head
        value_scale_ptr = key_scale_ptr + values_stride // C.HEAD_DIM
    if q.dtype == tl.bfloat16 and cached_ptr.dtype.element_ty == tl.float8e4nv:
        # GPUs convert float8 to float16 with one instruction for two numbers, to bfloat16 with
        # five, which is slower than the memory. Queries need little of bfloat16's range.
        q = q.to(tl.float16)
    dim = tl.arange(0, q.shape[1])  # [BLOCK_D]
    acc = tl.zeros(q.shape, tl.float32)  # [BLOCK_M, BLOCK_D]: sum of p * v so far
    row_sum = tl.zeros([q.shape[0]], tl.float32)  # [BLOCK_M]: sum of p so far
    # [BLOCK_M]: the largest score so far, times `scale`; p is relative to it. Not -inf at first: a
    # row that sees nothing of its first tile would get 2^(-inf + inf), NaN.
    row_max = tl.full([q.shape[0]], -1e30, tl.float32)

    for part in tl.static_range(0 if SLIDING_WINDOW else 1, 3):
        for start in range(bounds[part], bounds[part + 1], BLOCK_N):
            # -- locate the keys: int64, as a large cache has more elements than int32 counts --
            key = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            # Past the end the cache may hold anything, and NaN would survive p = 0.
            in_range = key < bounds[part + 1] if part != 1 else tl.full([BLOCK_N], True, tl.int1)
            block = tl.load(block_table_ptr + key // C.BLOCK_SIZE, mask=in_range, other=0)
            slot = block.to(tl.int64) * C.BLOCK_SIZE + key % C.BLOCK_SIZE
            row = slot * num_kv_heads  # [BLOCK_N]
            offsets = row[:, None] * C.HEAD_DIM + dim[None, :]  # [BLOCK_N, BLOCK_D]
            loaded = in_range[:, None] & (dim < C.HEAD_DIM)[None, :]  # [BLOCK_N, BLOCK_D]

            # -- scores --
            k = tl.load(key_ptr + offsets, mask=loaded, other=0.0)  # [BLOCK_N, BLOCK_D]
            s = tl.dot(q, k.to(q.dtype).T, input_precision="ieee")  # [BLOCK_M, BLOCK_N] float32
            if scales_ptr is not None:
                key_scale = tl.load(key_scale_ptr + row, mask=in_range, other=0.0)  # [BLOCK_N]
                s *= key_scale[None, :]
            if C.SOFT_CAP > 0:
                s = C.SOFT_CAP * _tanh(s / C.SOFT_CAP)
            if part != 1:
                seen = key[None, :] <= position[:, None]  # [BLOCK_M, BLOCK_N]
                if SLIDING_WINDOW:
                    seen &= key[None, :] > position[:, None] - SLIDING_WINDOW
                s = tl.where(seen, s, float("-inf"))

            # -- online softmax --
            tile_max = tl.max(s, 1) * scale  # [BLOCK_M]
            if scales_ptr is not None:
                # p up to 2^6, as it is multiplied by the values' scales, which are small numbers:
                # float16 has no bits to lose, and room for the largest scale that values can have.
                tile_max -= 6
            new_max = tl.maximum(row_max, tile_max)
            p = tl.exp2(s * scale - new_max[:, None])  # [BLOCK_M, BLOCK_N]
            rescale = tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + tl.sum(p, 1)
            row_max = new_max

            # -- values --
            v = tl.load(value_ptr + offsets, mask=loaded, other=0.0)  # [BLOCK_N, BLOCK_D]
            if scales_ptr is not None:
                value_scale = tl.load(value_scale_ptr + row, mask=in_range, other=0.0)  # [BLOCK_N]
                p *= value_scale[None, :]
            acc *= rescale[:, None]
            acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")

    out = acc / tl.where(row_sum > 0, row_sum, 1)[:, None]  # not 0 / 0 in a row that sees no key
    return out, row_max + tl.log2(row_sum)


@triton.jit
def _tanh(x):
    return 1 - 2 / (tl.exp(2 * x) + 1)  # 1 where exp overflows


def check_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Constants:
    """Assert what both kernels assume about their arguments."""
    _, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_cache.data.shape[2:4]
    num_seqs = metadata.seq_lens.shape[0]

    kv_cache.check(q)
    assert q.stride()[1:] == (head_dim, 1)
    assert num_heads > 0
    assert num_heads % num_kv_heads == 0
    assert head_dim % 16 == 0
    assert head_dim <= 256
    assert block_size >= 16
    assert block_size & (block_size - 1) == 0
    assert block_size == metadata.block_size
    check(q, (num_seqs,), torch.int32, metadata.seq_lens)
    check(q, (num_seqs + 1,), torch.int32, metadata.query_start_loc)
    assert metadata.block_tables.shape[0] == num_seqs
    assert metadata.block_tables.stride(1) == 1
    assert metadata.block_tables.dtype == torch.int32
    assert metadata.block_tables.device == q.device
    assert scale > 0
    assert sliding_window is None or sliding_window > 0
    assert soft_cap is None or soft_cap > 0
    if kv_cache.data.dtype != torch.float8_e4m3fn:
        check_dot(q.dtype)
    return Constants(
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        SOFT_CAP=soft_cap / scale if soft_cap else 0.0,
    )
