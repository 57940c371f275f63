"""Weights in the layout that the C operations read, in 16, 8 or 4 bits."""

from typing import NamedTuple

import torch
from torch import Tensor

from tritium.kernels import reference
from tritium.kernels.cpu.structs import FORMS, TILE_PAIRS, TILE_ROWS, Weight, pointer
from tritium.kernels.quantized_weight import QuantizedWeight

_ALIGNMENT = 64  # bytes


class PackedWeight(NamedTuple):
    """A weight [out_features, in_features] in the layout that only `linear` reads."""

    # n = out_features, rounded up to a multiple of 16; k = in_features.
    # 16 bits: [n / 16, k / 2, 16, 2] bfloat16; 8 bits: int8 or float8_e4m3fn of that shape;
    # 4 bits: [n / 16, k / 2, 16] uint8, two values per byte.
    values: Tensor
    # int8: [n] float32; 4 bits: [n / 16, k / 32, 2, 16] float16; float8: [n / 16, k / 32, 16]
    # float32, 256 times the scales
    scales: Tensor | None
    padding: int = 0  # rows of 0 at the end

    @property
    def out_features(self) -> int:
        return len(self.values) * TILE_ROWS - self.padding

    @property
    def in_features(self) -> int:
        return self.values.shape[1] * 2

    def struct(self) -> Weight:
        """For C: the pointers are valid as long as this object lives."""
        form = FORMS.index(self.values.dtype)
        return Weight(self.values.data_ptr(), pointer(self.scales), form)


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
    return _kept(_packed(_padded(weight, padding), bits), padding, arena)


def pack_quantized(weight: QuantizedWeight, arena: Arena | None = None) -> PackedWeight:
    """Lay out a quantised weight: 8 bits as they are; 4 bits with zero * scale in float16.

    Args:
        arena: See `pack`.
    """
    padding = -weight.shape[0] % TILE_ROWS
    weight = weight.map(lambda tensor: _padded(tensor, padding))
    values, scales = weight.unpack(), weight.scales.float()

    def by_tile(groups: Tensor) -> Tensor:
        """[n, in_features / group_size] -> [n, in_features / 32]"""
        spread = groups.repeat_interleave(weight.group_size // TILE_PAIRS, dim=1)
        return spread[:, : weight.shape[1] // TILE_PAIRS]

    if weight.zeros is None:
        tiles = _tiles(values.view(torch.uint8)).view(values.dtype)
        packed = PackedWeight(tiles, _tiled(by_tile(scales * 256)))
    else:
        offsets = (-scales * weight.zeros).half()
        packed = _packed_4_bits(
            reference.Quantized(values, by_tile(scales.half()), by_tile(offsets))
        )
    return _kept(packed, padding, arena)


def _padded(rows: Tensor, padding: int) -> Tensor:
    return torch.cat((rows, rows.new_zeros(padding, rows.shape[1]))) if padding else rows


def _kept(packed: PackedWeight, padding: int, arena: Arena | None) -> PackedWeight:
    values = arena.keep(packed.values) if arena else packed.values
    return packed._replace(values=values, padding=padding)


def _packed(weight: Tensor, bits: int) -> PackedWeight:
    if bits == 16:
        return PackedWeight(_tiles(weight), None)
    quantized = reference.quantize(weight, bits)
    if bits == 4:
        return _packed_4_bits(quantized)
    return PackedWeight(_tiles(quantized.values), quantized.scales.flatten())


def _packed_4_bits(quantized: reference.Quantized) -> PackedWeight:
    values, scales, offsets = quantized
    assert offsets is not None
    first, last = _tiles(values).flatten(2).split(TILE_ROWS, dim=2)
    return PackedWeight(
        first | last << 4, torch.stack((_tiled(scales), _tiled(offsets)), dim=2).contiguous()
    )


def _tiles(weight: Tensor) -> Tensor:
    """[out_features, in_features] -> [out_features / 16, in_features / 2, 16, 2]."""
    return weight.view(-1, TILE_ROWS, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


def _tiled(groups: Tensor) -> Tensor:
    """[out_features, in_features / 32] -> [out_features / 16, in_features / 32, 16]."""
    return groups.reshape(-1, TILE_ROWS, groups.shape[1]).transpose(1, 2).contiguous()
