"""A mixture of experts: the tokens of each expert times its weights, by a grouped GEMM."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.cuda.activation import activate
from tritium.kernels.cuda.launch import FLOATS, check, check_dot
from tritium.kernels.cuda.segments import find_segment
from tritium.kernels.cuda.weights import arguments, load_weight
from tritium.kernels.quantized_weight import StoredWeight


# A pair is a token and one of its experts. The numbers of pairs and experts are not specialised on.
@triton.jit(do_not_specialize=["num_experts"])
def _grouped_matmul(
    x_ptr,  # [num_pairs / PAIRS_PER_ROW, in_features]
    weight_ptr,  # [num_experts, out_features, in_features]; see `load_weight`
    scales_ptr,
    zeros_ptr,
    factors_ptr,  # [num_pairs] float32; None: 1
    order_ptr,  # [num_pairs] int64: the pairs, those of each expert together
    starts_ptr,  # [num_experts + 1] int32: expert e has the pairs order[starts[e]:starts[e + 1]]
    out_ptr,  # [num_pairs, out_features]
    num_experts,
    out_features,
    in_features,
    group_size,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[pair] = x[pair // PAIRS_PER_ROW] @ weight[expert of pair].T * factors[pair].

    One program computes one tile: BLOCK_M pairs of one expert, and BLOCK_N columns. A row's sums
    are in one order, whatever the other rows are.
    """
    block = tl.program_id(1)
    expert = find_segment(starts_ptr, block, num_experts, BLOCK_M)
    start = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + expert + 1)
    first = start + (block - (start // BLOCK_M + expert)) * BLOCK_M
    if first >= end:
        return

    # -- which pairs: past the end the last one is repeated and not stored --
    at = first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    pair = tl.load(order_ptr + tl.minimum(at, end - 1))  # [BLOCK_M] int64
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    k = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    x_ptrs = x_ptr + (pair // PAIRS_PER_ROW)[:, None] * in_features + k[None, :]
    # int64: the experts together have more numbers than int32 counts
    row = expert.to(tl.int64) * out_features + tl.minimum(column, out_features - 1)  # [BLOCK_N]

    # -- multiply --
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, in_features, BLOCK_K):
        in_row = (k < in_features - begin)[None, :]  # [1, BLOCK_K]
        x = tl.load(x_ptrs + begin, mask=in_row, other=0.0)  # [BLOCK_M, BLOCK_K]
        weight = load_weight(
            weight_ptr,
            scales_ptr,
            zeros_ptr,
            row,
            begin,
            in_features,
            group_size,
            x.dtype,
            BLOCK_K,
        )  # [BLOCK_N, BLOCK_K]
        acc = tl.dot(x, weight.T, acc, input_precision="ieee")

    # -- store --
    if factors_ptr is not None:
        acc *= tl.load(factors_ptr + pair)[:, None]
    stored = (at < end)[:, None] & (column < out_features)[None, :]  # [BLOCK_M, BLOCK_N]
    out_ptrs = out_ptr + pair[:, None] * out_features + column[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=stored)


def experts(
    x: Tensor,  # [num_tokens, hidden]
    expert_ids: Tensor,  # [num_tokens, k] int64
    weights: Tensor,  # [num_tokens, k] float32
    gate_up: StoredWeight,  # [num_experts, 2 * size, hidden]
    down: StoredWeight,  # [num_experts, hidden, size]
    activation: str,
    batch_invariant: bool = False,
) -> Tensor:
    """See `kernels.experts`.

    The launches depend only on the shapes, never on values on the device.
    """
    num_tokens, hidden = x.shape
    num_experts, _, size = down.shape
    num_per_token = expert_ids.shape[1]

    assert x.dtype in FLOATS
    check(x, (num_tokens, hidden), x.dtype, x)
    check(x, (num_tokens, num_per_token), torch.int64, expert_ids)
    check(x, (num_tokens, num_per_token), torch.float32, weights)
    assert gate_up.shape == (num_experts, 2 * size, hidden)
    assert down.shape == (num_experts, hidden, size)
    check_dot(x.dtype)

    ids = expert_ids.flatten()
    order = ids.argsort(stable=True)
    starts = ids.new_zeros(num_experts + 1, dtype=torch.int32)
    starts[1:].scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
    starts = starts.cumsum(0, dtype=torch.int32)
    # Few tokens reach an expert in a decode step: tiles of 16 rows, the fewest of a tensor core.
    # Not yet measured for speed.
    is_short = batch_invariant or len(ids) <= 64 * num_experts
    block_m = 16 if is_short or x.dtype == torch.float32 else 64

    gated = _grouped(x, gate_up, None, order, starts, x.dtype, block_m)
    activated = activate(gated, activation)  # [num_tokens * k, size]
    factors = weights.flatten()
    out = _grouped(activated, down, factors, order, starts, torch.float32, block_m)
    return out.view(num_tokens, num_per_token, hidden).sum(1).to(x.dtype)


def _grouped(
    x: Tensor,  # [num_rows, in_features]
    weight: StoredWeight,  # [num_experts, out_features, in_features]
    factors: Tensor | None,  # [num_pairs] float32
    order: Tensor,  # [num_pairs] int64
    starts: Tensor,  # [num_experts + 1] int32
    dtype: torch.dtype,
    block_m: int,
) -> Tensor:
    """See `_grouped_matmul`. [num_pairs, out_features]"""
    num_pairs, (num_experts, out_features, in_features) = len(order), weight.shape
    block_n, block_k = (64, 64) if x.dtype != torch.float32 else (32, 32)
    weights, group_size, block_k = arguments(x, weight, block_k)
    out = x.new_empty((num_pairs, out_features), dtype=dtype)
    grid = (triton.cdiv(out_features, block_n), num_pairs // block_m + num_experts)
    _grouped_matmul[grid](
        x,
        *weights,
        factors,
        order,
        starts,
        out,
        num_experts,
        out_features,
        in_features,
        group_size,
        PAIRS_PER_ROW=num_pairs // len(x),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=4,
    )
    return out
