"""Norm of queries and keys, rotary position embedding and the write to the KV cache: one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.cuda.launch import check
from tritium.kernels.cuda.norm import rms_norm
from tritium.kernels.metadata import QUANTISED_MAX, SMALLEST_MAX, KVCache


@triton.jit
def _rope_and_cache(
    qkv_ptr,  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, 2 * HALF]
    cos_ptr,  # [num_tokens, HALF] float32
    sin_ptr,  # [num_tokens, HALF] float32
    cached_ptr,  # [2, num_slots, NUM_KV_HEADS, 2 * HALF]
    scales_ptr,  # [2, num_slots, NUM_KV_HEADS] float32; None: not quantised
    slot_mapping_ptr,  # [num_tokens] int64
    q_norm_ptr,  # [2 * HALF] float32; None: no norm
    k_norm_ptr,  # [2 * HALF] float32; None: no norm
    eps,
    num_slots,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # head_dim // 2
    QUANTISED_MAX: tl.constexpr,
    SMALLEST_MAX: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for q and k (RoFormer; Su et al., 2021).

    x1 and x2 are the halves of a head, as Llama pairs them. Before the rotation, if there are norm
    weights, x -> x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich, 2019). One program computes
    BLOCK_H of a token's heads. Queries are stored in place, keys and values in the token's slot.
    """
    NUM_ALL: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]  # [BLOCK_H, 1]
    dim = tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
    in_half = dim < HALF
    in_token = (head < NUM_ALL) & in_half  # [BLOCK_H, BLOCK_D]
    is_query = head < NUM_HEADS  # [BLOCK_H, 1]
    is_value = head >= NUM_HEADS + NUM_KV_HEADS  # [BLOCK_H, 1]

    qkv_ptrs = qkv_ptr + (token * NUM_ALL + head) * (2 * HALF) + dim  # [BLOCK_H, BLOCK_D]
    x1 = tl.load(qkv_ptrs, mask=in_token, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_D]
    x2 = tl.load(qkv_ptrs + HALF, mask=in_token, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_D]

    # -- norm --
    if q_norm_ptr is not None:
        square_sum = tl.sum(x1 * x1 + x2 * x2, 1)[:, None]  # [BLOCK_H, 1]
        scale = tl.where(is_value, 1.0, tl.rsqrt(square_sum / (2 * HALF) + eps))
        x1 *= scale * _weight(q_norm_ptr + dim, k_norm_ptr + dim, in_half, is_query, is_value)
        q_norm_ptrs, k_norm_ptrs = q_norm_ptr + HALF + dim, k_norm_ptr + HALF + dim
        x2 *= scale * _weight(q_norm_ptrs, k_norm_ptrs, in_half, is_query, is_value)

    # -- rotate --
    cos = tl.load(cos_ptr + token * HALF + dim, mask=in_half)  # [1, BLOCK_D]
    sin = tl.load(sin_ptr + token * HALF + dim, mask=in_half)  # [1, BLOCK_D]
    cos = tl.where(is_value, 1.0, cos)  # [BLOCK_H, BLOCK_D]
    sin = tl.where(is_value, 0.0, sin)  # [BLOCK_H, BLOCK_D]
    y1 = x1 * cos - x2 * sin  # [BLOCK_H, BLOCK_D]
    y2 = x2 * cos + x1 * sin  # [BLOCK_H, BLOCK_D]

    # -- store queries --
    tl.store(qkv_ptrs, y1.to(qkv_ptr.dtype.element_ty), mask=is_query & in_half)
    tl.store(qkv_ptrs + HALF, y2.to(qkv_ptr.dtype.element_ty), mask=is_query & in_half)

    # -- store keys and values --
    slot = tl.load(slot_mapping_ptr + token)
    which = (head - NUM_HEADS) // NUM_KV_HEADS  # 0: a key, 1: a value
    row = which * num_slots + slot
    row = row * NUM_KV_HEADS + (head - NUM_HEADS) % NUM_KV_HEADS  # [BLOCK_H, 1] int64
    is_cached = (head >= NUM_HEADS) & (head < NUM_ALL) & (slot >= 0)
    if scales_ptr is not None:
        largest = tl.max(tl.maximum(tl.abs(y1), tl.abs(y2)), 1)[:, None]  # [BLOCK_H, 1]
        scale = tl.maximum(largest, SMALLEST_MAX) / QUANTISED_MAX
        tl.store(scales_ptr + row, scale, mask=is_cached)
        y1 /= scale
        y2 /= scale
        if cached_ptr.dtype.element_ty == tl.int8:  # conversion to int8 truncates
            y1 = tl.floor(y1 + 0.5)
            y2 = tl.floor(y2 + 0.5)
    cached_ptrs = cached_ptr + row * (2 * HALF) + dim  # [BLOCK_H, BLOCK_D]
    tl.store(cached_ptrs, y1.to(cached_ptr.dtype.element_ty), mask=is_cached & in_half)
    tl.store(cached_ptrs + HALF, y2.to(cached_ptr.dtype.element_ty), mask=is_cached & in_half)


