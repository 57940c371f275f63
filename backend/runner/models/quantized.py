"""Quantised checkpoints: FP8, AWQ and GPTQ, read into the one form that the kernels know.

The numbers that they stand for are computed with in the model's own dtype. Activations are never
rounded, whatever the checkpoint's own software does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritium.backend.runner.models.unsupported import UnsupportedModel
from tritium.kernels import QuantizedWeight, StoredWeight

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each four bits of a word hold

# The tensors that stand for a weight, and the function that puts them together.
_Parts = dict[str, Tensor]


class Quantization(NamedTuple):
    """How a checkpoint's weights are stored."""

    method: str  # fp8, awq or gptq
    group_size: int = 0  # inputs that share a scale; 0: all of a row
    block_size: tuple[int, int] = (0, 0)  # of fp8: outputs, inputs that share a scale
    zero_offset: int = 0  # of gptq: what is to be added to stored zero points


def read_quantization(config: Mapping[str, Any]) -> Quantization:
    """Read the `quantization_config` of a config.json.

    Raises:
        ValueError: the method, or a setting of it, is not supported; names it.
    """
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return _read_compressed_tensors(config)
    _require("quant_method", method, ("fp8", "awq", "gptq", "compressed-tensors"))
    if method == "fp8":
        _require("fmt", config.get("fmt", "e4m3"), ("e4m3",))
        return Quantization("fp8", block_size=tuple(config.get("weight_block_size") or (0, 0)))
    _require("bits", config.get("bits"), (4,))
    group_size = config["group_size"]
    group_size = 0 if group_size == -1 else group_size
    if method == "awq":
        _require("version", str(config.get("version", "gemm")).lower(), ("gemm",))
        _require("zero_point", config.get("zero_point", True), (True,))
        return Quantization("awq", group_size)
    version = config.get("checkpoint_format") or "gptq"
    _require("checkpoint_format", version, ("gptq", "gptq_v2"))
    return Quantization("gptq", group_size, zero_offset=1 if version == "gptq" else 0)


def read_quantized(
    weights: Iterable[tuple[str, Tensor]], quantization: Quantization
) -> Iterator[tuple[str, StoredWeight]]:
    """(name, weight) of a checkpoint, with each quantised weight under its plain name.

    A weight whose groups are not consecutive inputs is converted to float32.

    Raises:
        ValueError: parts of a quantised weight are missing, their shapes do not fit, or it holds
            NaN.
    """
    needed, ignored, read = _METHODS[quantization.method]
    waiting: dict[str, _Parts] = {}
    for name, tensor in weights:
        module, _, part = name.rpartition(".")
        if part in ignored:
            continue
        is_part = tensor.dtype == torch.float8_e4m3fn if part == "weight" else part in needed
        if not is_part:
            yield name, tensor
            continue
        parts = waiting.setdefault(module, {})
        parts[needed[part]] = tensor
        if len(parts) == len(set(needed.values())):
            try:
                yield f"{module}.weight", read(waiting.pop(module), quantization)
            except (RuntimeError, IndexError, ValueError) as error:
                raise ValueError(
                    f"The quantised weight {module} can't be read as {quantization}: {error}"
                ) from None
    for module, parts in waiting.items():
        missing = sorted(set(needed.values()) - set(parts))
        raise ValueError(f"The quantised weight {module} lacks its {', '.join(missing)}.")


def _fp8(parts: _Parts, quantization: Quantization) -> QuantizedWeight:
    """weight [out, in] float8 times scale: [], [1], [out], [out, 1], or one per block."""
    weight, scale = parts["weight"], parts["scale"].float()
    if (weight.view(torch.uint8) & 0x7F == 0x7F).any():
        raise ValueError("it holds NaN: the file is damaged, or its training failed")
    out_features, in_features = weight.shape
    rows, columns = quantization.block_size
    if 0 in quantization.block_size:
        scale = scale.reshape(-1, 1)
        rows, columns = out_features if len(scale) == 1 else 1, in_features
    scale = scale.repeat_interleave(rows, 0)[:out_features]
    return _checked(weight, scale, None, columns)


