"""Root mean square layer normalisation, by itself or after adding to the residual stream."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.cuda.launch import FLOATS, check


@triton.jit
def _rms_norm(
    x_ptr,  # [n, SIZE]
    residual_ptr,  # [n, SIZE]; None: x alone is normalised
    weight_ptr,  # [SIZE] float32
    out_ptr,  # [n, SIZE]
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """h / sqrt(mean(h^2) + eps) * weight (Zhang & Sennrich, 2019); h = x, or residual + x.

    One program computes one row. The sum is rounded before it is normalised, so that the norm reads
    the same numbers as the later layers read from the residual stream.
    """
    column = tl.arange(0, BLOCK)  # [BLOCK]
    in_row = column < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + column  # [BLOCK]

    # -- add --
    h = tl.load(x_ptr + offsets, mask=in_row, other=0.0).to(tl.float32)  # [BLOCK]
    if residual_ptr is not None:
        h += tl.load(residual_ptr + offsets, mask=in_row, other=0.0).to(tl.float32)
        rounded = h.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + offsets, rounded, mask=in_row)
        h = rounded.to(tl.float32)

    # -- normalise --
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0)  # [BLOCK]
    out = h * tl.rsqrt(tl.sum(h * h, 0) / SIZE + eps) * weight  # [BLOCK]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=in_row)


def rms_norm(
    x: Tensor,  # [n, size]
    weight: Tensor,  # [size] float32
    eps: float,
    residual: Tensor | None = None,  # [n, size]
) -> Tensor:
    """See `kernels.rms_norm`; with a residual, `kernels.add_rms_norm`."""
    n, size = x.shape

    assert 0 < size <= 16384
    assert x.dtype in FLOATS
    check(x, x.shape, x.dtype, x)
    check(x, (size,), torch.float32, weight)
    if residual is not None:
        check(x, x.shape, x.dtype, residual)

    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    # Eight elements per thread, 16 in the longest rows: 16-byte loads.
    num_warps = min(32, max(1, block // 256))
    _rms_norm[(n,)](x, residual, weight, out, eps, SIZE=size, BLOCK=block, num_warps=num_warps)
    return out
