"""Weights as a quantised checkpoint stores them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class QuantizedWeight(NamedTuple):
    """Weights [..., out_features, in_features] of 8 or 4 bits: (values - zeros) * scales.

    Used like a tensor where a model is loaded: it has a shape and a dtype, and can be converted.
    """

    # 8 bits: [..., out_features, in_features] float8_e4m3fn; 4 bits: [..., out_features,
    # in_features / 2] uint8, with input 2j in the lower half of byte j and 2j + 1 in the upper.
    values: Tensor
    scales: Tensor  # [..., out_features, ceil(in_features / group_size)], of any float dtype
    zeros: Tensor | None  # 4 bits: uint8, as many as scales; 8 bits: None
    group_size: int  # inputs that share a scale, from the first on
    dtype: torch.dtype  # that it is computed in

    @property
    def bits(self) -> int:
        return 8 if self.zeros is None else 4

    @property
    def shape(self) -> torch.Size:
        *rows, width = self.values.shape
        return torch.Size((*rows, width * 8 // self.bits))

    def map(self, function: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """The function of each tensor: one that keeps the last dimension."""
        zeros = None if self.zeros is None else function(self.zeros)
        return self._replace(
            values=function(self.values), scales=function(self.scales), zeros=zeros
        )

    def to(self, like: Tensor) -> "QuantizedWeight":
        """On `like`'s device, and computed in its dtype."""
        return self.map(lambda tensor: tensor.to(like.device))._replace(dtype=like.dtype)

    def unpack(self) -> Tensor:
        """The values, one by one. [..., out_features, in_features]"""
        if self.bits == 8:
            return self.values
        return torch.stack((self.values & 15, self.values >> 4), dim=-1).flatten(-2)

    def dequantize(self) -> Tensor:
        """[..., out_features, in_features], computed in float32 and rounded to its dtype."""

        def by_input(groups: Tensor) -> Tensor:
            spread = groups.float().repeat_interleave(self.group_size, dim=-1)
            return spread[..., : self.shape[-1]]

        values = self.unpack().float()
        if self.zeros is not None:
            values -= by_input(self.zeros)
        return values.mul_(by_input(self.scales)).to(self.dtype)

    @classmethod
    def combine(
        cls, weights: list["QuantizedWeight"], function: Callable[[list[Tensor]], Tensor]
    ) -> "QuantizedWeight":
        """One of many, which differ only in their numbers, by torch.cat or torch.stack."""
        zeros = [weight.zeros for weight in weights if weight.zeros is not None]
        return weights[0]._replace(
            values=function([weight.values for weight in weights]),
            scales=function([weight.scales for weight in weights]),
            zeros=function(zeros) if zeros else None,
        )

    def is_like(self, other: object) -> bool:
        """Whether both can be combined."""
        return (
            isinstance(other, QuantizedWeight)
            and (self.values.dtype, self.scales.dtype) == (other.values.dtype, other.scales.dtype)
            and (self.group_size, self.dtype) == (other.group_size, other.dtype)
        )


StoredWeight = Tensor | QuantizedWeight


def as_tensor(weight: StoredWeight) -> Tensor:
    """The weight; a quantised one dequantised."""
    return weight if isinstance(weight, Tensor) else weight.dequantize()
