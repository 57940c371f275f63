"""The activation between a feed-forward block's projections."""

import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.cuda.launch import FLOATS, check


@triton.jit
def _silu_and_mul(
    gate_up_ptr,  # [n, 2 * SIZE]
    out_ptr,  # [n, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = gate * sigmoid(gate) * up (SwiGLU; Shazeer, 2020).

    One program computes BLOCK elements of one row.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    in_row = column < SIZE
    gate_ptrs = gate_up_ptr + row * (2 * SIZE) + column  # [BLOCK]
    gate = tl.load(gate_ptrs, mask=in_row).to(tl.float32)  # [BLOCK]
    up = tl.load(gate_ptrs + SIZE, mask=in_row).to(tl.float32)  # [BLOCK]
    out = gate * tl.sigmoid(gate) * up  # [BLOCK]
    tl.store(out_ptr + row * SIZE + column, out.to(out_ptr.dtype.element_ty), mask=in_row)


def silu_and_mul(
    gate_up: Tensor,  # [n, 2 * size]
) -> Tensor:
    """See `kernels.silu_and_mul`."""
    n, both = gate_up.shape
    size = both // 2

    assert both == 2 * size
    assert size > 0
    assert gate_up.dtype in FLOATS
    check(gate_up, gate_up.shape, gate_up.dtype, gate_up)

    out = gate_up.new_empty(n, size)
    block, num_warps = 1024, 4  # eight elements per thread: 16-byte loads
    grid = (n, triton.cdiv(size, block))
    _silu_and_mul[grid](gate_up, out, SIZE=size, BLOCK=block, num_warps=num_warps)
    return out
