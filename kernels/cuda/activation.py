"""The activation between a feed-forward block's projections."""

import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.cuda.launch import FLOATS, check


@triton.jit
def _activate(
    x_ptr,  # [n, 2 * SIZE], the gate first; [n, SIZE] if not gated
    out_ptr,  # [n, SIZE]
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = activation(gate) * up (Shazeer, 2020), or activation(x).

    One program computes BLOCK elements of one row.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    in_row = column < SIZE
    x_ptrs = x_ptr + row * (2 * SIZE if IS_GATED else SIZE) + column  # [BLOCK]
    x = tl.load(x_ptrs, mask=in_row).to(tl.float32)  # [BLOCK]
    if ACTIVATION == "relu2":
        out = tl.maximum(x, 0.0)
        out *= out
    elif ACTIVATION == "gelu_tanh":  # x * (1 + tanh(t / 2)) / 2 = x * sigmoid(t)
        out = x * tl.sigmoid(x * (1.595769121606 + 0.0713548162726 * x * x))
    else:
        out = x * tl.sigmoid(x)
    if IS_GATED:
        out *= tl.load(x_ptrs + SIZE, mask=in_row).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, out.to(out_ptr.dtype.element_ty), mask=in_row)


def activate(
    x: Tensor,  # [n, 2 * size]; [n, size] if not gated
    activation: str,
    is_gated: bool = True,
) -> Tensor:
    """See `kernels.activate`."""
    n, width = x.shape
    size = width // 2 if is_gated else width

    assert width == size * (2 if is_gated else 1)
    assert size > 0
    assert activation in ("silu", "gelu_tanh", "relu2")
    assert x.dtype in FLOATS
    check(x, x.shape, x.dtype, x)

    out = x.new_empty(n, size)
    block, num_warps = 1024, 4  # eight elements per thread: 16-byte loads
    grid = (n, triton.cdiv(size, block))
    _activate[grid](
        x,
        out,
        SIZE=size,
        ACTIVATION=activation,
        IS_GATED=is_gated,
        BLOCK=block,
        num_warps=num_warps,
    )
    return out
