"""Reads a GGUF file: its metadata as a transformers config, its tensors under transformers' names.

The metadata is read here and not by transformers, which silently drops what it does not know, such
as scaled rotary frequencies and biases. The `gguf` package dequantizes the blocks.
"""

import mmap
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from tritium.backend.files import check_file
from tritium.backend.gguf_header import TensorInfo, read_header
from tritium.backend.runner.models.architectures import require

_ROPE_TYPES = ("linear", "yarn")
_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral has the architecture llama

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
_HF_ROPE_NAMES = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFFile:
    """A GGUF file's header, and its tensors on request.

    Raises:
        ValueError: the file is not a GGUF file, is cut short, or has an unsupported version or
            architecture.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_file(path)
        with path.open("rb") as file:
            # Copy-on-write: torch requires writable memory; nothing is written.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.metadata, self.tensors, self._data_start = read_header(path, self._data)
        self.architecture: str = self._value_of("general.architecture")
        end = self._data_start + max((self._end(info) for info in self.tensors.values()), default=0)
        if end > len(self._data):
            raise ValueError(f"{path} is cut short: {len(self._data)} bytes of {end}.")
        require("GGUF architecture", self.architecture, _ARCHITECTURES)

    def hf_config(self) -> PretrainedConfig:
        """The metadata as a transformers config."""
        if "token_embd.weight" not in self.tensors:
            raise ValueError(f"{self.path} holds no model: it has no token_embd.weight.")
        kwargs = {
            "vocab_size": self.tensors["token_embd.weight"].shape[0],
            "hidden_size": self._value("embedding_length"),
            "intermediate_size": self._value("feed_forward_length"),
            "num_hidden_layers": self._value("block_count"),
            "num_attention_heads": self._value("attention.head_count"),
            "num_key_value_heads": self._value("attention.head_count_kv"),
            "head_dim": self._head_dim(),
            "rms_norm_eps": self._value("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._value("context_length"),
            "rope_parameters": self._rope_parameters(),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self.tensors,
            "num_experts": self._value("expert_count", 0),
            "eos_token_id": self._eos_token_ids(),
        }
        config: PretrainedConfig = AutoConfig.for_model(self.architecture, **kwargs)
        return config

    def rope_factors(self) -> Tensor | None:
        """[head_dim // 2] float32: divisors of the rotary frequencies (Llama 3.1 and later)."""
        return self._tensor(_ROPE_FACTORS) if _ROPE_FACTORS in self.tensors else None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name in transformers, float32 tensor) of each weight, dequantized one at a time.

        A tensor without a counterpart keeps its GGUF name, so that the model refuses it.
        """
        for name in self.tensors:
            if name != _ROPE_FACTORS:
                yield _hf_name(name), self._unpermuted(name, self._tensor(name))

    def _value(self, name: str, *default: Any) -> Any:
        return self._value_of(f"{self.architecture}.{name}", *default)

    def _value_of(self, key: str, *default: Any) -> Any:
        if key not in self.metadata and not default:
            raise ValueError(f"{self.path} has no {key} in its metadata.")
        return self.metadata.get(key, *default)

    def _head_dim(self) -> int:
        implied = self._value("embedding_length") // self._value("attention.head_count")
        head_dim: int = self._value("attention.key_length", implied)
        return head_dim

    def _rope_parameters(self) -> dict[str, Any]:
        parameters = {"rope_type": "default", "rope_theta": self._value("rope.freq_base", 10000.0)}
        rotary_dim = self._value("rope.dimension_count", self._head_dim())
        if rotary_dim != self._head_dim():
            parameters["partial_rotary_factor"] = rotary_dim / self._head_dim()

        prefix = f"{self.architecture}.rope.scaling."
        scaling = {
            key.removeprefix(prefix): value
            for key, value in self.metadata.items()
            if key.startswith(prefix) and key != f"{prefix}finetuned"
        }
        # As in llama.cpp, a factor without a type means linear.
        rope_type = scaling.pop("type", "linear" if scaling else "none")
        if rope_type == "none":
            return parameters
        require("rope_type", rope_type, _ROPE_TYPES)
        parameters["rope_type"] = rope_type
        for name, hf_name in _HF_ROPE_NAMES.items():
            if name in scaling:
                parameters[hf_name] = scaling.pop(name)
        if scaling:
            unknown = ", ".join(prefix + name for name in scaling)
            raise ValueError(f"{self.path} has {unknown} in its metadata, which is not supported.")
        return parameters

    def _eos_token_ids(self) -> list[int]:
        """The tokens that end a generation in llama.cpp: end of sequence, of turn, of message."""
        keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        return [self.metadata[key] for key in keys if key in self.metadata]

    def _tensor(self, name: str) -> Tensor:
        info = self.tensors[name]
        raw_shape = gguf.quant_shape_to_byte_shape(info.shape, info.quantization)
        raw = torch.frombuffer(
            self._data,
            dtype=torch.uint8,
            count=prod(raw_shape),
            offset=self._data_start + info.offset,
        )
        return torch.from_numpy(gguf.dequantize(raw.view(raw_shape).numpy(), info.quantization))

    def _unpermuted(self, name: str, tensor: Tensor) -> Tensor:
        """Undo llama.cpp's reordering of a Llama's query and key rows.

        Its rotation pairs neighbours (2i, 2i + 1); that of transformers, and ours, pairs halves
        (i, i + head_dim / 2). Only architecture `llama` is stored for the former.
        """
        is_query_or_key = ".attn_q." in name or ".attn_k." in name
        if self.architecture != "llama" or not is_query_or_key:
            return tensor
        rows = tensor.view(-1, self._head_dim() // 2, 2, *tensor.shape[1:])
        return rows.transpose(1, 2).reshape(tensor.shape)

    @staticmethod
    def _end(info: TensorInfo) -> int:
        return info.offset + prod(gguf.quant_shape_to_byte_shape(info.shape, info.quantization))


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    match name.split("."):
        case ["blk", layer, module, kind] if module in _HF_LAYER_NAMES:
            return f"model.layers.{layer}.{_HF_LAYER_NAMES[module]}.{kind}"
        case [module, kind] if module in _HF_NAMES:
            return f"{_HF_NAMES[module]}.{kind}"
    return name
