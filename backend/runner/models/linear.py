"""A linear layer of a model: its weight, as the checkpoint stores it and as it is computed."""

from collections.abc import Callable, Iterator

from torch import Tensor

from tritium import kernels
from tritium.backend.runner.models.lora import LoraRows, PackedLora, add_lora
from tritium.kernels import PackedWeight


class Linear:
    """x @ weight.T + bias of one or more of the checkpoint's projections, plus the adapters' part.

    The rows of the projections are stacked.

    Args:
        parts: Name in transformers -> out_features of each projection, in the order of stacking.
        order: The stacked rows in the order in which they are computed; None: as they are stored.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        bias: bool,
        empty: Callable[..., Tensor],
        batch_invariant: bool,
        order: Tensor | None = None,
    ) -> None:
        self.order = order
        self.batch_invariant = batch_invariant
        self.in_features = in_features
        self.parts = parts
        self.adapters: dict[str, PackedLora] = {}
        out_features = sum(parts.values())
        self.weight: Tensor | PackedWeight = empty(out_features, in_features)
        self.bias = empty(out_features) if bias else None

    def __call__(self, x: Tensor, lora: LoraRows | None) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        out = kernels.linear(x, self.weight, self.bias, batch_invariant=self.batch_invariant)
        if lora:
            add_lora(out, x, self.adapters, lora)
        return out

    def in_order(self, rows: Tensor) -> Tensor:
        """The stacked rows [out_features, ...] in the order in which they are computed."""
        return rows if self.order is None else rows[self.order.to(rows.device)]

    def pack(self, weight_bits: int, arena: kernels.Arena) -> None:
        assert isinstance(self.weight, Tensor), "packed before"
        self.weight = kernels.pack_linear(self.in_order(self.weight), weight_bits, arena)
        if self.bias is not None:
            self.bias = self.in_order(self.bias)

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        """(name in transformers, its rows) of each weight and bias; only before packing."""
        assert isinstance(self.weight, Tensor), "packed"
        sizes = list(self.parts.values())
        for kind, stacked in (("weight", self.weight), ("bias", self.bias)):
            if stacked is not None:
                for name, rows in zip(self.parts, stacked.split(sizes), strict=True):
                    yield f"{name}.{kind}", rows
