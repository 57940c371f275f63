"""A tile of a weight, in any form: what the matrix products share."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.cuda.launch import check
from tritium.kernels.quantized_weight import QuantizedWeight, StoredWeight

_SMALLEST_BLOCK = 32  # of inputs


@triton.jit
def load_weight(
    weight_ptr,  # [num_rows, in_features] floats; 4 bits: [num_rows, in_features / 2] uint8
    scales_ptr,  # [num_rows, ceil(in_features / group_size)]; None: 1
    zeros_ptr,  # of 4 bits: uint8 like the scales; None: 8 or more bits
    row,  # [BLOCK_N] int64
    start,  # a multiple of BLOCK_K
    in_features,
    group_size,  # a multiple of BLOCK_K
    dtype: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The inputs from `start` on of some rows of a weight. [BLOCK_N, BLOCK_K] dtype

    Past the end of a row: any finite numbers.
    """
    if zeros_ptr is None:
        k = start + tl.arange(0, BLOCK_K)
        ptrs = weight_ptr + row[:, None] * in_features + k[None, :]
        weight = tl.load(ptrs, mask=(k < in_features)[None, :], other=0.0)
    else:
        width = in_features // 2
        byte = start // 2 + tl.arange(0, BLOCK_K // 2)
        ptrs = weight_ptr + row[:, None] * width + byte[None, :]
        both = tl.load(ptrs, mask=(byte < width)[None, :], other=0)  # [BLOCK_N, BLOCK_K / 2]
        weight = tl.interleave(both & 15, both >> 4)
    if scales_ptr is not None:
        group = row * tl.cdiv(in_features, group_size) + start // group_size  # [BLOCK_N]
        weight = weight.to(tl.float32)
        if zeros_ptr is not None:
            weight -= tl.load(zeros_ptr + group).to(tl.float32)[:, None]
        weight *= tl.load(scales_ptr + group).to(tl.float32)[:, None]
    return weight.to(dtype)


def supports(weight: QuantizedWeight) -> bool:
    """Whether the matrix products support a quantised weight on this device, and its groups."""
    is_tiled = weight.group_size % _SMALLEST_BLOCK == 0 or weight.group_size >= weight.shape[-1]
    if weight.bits == 8 and weight.values.is_cuda:  # 8.9: Ada, the oldest with this type
        return is_tiled and torch.cuda.get_device_capability(weight.values.device) >= (8, 9)
    return is_tiled


def arguments(
    x: Tensor, weight: StoredWeight, block_k: int
) -> tuple[tuple[Tensor | None, ...], int, int]:
    """Of a kernel with `load_weight`: weight, scales and zeros; the group size; BLOCK_K.

    Args:
        block_k: What is best for a weight that is not quantised; a multiple of 32.
    """
    if isinstance(weight, Tensor):
        check(x, weight.shape, x.dtype, weight)
        return (weight, None, None), block_k, block_k
    values, scales, zeros, group_size, dtype = weight
    in_features = weight.shape[-1]
    groups = (*weight.shape[:-1], -(-in_features // group_size))
    assert supports(weight)
    assert dtype == x.dtype
    check(x, values.shape, values.dtype, values)
    check(x, groups, scales.dtype, scales)
    if zeros is not None:
        check(x, groups, torch.uint8, zeros)
    if group_size < in_features and group_size % block_k:
        block_k = _SMALLEST_BLOCK
    return (values, scales, zeros), group_size, block_k