@triton.jit
def _weight(
    q_norm_ptrs,  # [1, BLOCK_D]
    k_norm_ptrs,  # [1, BLOCK_D]
    in_half,  # [1, BLOCK_D]
    is_query,  # [BLOCK_H, 1]
    is_value,  # [BLOCK_H, 1]
):
    """The norm's weight of each head, 1 for values: [BLOCK_H, BLOCK_D] float32."""
    q_norm = tl.load(q_norm_ptrs, mask=in_half, other=0.0)  # [1, BLOCK_D]
    k_norm = tl.load(k_norm_ptrs, mask=in_half, other=0.0)  # [1, BLOCK_D]
    return tl.where(is_value, 1.0, tl.where(is_query, q_norm, k_norm))


def rope_and_cache(
    qkv: Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    cos: Tensor,  # [num_tokens, head_dim // 2] float32
    sin: Tensor,  # [num_tokens, head_dim // 2] float32
    kv_cache: KVCache,
    slot_mapping: Tensor,  # [num_tokens] int64
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """See `kernels.rope_and_cache`. The queries are rotated in place."""
    num_tokens, num_all, head_dim = qkv.shape
    _, num_blocks, block_size, num_kv_heads, _ = kv_cache.data.shape
    num_heads = num_all - 2 * num_kv_heads
    half = head_dim // 2
    q_norm, k_norm, eps = qk_norm or (None, None, 0.0)
    if q_norm is not None and k_norm is not None and q_norm.numel() != head_dim:
        for heads, weight in (
            (slice(num_heads), q_norm),
            (slice(num_heads, -num_kv_heads), k_norm),
        ):
            x = qkv[:, heads]
            x.copy_(rms_norm(x.flatten(1).contiguous(), weight, eps).view(x.shape))
        q_norm = k_norm = None
    norms = [norm for norm in (q_norm, k_norm) if norm is not None]

    kv_cache.check(qkv)
    assert num_heads > 0
    assert head_dim % 16 == 0
    check(qkv, qkv.shape, qkv.dtype, qkv)
    check(qkv, (num_tokens, half), torch.float32, cos, sin)
    check(qkv, (num_tokens,), torch.int64, slot_mapping)
    check(qkv, (head_dim,), torch.float32, *norms)

    block_h, block_d = 16, triton.next_power_of_2(half)
    grid = (num_tokens, triton.cdiv(num_all, block_h))
    tensors = (qkv, cos, sin, *kv_cache, slot_mapping, q_norm, k_norm)
    _rope_and_cache[grid](
        *tensors,
        eps,
        num_blocks * block_size,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        QUANTISED_MAX=QUANTISED_MAX.get(kv_cache.data.dtype),
        SMALLEST_MAX=SMALLEST_MAX,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=max(1, block_h * block_d // 256),  # eight elements per thread: 16-byte loads
    )
    return qkv[:, :num_heads]
