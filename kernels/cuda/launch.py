"""What the launchers share: checks of their tensors, and whether the kernels are interpreted."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret  # read when @triton.jit reads it: at import
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check(like: Tensor, shape: Sequence[int], dtype: torch.dtype, *tensors: Tensor) -> None:
    """Assert that each tensor is contiguous and has this shape, this dtype and `like`'s device."""
    for tensor in tensors:
        assert tensor.shape == tuple(shape)
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.device == like.device


def check_dot(dtype: torch.dtype) -> None:
    """Refuse what the interpreter would compute wrongly."""
    if INTERPRETED and dtype == torch.bfloat16:
        raise NotImplementedError("Triton-lang's interpreter computes tl.dot of bfloat16 wrongly")
