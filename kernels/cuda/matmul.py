"""Batch-invariant matrix product: a row's result is bit-identical for any number of rows.

cuBLAS, which picks a kernel by the number of rows, is usually faster; it has none for quantised
weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.cuda.launch import FLOATS, check, check_dot
from tritium.kernels.cuda.weights import arguments, load_weight
from tritium.kernels.quantized_weight import StoredWeight

GROUP_M = 16  # tiles of rows that share a tile of the weight while it is in the L2 cache


# The number of rows is not specialised on: 1 row, or a multiple of 16, would get its own code.
@triton.jit(do_not_specialize=["num_rows"])
def _matmul(
    x_ptr,  # [num_rows, in_features]
    weight_ptr,  # [out_features, in_features]; see `load_weight`
    scales_ptr,
    zeros_ptr,
    bias_ptr,  # [out_features]; None: no bias
    out_ptr,  # [num_rows, out_features]
    num_rows,
    out_features,
    in_features,
    group_size,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """x @ weight.T + bias, summed in float32 along in_features, BLOCK_K at a time from the start.

    One program computes one tile of the result, [BLOCK_M, BLOCK_N].
    """
    num_m, num_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    tile = tl.program_id(0)
    m, n = tl.swizzle2d(tile // num_n, tile % num_n, num_m, num_n, GROUP_M)

    # -- which rows: int64, as weights and logits may have more elements than int32 counts --
    row = m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    k = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    # Past the end the last row or column is repeated and not stored.
    x_row = tl.minimum(row, num_rows - 1).to(tl.int64)[:, None]  # [BLOCK_M, 1]
    weight_row = tl.minimum(column, out_features - 1).to(tl.int64)  # [BLOCK_N]
    x_ptrs = x_ptr + x_row * in_features + k[None, :]  # [BLOCK_M, BLOCK_K]

    # -- multiply --
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        in_row = (k < in_features - start)[None, :]  # [1, BLOCK_K]
        x = tl.load(x_ptrs + start, mask=in_row, other=0.0)  # [BLOCK_M, BLOCK_K]
        weight = load_weight(
            weight_ptr,
            scales_ptr,
            zeros_ptr,
            weight_row,
            start,
            in_features,
            group_size,
            x.dtype,
            BLOCK_K,
        )  # [BLOCK_N, BLOCK_K]
        acc = tl.dot(x, weight.T, acc, input_precision="ieee")

    # -- store --
    in_out = column < out_features  # [BLOCK_N]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column, mask=in_out, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * out_features + column[None, :]
    stored = (row < num_rows)[:, None] & in_out[None, :]  # [BLOCK_M, BLOCK_N]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=stored)


def matmul(
    x: Tensor,  # [num_rows, in_features]
    weight: StoredWeight,  # [out_features, in_features]
    bias: Tensor | None = None,  # [out_features]
    dtype: torch.dtype | None = None,  # of the result: float32, or None: the dtype of `x`
) -> Tensor:
    """See `kernels.linear`."""
    num_rows, in_features = x.shape
    out_features = weight.shape[0]

    assert x.dtype in FLOATS
    assert dtype in (None, x.dtype, torch.float32)
    check(x, x.shape, x.dtype, x)
    assert weight.shape == (out_features, in_features)
    if bias is not None:
        check(x, (out_features,), x.dtype, bias)
    check_dot(x.dtype)

    # One tile size for all: 64 rows, the fewest for Hopper's wgmma, and so few columns that a
    # decode step has a program for most multiprocessors. Not yet measured for speed.
    block_m, block_n, block_k = (64, 64, 64) if x.dtype != torch.float32 else (32, 32, 32)
    weights, group_size, block_k = arguments(x, weight, block_k)
    out = x.new_empty((num_rows, out_features), dtype=dtype or x.dtype)
    grid = (triton.cdiv(num_rows, block_m) * triton.cdiv(out_features, block_n),)
    _matmul[grid](
        x,
        *weights,
        bias,
        out,
        num_rows,
        out_features,
        in_features,
        group_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_M=GROUP_M,
        num_warps=4,
        num_stages=5,
    )
    return out
