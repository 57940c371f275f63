"""The shape of a supported model, as plain data, and the refusal of every other model.

A model that would be computed wrongly is refused here. The error says what was found and what is
supported.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # of the query, key and value projections
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # an RMSNorm over each query and key head (Qwen3)
    sliding_window: int | None  # a token sees the last `sliding_window` positions, itself included
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    rope_inv_freq: tuple[float, ...] = field(repr=False)  # head_dim // 2 float32 values
    rope_scale: float  # multiplies cos and sin (yarn); 1.0 elsewhere

    @classmethod
    def from_hf(cls, hf_config: Any, eos_token_ids: Iterable[int] = ()) -> "ModelConfig":
        """Read a transformers config (`AutoConfig`).

        Args:
            eos_token_ids: Additional ids (from generation_config.json).

        Raises:
            ValueError: the model needs an unsupported feature; the message names it and what is
                supported.
        """
        require("model_type", hf_config.model_type, SUPPORTED_MODEL_TYPES)
        require("hidden_act", hf_config.hidden_act, ("silu",))
        _refuse_experts_and_quantization(hf_config)
        attention_bias = bool(getattr(hf_config, "attention_bias", False))
        is_qwen2 = hf_config.model_type == "qwen2"  # its config does not list its biases
        inv_freq, rope_scale = _rope(hf_config)
        return cls(
            vocab_size=hf_config.vocab_size,
            hidden_size=hf_config.hidden_size,
            intermediate_size=hf_config.intermediate_size,
            num_layers=hf_config.num_hidden_layers,
            num_heads=hf_config.num_attention_heads,
            num_kv_heads=hf_config.num_key_value_heads,
            head_dim=_head_dim(hf_config),
            rms_norm_eps=hf_config.rms_norm_eps,
            max_position_embeddings=hf_config.max_position_embeddings,
            tie_word_embeddings=hf_config.tie_word_embeddings,
            attention_bias=is_qwen2 or attention_bias,
            o_bias=attention_bias and not is_qwen2,
            mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
            qk_norm=hf_config.model_type == "qwen3",
            sliding_window=_sliding_window(hf_config),
            eos_token_ids=tuple(
                dict.fromkeys([*as_token_ids(hf_config.eos_token_id), *eos_token_ids])
            ),
            rope_inv_freq=tuple(inv_freq.tolist()),
            rope_scale=rope_scale,
        )


def require(name: str, found: object, supported: Collection[object]) -> None:
    """Raise ValueError, with all three arguments, if the value found is not supported."""
    if found not in supported:
        _refuse(name, found, supported)


def as_token_ids(value: int | list[int] | None) -> list[int]:
    """The three forms of `eos_token_id` in configs, as a list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _refuse_experts_and_quantization(hf_config: Any) -> None:
    for name in ("num_experts", "num_local_experts"):
        if num_experts := getattr(hf_config, name, None):
            _refuse(name, num_experts, ["dense models, without a mixture of experts"])
    if quantization := getattr(hf_config, "quantization_config", None):
        _refuse("quantization_config", quantization, ["none; quantized weights only as GGUF"])


def _head_dim(hf_config: Any) -> int:
    head_dim: int | None = getattr(hf_config, "head_dim", None)
    return head_dim or hf_config.hidden_size // hf_config.num_attention_heads


def _sliding_window(hf_config: Any) -> int | None:
    layer_types = getattr(hf_config, "layer_types", None)
    if not layer_types:  # Llama never has a window, Mistral in all layers
        return hf_config.sliding_window if hf_config.model_type == "mistral" else None
    kinds = sorted(set(layer_types))
    if kinds not in (["full_attention"], ["sliding_attention"]):
        _refuse("layer_types", kinds, ["all full_attention", "all sliding_attention"])
    return hf_config.sliding_window if kinds == ["sliding_attention"] else None


def _rope(hf_config: Any) -> tuple[Tensor, float]:
    """(inverse frequencies [head_dim // 2] float32, factor on cos and sin)."""
    parameters = hf_config.rope_parameters
    rope_type = parameters.get("rope_type", "one per layer type")
    require("rope_type", rope_type, SUPPORTED_ROPE_TYPES)
    require("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0), (1.0,))
    if rope_type != "default":
        return ROPE_INIT_FUNCTIONS[rope_type](hf_config)
    head_dim = _head_dim(hf_config)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / parameters["rope_theta"] ** exponents, 1.0


def _refuse(name: str, found: object, supported: Collection[object]) -> NoReturn:
    listed = ", ".join(map(str, supported))
    raise ValueError(
        f"The model has {name} {found!r}, which is not supported. Supported: {listed}."
    )
