"""A linear layer of a model: its weight, as the checkpoint stores it and as it is computed."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tritium import kernels
from tritium.backend.runner.models.lora import LoraRows, PackedLora, add_lora
from tritium.kernels import PackedLinear, QuantizedWeight, StoredWeight


class Slot(NamedTuple):
    """The place of one of the checkpoint's weights."""

    shape: torch.Size
    fill: Callable[[StoredWeight], object]

    @classmethod
    def of(cls, target: Tensor) -> "Slot":
        """A weight that is copied into a tensor, which converts it."""
        return cls(target.shape, lambda weight: target.copy_(kernels.as_tensor(weight)))


Slots = Iterator[tuple[str, Slot]]  # with their names in transformers


class Linear:
    """x @ weight.T + bias of one or more of the checkpoint's projections, plus the adapters' part.

    The rows of the projections are stacked.

    Args:
        parts: Name in transformers -> out_features of each projection, in the order of stacking.
        like: A tensor on the model's device, with its dtype.
        order: The stacked rows in the order in which they are computed; None: as they are stored.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        bias: bool,
        like: Tensor,
        batch_invariant: bool,
        order: Tensor | None = None,
    ) -> None:
        self.order = order
        self.batch_invariant = batch_invariant
        self.in_features = in_features
        self.parts = parts
        self.adapters: dict[str, PackedLora] = {}
        self.weight: PackedLinear  # from `pack` on
        self.bias = like.new_empty(sum(parts.values())) if bias else None
        self._like = like
        self._stored: dict[str, StoredWeight] = {}  # until they are packed

    def __call__(self, x: Tensor, lora: LoraRows | None) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        out = kernels.linear(x, self.weight, self.bias, batch_invariant=self.batch_invariant)
        if lora:
            add_lora(out, x, self.adapters, lora)
        return out

    def slots(self) -> Slots:
        """The weights and biases of the projections."""
        biases = [None] * len(self.parts)
        if self.bias is not None:
            biases = list(self.bias.split(list(self.parts.values())))
        for (name, out_features), bias in zip(self.parts.items(), biases, strict=True):
            shape = torch.Size((out_features, self.in_features))
            yield f"{name}.weight", Slot(shape, partial(self._store, name))
            if bias is not None:
                yield f"{name}.bias", Slot.of(bias)

    def in_order(self, rows: Tensor) -> Tensor:
        """The stacked rows [out_features, ...] in the order in which they are computed."""
        return rows if self.order is None else rows[self.order.to(rows.device)]

    def pack(self, weight_bits: int, arena: kernels.Arena) -> None:
        """Lay out the weights, all of which are stored."""
        stored, in_order = join([self._stored.pop(name) for name in self.parts]), self.in_order
        weight = in_order(stored) if isinstance(stored, Tensor) else stored.map(in_order)
        self.weight = kernels.pack_linear(weight, weight_bits, arena)
        if self.bias is not None:
            self.bias = self.in_order(self.bias)

    def _store(self, name: str, weight: StoredWeight) -> None:
        self._stored[name] = weight.to(self._like)


def join(
    weights: list[StoredWeight],
    function: Callable[[list[Tensor]], Tensor] = torch.cat,
) -> StoredWeight:
    """One of many weights, by torch.cat or torch.stack; quantised if they are, and alike."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(quantized) == len(weights) and all(quantized[0].is_like(other) for other in quantized):
        return QuantizedWeight.combine(quantized, function)
    return function([kernels.as_tensor(weight) for weight in weights])
