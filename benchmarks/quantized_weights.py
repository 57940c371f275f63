"""Random quantised weights, for checks of kernels and models."""

import torch

from tritium.kernels.quantized_weight import QuantizedWeight


def quantized_weight(
    shape: tuple[int, ...], bits: int, group_size: int, dtype: torch.dtype
) -> QuantizedWeight:
    """Numbers of about 1, of any bits; each group has its own scale."""
    *rows, in_features = shape
    groups = (*rows, -(-in_features // group_size))
    if bits == 8:
        values = torch.randn(shape).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales = torch.rand(groups) * 0.02
        return QuantizedWeight(values, scales, None, group_size, dtype)
    values = torch.randint(256, (*rows, in_features // 2), dtype=torch.uint8)
    scales = (torch.rand(groups) * 0.4).half()
    zeros = torch.randint(17, groups, dtype=torch.uint8)
    return QuantizedWeight(values, scales, zeros, group_size, dtype)
