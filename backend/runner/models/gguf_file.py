"""Reads a GGUF model: its metadata as a transformers config, its tensors under transformers' names.

The metadata is read here and not by transformers, which silently drops what it does not know, such
as scaled rotary frequencies and biases. The `gguf` package dequantizes the blocks.
"""

import mmap
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import gguf
import torch
from torch import Tensor
from transformers import PretrainedConfig

from tritium.backend.files import check_file
from tritium.backend.gguf_header import GGUFHeader, TensorInfo, read_header
from tritium.backend.runner.models.gguf_config import read_hf_config
from tritium.backend.runner.models.gguf_parts import part_paths
from tritium.backend.runner.models.safetensors_file import check_finite

_HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


class _Part(NamedTuple):
    """One file of a model."""

    path: Path
    data: mmap.mmap
    header: GGUFHeader


class GGUFFile:
    """The headers of a GGUF model's file or files, and its tensors on request.

    Args:
        path: The file; of a model in parts, any of them.

    Raises:
        FileNotFoundError: a part is missing.
        ValueError: a file is not a GGUF file, is cut short, has an unsupported version, or is not
            the part that its name says.
    """

    def __init__(self, path: Path) -> None:
        parts = [_open(part) for part in part_paths(path)]
        _check_parts(parts)
        self.path = parts[0].path
        self.metadata = parts[0].header.metadata
        self._parts = {name: part for part in parts for name in part.header.tensors}
        self.tensors = {name: part.header.tensors[name] for name, part in self._parts.items()}

    def hf_config(self) -> PretrainedConfig:
        """The metadata as a transformers config."""
        return read_hf_config(self.path, self.metadata, self.tensors)

    def rope_factors(self) -> Tensor | None:
        """[head_dim // 2] float32: divisors of the rotary frequencies (Llama 3.1 and later)."""
        return self._tensor(_ROPE_FACTORS) if _ROPE_FACTORS in self.tensors else None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name in transformers, float32 tensor) of each weight, dequantized one at a time.

        A tensor without a counterpart keeps its GGUF name, so that the model refuses it.

        Raises:
            ValueError: a tensor's quantization is not supported, or it has numbers that are not
                finite; names the file and the tensor.
        """
        head_dim = self.hf_config().head_dim
        for name in self.tensors:
            if name != _ROPE_FACTORS:
                yield _hf_name(name), self._unpermuted(name, self._tensor(name), head_dim)

    def _tensor(self, name: str) -> Tensor:
        part, info = self._parts[name], self.tensors[name]
        raw_shape = gguf.quant_shape_to_byte_shape(info.shape, info.quantization)
        raw = torch.frombuffer(
            part.data,
            dtype=torch.uint8,
            count=prod(raw_shape),
            offset=part.header.data_start + info.offset,
        )
        try:
            array = gguf.dequantize(raw.view(raw_shape).numpy(), info.quantization)
        except NotImplementedError:
            raise ValueError(
                f"{part.path} holds {name} as {info.quantization.name}, which is not supported."
            ) from None
        tensor = torch.from_numpy(array)
        check_finite(part.path, name, tensor)
        return tensor

    def _unpermuted(self, name: str, tensor: Tensor, head_dim: int) -> Tensor:
        """Undo llama.cpp's reordering of a Llama's query and key rows.

        Its rotation pairs neighbours (2i, 2i + 1); that of transformers, and ours, pairs halves
        (i, i + head_dim / 2). Only architecture `llama` is stored for the former.
        """
        is_query_or_key = ".attn_q." in name or ".attn_k." in name
        if self.metadata["general.architecture"] != "llama" or not is_query_or_key:
            return tensor
        rows = tensor.view(-1, head_dim // 2, 2, *tensor.shape[1:])
        return rows.transpose(1, 2).reshape(tensor.shape)


def _open(path: Path) -> _Part:
    check_file(path)
    with path.open("rb") as file:
        # Copy-on-write: torch requires writable memory; nothing is written.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header = read_header(path, data)
    end = header.data_start + max(map(_end, header.tensors.values()), default=0)
    if end > len(data):
        raise ValueError(f"{path} is cut short: {len(data)} bytes of {end}.")
    return _Part(path, data, header)


def _end(info: TensorInfo) -> int:
    return info.offset + prod(gguf.quant_shape_to_byte_shape(info.shape, info.quantization))


def _check_parts(parts: list[_Part]) -> None:
    """Make sure that files are the parts that their names say, all of one model."""
    for i, part in enumerate(parts):
        # A model in one file has neither key.
        number = part.header.metadata.get("split.no", 0) + 1
        count = part.header.metadata.get("split.count", 0) or 1
        if (number, count) != (i + 1, len(parts)):
            raise ValueError(
                f"{part.path} is part {number} of {count} by its metadata. Parts must be named "
                f"NAME-{number:05}-of-{count:05}.gguf and lie in one folder."
            )
    found = sum(len(part.header.tensors) for part in parts)
    expected = parts[0].header.metadata.get("split.tensors.count", found)
    if found != expected:
        raise ValueError(
            f"{parts[0].path} and its parts hold {found} tensors instead of {expected}: "
            "they are not parts of one model."
        )


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    match name.split("."):
        case ["blk", layer, module, kind] if module in _HF_LAYER_NAMES:
            return f"model.layers.{layer}.{_HF_LAYER_NAMES[module]}.{kind}"
        case [module, kind] if module in _HF_NAMES:
            return f"{_HF_NAMES[module]}.{kind}"
    return name