def _awq(parts: _Parts, quantization: Quantization) -> QuantizedWeight:
    """(q - zero) * scale, from [in, out / 8], [groups, out / 8] and [groups, out]."""
    order = torch.tensor(_AWQ_ORDER).argsort()
    q = _unpacked(parts["qweight"])[..., order].flatten(1)  # [in, out]
    zeros = _unpacked(parts["qzeros"])[..., order].flatten(1)  # [groups, out]
    return _four_bits(q, parts["scales"], zeros, quantization)


def _gptq(parts: _Parts, quantization: Quantization) -> StoredWeight:
    """(q - zero) * scale, from [in / 8, out], [groups, out / 8], [groups, out] and [in]."""
    q = _unpacked(parts["qweight"]).transpose(1, 2).flatten(0, 1)  # [in, out]
    zeros = _unpacked(parts["qzeros"]).flatten(1) + quantization.zero_offset  # [groups, out]
    scales, group = parts["scales"], parts["g_idx"].long()
    if torch.equal(group, torch.arange(len(q)) // (quantization.group_size or len(q))):
        return _four_bits(q, scales, zeros, quantization)
    # Made in the order of activations: the groups are scattered over the inputs.
    return ((q - zeros[group]) * scales.float()[group]).t()


def _four_bits(
    q: Tensor,  # [in, out]
    scales: Tensor,  # [groups, out]
    zeros: Tensor,  # [groups, out]
    quantization: Quantization,
) -> QuantizedWeight:
    q = q.t().to(torch.uint8)
    values = q[:, 0::2] | q[:, 1::2] << 4
    zeros = zeros.t().to(torch.uint8).contiguous()
    return _checked(values, scales.t().contiguous(), zeros, quantization.group_size or q.shape[1])


def _checked(
    values: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int
) -> QuantizedWeight:
    weight = QuantizedWeight(values, scales, zeros, group_size, torch.float32)
    out_features, in_features = weight.shape
    expected = (out_features, -(-in_features // group_size))
    for tensor in (scales, zeros):
        if tensor is not None and tensor.shape != expected:
            raise ValueError(f"scales for {list(tensor.shape)} groups, not {list(expected)}")
    return weight


def _unpacked(words: Tensor) -> Tensor:
    """The eight numbers of four bits in each word. [n, m] int32 -> [n, m, 8] int32"""
    return words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15


# Method -> (name in the checkpoint -> part, names that are not needed, how they become a weight).
_Read = Callable[[_Parts, Quantization], StoredWeight]
_Method = tuple[dict[str, str], tuple[str, ...], _Read]
_METHODS: dict[str, _Method] = {
    "fp8": (
        {"weight": "weight", "weight_scale": "scale", "weight_scale_inv": "scale"},
        ("input_scale", "activation_scale"),
        _fp8,
    ),
    "awq": ({name: name for name in ("qweight", "qzeros", "scales")}, (), _awq),
    "gptq": ({name: name for name in ("qweight", "qzeros", "scales", "g_idx")}, (), _gptq),
}


def _read_compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    _require("format", config.get("format"), ("float-quantized", "naive-quantized"))
    (group,) = config["config_groups"].values()
    weights = group["weights"]
    _require("type", weights.get("type"), ("float",))
    _require("num_bits", weights.get("num_bits"), (8,))
    _require("strategy", weights.get("strategy"), ("tensor", "channel", "block"))
    block = weights.get("block_structure") if weights["strategy"] == "block" else None
    return Quantization("fp8", block_size=tuple(block or (0, 0)))


def _require(name: str, found: object, supported: tuple[object, ...]) -> None:
    if found not in supported:
        raise UnsupportedModel(
            f"The model has {name} {found!r} in its quantization_config, which is not supported. "
            f"Supported: {', '.join(map(str, supported))}."
        )
