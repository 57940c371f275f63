"""Rotary position embedding and the write to the KV cache, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rope_and_cache(
    qkv_ptr,  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, 2 * HALF]
    cos_ptr,  # [num_tokens, HALF] float32
    sin_ptr,  # [num_tokens, HALF] float32
    kv_cache_ptr,  # [2, num_slots, NUM_KV_HEADS, 2 * HALF]
    slot_mapping_ptr,  # [num_tokens] int64
    values_stride,  # between the keys and the values
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # head_dim // 2
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for q and k (RoFormer; Su et al., 2021).

    x1 and x2 are the halves of a head, as Llama pairs them. One program takes BLOCK_H of a
    token's heads. Queries go back to where they were, keys and values to the token's slot.
    """
    NUM_ALL: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]  # [BLOCK_H, 1]
    dim = tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
    in_half = dim < HALF
    in_token = (head < NUM_ALL) & in_half  # [BLOCK_H, BLOCK_D]

    # -- rotate --
    qkv_ptrs = qkv_ptr + (token * NUM_ALL + head) * (2 * HALF) + dim  # [BLOCK_H, BLOCK_D]
    x1 = tl.load(qkv_ptrs, mask=in_token).to(tl.float32)
    x2 = tl.load(qkv_ptrs + HALF, mask=in_token).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + dim, mask=in_half)  # [1, BLOCK_D]
    sin = tl.load(sin_ptr + token * HALF + dim, mask=in_half)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    cos = tl.where(is_value, 1.0, cos)  # [BLOCK_H, BLOCK_D]
    sin = tl.where(is_value, 0.0, sin)
    y1 = (x1 * cos - x2 * sin).to(qkv_ptr.dtype.element_ty)
    y2 = (x2 * cos + x1 * sin).to(qkv_ptr.dtype.element_ty)

    # -- store queries --
    is_query = (head < NUM_HEADS) & in_half
    tl.store(qkv_ptrs, y1, mask=is_query)
    tl.store(qkv_ptrs + HALF, y2, mask=is_query)

    # -- store keys and values --
    slot = tl.load(slot_mapping_ptr + token)
    which = (head - NUM_HEADS) // NUM_KV_HEADS  # 0: a key, 1: a value
    row = slot * NUM_KV_HEADS + (head - NUM_HEADS) % NUM_KV_HEADS
    cache_ptrs = kv_cache_ptr + which * values_stride + row * (2 * HALF) + dim
    is_cached = (head >= NUM_HEADS) & in_token & (slot >= 0)
    tl.store(cache_ptrs, y1, mask=is_cached)
    tl.store(cache_ptrs + HALF, y2, mask=is_cached)


def rope_and_cache(
    qkv: Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    cos: Tensor,  # [num_tokens, head_dim // 2] float32
    sin: Tensor,  # [num_tokens, head_dim // 2] float32
    kv_cache: Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim]
    slot_mapping: Tensor,  # [num_tokens] int64
) -> Tensor:
    """See `kernels.rope_and_cache`. The queries are rotated in place."""
    num_tokens, num_all, head_dim = qkv.shape
    num_kv_heads = kv_cache.shape[3]
    num_heads = num_all - 2 * num_kv_heads
    half = head_dim // 2

    assert num_heads > 0 and head_dim % 16 == 0
    assert kv_cache.dim() == 5 and kv_cache.shape[0] == 2 and kv_cache.shape[4] == head_dim
    assert cos.shape == sin.shape == (num_tokens, half)
    assert slot_mapping.shape == (num_tokens,) and slot_mapping.dtype == torch.int64
    assert qkv.dtype == kv_cache.dtype and cos.dtype == sin.dtype == torch.float32
    assert all(t.is_contiguous() for t in (qkv, cos, sin, kv_cache, slot_mapping))
    assert all(t.device == qkv.device for t in (cos, sin, kv_cache, slot_mapping))

    block_h, block_d = 16, triton.next_power_of_2(half)
    grid = (num_tokens, triton.cdiv(num_all, block_h))
    _rope_and_cache[grid](
        qkv,
        cos,
        sin,
        kv_cache,
        slot_mapping,
        kv_cache.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=max(1, block_h * block_d // 256),  # eight elements a thread: 16-byte loads
    )
    return qkv[:, :num_heads]
