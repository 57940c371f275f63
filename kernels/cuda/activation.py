"""The activation between a feed-forward block's projections."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _silu_and_mul(
    gate_up_ptr,  # [n, 2 * SIZE]
    out_ptr,  # [n, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """gate * sigmoid(gate) * up (SwiGLU; Shazeer, 2020)."""
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
    assert gate_up.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert gate_up.is_contiguous()

    out = gate_up.new_empty(n, size)
    block = 1024
    _silu_and_mul[(n, triton.cdiv(size, block))](
        gate_up,
        out,
        SIZE=size,
        BLOCK=block,
        num_warps=block // 256,  # eight elements a thread: 16-byte loads
    )
    return out
