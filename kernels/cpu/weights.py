"""Weights in the layout that the C operations read, in 16, 8 or 4 bits."""

from typing import NamedTuple

import torch
from torch import Tensor

from tritium.kernels import reference
from tritium.kernels.cpu.structs import TILE_ROWS, Weight, pointer

_ALIGNMENT = 64  # bytes


class PackedWeight(NamedTuple):
    """A weight [out_features, in_features] in the layout that only `linear` reads."""

    # n = out_features, rounded up to a multiple of 16; k = in_features.
    # 16 bits: [n / 16, k / 2, 16, 2] bfloat16; 8 bits: int8 of that shape; 4 bits:
    # [n / 16, k / 2, 16] uint8, two values per byte.
    values: Tensor
    scales: Tensor | None  # 8 bits: [n] float32; 4 bits: [n / 16, k / 32, 2, 16] float16
    padding: int = 0  # rows of 0 at the end

    @property
    def out_features(self) -> int:
        return len(self.values) * TILE_ROWS - self.padding

    @property
    def in_features(self) -> int:
        return self.values.shape[1] * 2

    def struct(self) -> Weight:
        """For C: the pointers are valid as long as this object lives."""
        num_rows = self.out_features + self.padding
        bits = self.values.nbytes * 8 // (num_rows * self.in_features)
        return Weight(self.values.data_ptr(), pointer(self.scales), bits)


class Arena:
    """Keeps tensors next to each other, so that small ones, too, lie in pages of 2 MiB.

    A step of one sequence, with SmolLM2's weights of 0.3 to 3.5 MB each: 14 ms; without it 18 ms.
    """

    _SIZE = 2**25

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy in the arena; a large tensor is returned as it is."""
        if tensor.nbytes >= self._SIZE:
            return tensor
        size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._free):
            self._free = torch.empty(self._SIZE, dtype=torch.uint8)
        taken, self._free = self._free[: tensor.nbytes], self._free[size:]
        return taken.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def pack(weight: Tensor, bits: int = 16, arena: Arena | None = None) -> PackedWeight:
    """Lay out a weight [out_features, in_features] for `linear`, rounded to 8 or 4 bits if asked.

    Args:
        arena: Where the result is kept; None: in memory of its own.
    """
    padding = -len(weight) % TILE_ROWS
    if padding:
        weight = torch.cat((weight, weight.new_zeros(padding, weight.shape[1])))
    packed = _packed(weight, bits)._replace(padding=padding)
    return packed._replace(values=arena.keep(packed.values)) if arena else packed


def _packed(weight: Tensor, bits: int) -> PackedWeight:
    if bits == 16:
        return PackedWeight(_tiles(weight), None)
    values, scales, offsets = reference.quantize(weight, bits)
    if offsets is None:
        return PackedWeight(_tiles(values), scales.flatten())
    first, last = _tiles(values).flatten(2).split(TILE_ROWS, dim=2)
    scales = torch.stack([scales, offsets])  # [2, n, k / 32]
    scales = scales.unflatten(1, (-1, TILE_ROWS)).permute(1, 3, 0, 2).contiguous()
    return PackedWeight(first | last << 4, scales)


def _tiles(weight: Tensor) -> Tensor:
    """[out_features, in_features] -> [out_features / 16, in_features / 2, 16, 2]."""
    return weight.view(-1, TILE_ROWS, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()
