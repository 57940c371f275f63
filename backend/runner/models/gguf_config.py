"""From a GGUF file's metadata to a transformers config.

Keys and defaults are llama.cpp's (LLM_KV_NAMES in src/llama-arch.cpp, load_hparams in
src/llama-model.cpp). Every key of the architecture is read here, or known not to change a result,
or refused by name.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from tritium.backend.gguf_header import TensorInfo
from tritium.backend.runner.models.architectures import require
from tritium.backend.runner.models.unsupported import UnsupportedModel

_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral has the architecture llama
_HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_ROPE_TYPES = ("none", "linear", "yarn")


def read_hf_config(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> PretrainedConfig:
    """The metadata as a transformers config.

    Args:
        path: Of the file, for errors.

    Raises:
        ValueError: the architecture or a key is not supported, or a key is missing; names it.
    """
    if "general.architecture" not in metadata:
        raise ValueError(f"{path} has no general.architecture in its metadata.")
    require("GGUF architecture", metadata["general.architecture"], _ARCHITECTURES)
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{path} holds no model: it has no token_embd.weight.")
    read = _Reader(path, metadata)
    heads, width = read("attention.head_count"), read("embedding_length")
    head_dim = read("attention.key_length", width // heads)
    read.expect("attention.value_length", head_dim, (head_dim,))
    read.expect("attention.causal", True, (True,))
    kwargs = {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": read("feed_forward_length"),
        "num_hidden_layers": read("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": read("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": read("context_length"),
        "rope_parameters": _rope_parameters(read, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "eos_token_id": _eos_token_ids(metadata),
    }
    read.refuse_others()
    config: PretrainedConfig = AutoConfig.for_model(read.architecture, **kwargs)
    return config


class _Reader:
    """Reads the keys of the architecture and remembers which were read."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.architecture: str = metadata["general.architecture"]
        prefix = f"{self.architecture}."
        self._values = {
            key.removeprefix(prefix): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        }
        self._read = set(_HARMLESS)

    def __call__(self, name: str, *default: Any) -> Any:
        """A key's value; of a list with one entry per layer, the one that all have."""
        self._read.add(name)
        if name not in self._values and not default:
            raise ValueError(f"{self.path} has no {self._key(name)} in its metadata.")
        value = self._values.get(name, *default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            self.refuse(name, ": only layers that are alike are")
        return value[0]

    def expect(self, name: str, default: Any, supported: Collection[Any]) -> None:
        """Refuse a key's value if it is not among those supported."""
        if self(name, default) not in supported:
            self.refuse(name, f". Supported: {', '.join(map(str, supported))}")

    def refuse(self, name: str, more: str = "") -> None:
        """Raise ValueError that names a key and its value."""
        raise UnsupportedModel(
            f"{self.path} has {self._key(name)} {self._values[name]!r:.100} in its metadata, which "
            f"is not supported for architecture {self.architecture}{more}."
        )

    def refuse_others(self) -> None:
        """Refuse keys that nobody has read, unless their value switches nothing on."""
        for name, value in self._values.items():
            if name not in self._read and value:
                self.refuse(name)

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"


def _rope_parameters(read: _Reader, head_dim: int) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": read("rope.freq_base", 10000.0)}
    rotary_dim = read("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        parameters["partial_rotary_factor"] = rotary_dim / head_dim
    read.expect("rope.scaling.type", "linear", _ROPE_TYPES)
    kind = read("rope.scaling.type", "linear")
    # The second name is older. 0 is none.
    factor = read("rope.scaling.factor", read("rope.scale_linear", 0.0)) or 1.0
    if kind == "yarn":
        return parameters | _yarn(read, factor)
    read.expect("rope.scaling.attn_factor", 1.0, (1.0,))
    if kind == "linear" and factor != 1.0:
        parameters |= {"rope_type": "linear", "factor": factor}
    read("rope.scaling.original_context_length", None)  # only yarn uses it
    return parameters


def _yarn(read: _Reader, factor: float) -> dict[str, Any]:
    scaling = "rope.scaling"
    read.expect(f"{scaling}.yarn_ext_factor", 1.0, (1.0,))
    read.expect(f"{scaling}.yarn_attn_factor", 1.0, (1.0,))
    # llama.cpp multiplies what transformers replaces.
    attention = read(f"{scaling}.attn_factor", 1.0) * (1.0 + 0.1 * math.log(max(factor, 1.0)))
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": read(
            f"{scaling}.original_context_length", read("context_length")
        ),
        "attention_factor": attention,
        "beta_fast": read(f"{scaling}.yarn_beta_fast", 32.0),
        "beta_slow": read(f"{scaling}.yarn_beta_slow", 1.0),
    }


def _eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end a generation in llama.cpp: end of sequence, of turn, of message."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return [metadata[key] for key in keys if key in metadata]
