"""Small checkpoints in the formats of FP8, AWQ and GPTQ, written from the formats' descriptions.

Weights are rounded, the model gets the rounded numbers, and the folder gets what stands for them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

_GROUP = 32
_BLOCK = (64, 32)

# A weight [out, in] -> the tensors that stand for it, and the rounded weight.
Quantize = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


class Format(NamedTuple):
    """A quantised format of checkpoints."""

    name: str
    config: dict[str, Any]  # quantization_config
    quantize: Quantize


def formats() -> Iterator[Format]:
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    blocks = {**fp8, "weight_block_size": list(_BLOCK)}
    four_bits = {"bits": 4, "group_size": _GROUP}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    by_rows = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    gptq = {**four_bits, "quant_method": "gptq", "sym": False}
    yield Format("FP8, a scale per weight", fp8, _fp8)
    yield Format("FP8, a scale per block", blocks, _fp8_blocks)
    yield Format("FP8, a scale per row (compressed-tensors)", by_rows, _fp8_rows)
    yield Format("AWQ, 4 bits", {**four_bits, "quant_method": "awq", "version": "gemm"}, _awq)
    yield Format("GPTQ, 4 bits", {**gptq, "desc_act": False}, _gptq)
    yield Format(
        "GPTQ, 4 bits, ordered by activations",
        {**gptq, "desc_act": True},
        partial(_gptq, by_activations=True),
    )
    yield Format(
        "GPTQ v2, 4 bits",
        {**gptq, "desc_act": False, "checkpoint_format": "gptq_v2"},
        partial(_gptq, stored_offset=0),
    )


def save(model: PreTrainedModel, folder: str, form: Format) -> None:
    """Round the linear weights of the model's layers, and save the model in that format."""
    torch.manual_seed(2)
    stored: dict[str, dict[str, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            stored[name], module.weight.data = form.quantize(module.weight.data)
    model.config.quantization_config = form.config
    model.config.save_pretrained(folder)
    del model.config.quantization_config
    path = Path(folder, "model.safetensors")
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name.removesuffix(".weight") not in stored
    }
    for module_name, parts in stored.items():
        tensors |= {f"{module_name}.{part}": tensor for part, tensor in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().max() / 448
    rounded = (weight / scale).to(torch.float8_e4m3fn)
    parts = {"weight": rounded, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
    return parts, rounded.float() * scale


def _fp8_rows(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    rounded = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": rounded, "weight_scale": scale}, rounded.float() * scale


def _fp8_blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    rows, columns = _BLOCK
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    rounded, exact = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[block].abs().max() / 448
            rounded[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            exact[block] = rounded[block].float() * scales[i, j]
    return {"weight": rounded, "weight_scale_inv": scales}, exact


def _to_four_bits(weight: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [in, out], zeros [groups, out], scales [groups, out] float16, the rounded weight."""
    columns = weight.t()
    num_groups = int(group.max()) + 1
    parts = [columns[group == i] for i in range(num_groups)]
    low, high = (torch.stack([f(part, 0).values for part in parts]) for f in (torch.min, torch.max))
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(1, 15).int()
    q = ((columns / scales.float()[group]).round() + zeros[group]).clamp(0, 15).int()
    exact = (q - zeros[group]) * scales.float()[group]
    return q, zeros, scales, exact.t().contiguous()


def _packed(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight columns in a word: [n, m] -> [n, m / 8] int32. Number `order[i]` has the i-th bits."""
    words = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        words |= numbers[:, column::8].long() << 4 * place
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    group = torch.arange(weight.shape[1]) // _GROUP
    q, zeros, scales, exact = _to_four_bits(weight, group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    qweight, qzeros = _packed(q, order), _packed(zeros, order)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales}, exact


def _gptq(
    weight: Tensor, by_activations: bool = False, stored_offset: int = 1
) -> tuple[dict[str, Tensor], Tensor]:
    group = torch.arange(weight.shape[1]) // _GROUP
    if by_activations:
        group = group[torch.randperm(len(group))]
    q, zeros, scales, exact = _to_four_bits(weight, group)
    return {
        "qweight": _packed(q.t()).t(),
        "qzeros": _packed(zeros - stored_offset),
        "scales": scales,
        "g_idx": group.int(),
        "bias": torch.zeros(len(weight)),
    }, exact
