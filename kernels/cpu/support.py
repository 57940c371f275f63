"""Which tensors the C operations support."""

import torch
from torch import Tensor

from tritium.kernels.cpu import build
from tritium.kernels.cpu.structs import MAX_DIM, TILE_PAIRS, TILE_ROWS
from tritium.kernels.metadata import KVCache
from tritium.kernels.quantized_weight import QuantizedWeight


def supports_rows(x: Tensor) -> bool:
    """Whether the norms, the activation and `linear` support rows like those of x [..., size]."""
    return (
        x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and x.shape[-1] % TILE_PAIRS == 0
        and build.is_available()
    )


def supports_packing(weight: Tensor) -> bool:
    """Whether `pack` supports this weight [out_features, in_features]."""
    return supports_rows(weight)


def supports_quantized(weight: QuantizedWeight) -> bool:
    """Whether `pack_quantized` supports this weight [out_features, in_features]."""
    x = torch.empty(0, weight.shape[-1], dtype=weight.dtype, device=weight.values.device)
    return supports_rows(x) and weight.group_size % TILE_PAIRS == 0 and _fits_float16(weight)


def _fits_float16(weight: QuantizedWeight) -> bool:
    """Whether scales and zero * scale of 4 bits fit float16."""
    if weight.zeros is None:
        return True
    largest = weight.scales.float().abs().max() * weight.zeros.max().clamp(min=1)
    return bool(largest <= torch.finfo(torch.float16).max)


def supports_cache(x: Tensor, kv_cache: KVCache) -> bool:
    """Whether `rope_and_cache` supports x [..., head_dim] with this cache."""
    return supports_rows(x) and kv_cache.data.dtype == x.dtype and x.shape[-1] <= MAX_DIM


def supports_attention(q: Tensor, kv_cache: KVCache) -> bool:
    """Whether `attention` supports queries [num_tokens, num_heads, head_dim] with this cache."""
    block_size, num_kv_heads = kv_cache.data.shape[2:4]
    return (
        supports_cache(q, kv_cache)
        and block_size % TILE_ROWS == 0
        and q.shape[-2] <= TILE_ROWS * num_kv_heads
    )


def supports_sampling(logits: Tensor) -> bool:
    """Whether `sample` supports these logits."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and build.is_available()
