"""Adapters that began as a part of the base weights: PiSSA and OLoRA.

Their training started from the largest part of each base weight, which was taken off that weight.
An adapter does not contain it; PEFT computes it again from the base when it loads the adapter
(`pissa_init` and `olora_init` in peft/tuners/lora/layer.py). So the change to the plain base is::

    scaling * (B @ A - B0 @ A0) = [scaling * B, -B0'] @ [A ]
                                                        [A0]
"""

import torch
from torch import Tensor


def subtract_start(
    method: str,  # "pissa" or "olora"
    weight: Tensor,  # [out_features, in_features], of the base
    a: Tensor,  # [rank, in_features], of the trained adapter
    b: Tensor,  # [out_features, rank], times `scaling`
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """(a, b) of twice the rank, that change the plain base as PEFT does."""
    a0, b0 = _START[method](weight.float(), len(a), scaling)
    return torch.cat((a, a0)), torch.cat((b, -b0), dim=1)


def _pissa(weight: Tensor, rank: int, _: float) -> tuple[Tensor, Tensor]:
    """The largest singular values and vectors (Meng et al., 2024)."""
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    return vh[:rank], u[:, :rank] * s[:rank]


def _olora(weight: Tensor, rank: int, scaling: float) -> tuple[Tensor, Tensor]:
    """The first columns of a QR decomposition (Büyükakyüz, 2024)."""
    q, r = torch.linalg.qr(weight)
    return r[:rank], q[:, :rank] * scaling


_START = {"pissa": _pissa, "olora": _olora}
