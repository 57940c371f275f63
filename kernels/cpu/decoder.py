"""All layers of a model in one call of C. Knows the order of the operations, not how they work."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritium.kernels.cpu import build
from tritium.kernels.cpu.operations import attention_arguments, keys_and_values
from tritium.kernels.cpu.structs import ACTIVATIONS, DecoderArguments, Layer, Linear, pointer
from tritium.kernels.cpu.support import supports_attention, supports_rows
from tritium.kernels.cpu.weights import PackedWeight
from tritium.kernels.metadata import AttentionMetadata, KVCache


class LayerWeights(NamedTuple):
    """One decoder layer. Each pair is a weight and its bias; a norm of None is absent."""

    attention_norm: Tensor | None  # [hidden]
    attention_out_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor | None  # [hidden]
    mlp_out_norm: Tensor | None  # [hidden]
    q_norm: Tensor | None  # [head_dim] or [num_heads * head_dim]
    k_norm: Tensor | None  # [head_dim] or [num_kv_heads * head_dim]
    qkv: tuple[PackedWeight, Tensor | None]
    o: tuple[PackedWeight, Tensor | None]
    gate_up: tuple[PackedWeight, Tensor | None]
    down: tuple[PackedWeight, Tensor | None]
    window: int | None  # keys that a token sees, its own included; None: all
    rope: int  # which cos and sin

    def has_padding(self) -> bool:
        """Whether a weight has more rows than its output."""
        return any(weight.padding for weight, _ in (self.qkv, self.o, self.gate_up, self.down))


class Shape(NamedTuple):
    """What all layers have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    scale: float  # of the scores
    soft_cap: float  # of the scores; 0: none
    multiplier: float  # of what a block adds to the residual stream
    activation: str
    is_gated: bool


class Decoder:
    """Runs all layers in one call, so that no Python runs between two operations.

    Args:
        norm: The weight of the norm after the last layer, [hidden].
    """

    def __init__(self, layers: Sequence[LayerWeights], norm: Tensor, shape: Shape) -> None:
        self._weights = layers, norm  # the structs below point into them
        self._shape = shape
        self._layers = (Layer * len(layers))()
        for struct, layer in zip(self._layers, layers, strict=True):
            for name, value in layer._asdict().items():
                if isinstance(value, tuple):
                    weight, bias = value
                    setattr(struct, name, Linear(weight.struct(), pointer(bias)))
                elif isinstance(value, Tensor):
                    setattr(struct, name, value.data_ptr())
                else:
                    setattr(struct, name, value or 0)

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerWeights | None],
        norm: Tensor,
        shape: Shape,
        dtype: torch.dtype,
    ) -> "Decoder | None":
        """A decoder; None if the dtype, or a layer's weights, are not supported."""
        packed = [layer for layer in layers if layer and not layer.has_padding()]
        rows = norm.to(dtype)
        return (
            cls(packed, norm, shape) if supports_rows(rows) and len(packed) == len(layers) else None
        )

    def supports_cache(self, kv_cache: KVCache) -> bool:
        """Whether the layers can use a cache like this one."""
        q = torch.empty(self._shape.num_heads, self._shape.head_dim, dtype=torch.bfloat16)
        return supports_attention(q, kv_cache)

    def __call__(
        self,
        residual: Tensor,  # [n, hidden]: embeddings, overwritten
        cos: Tensor,  # [num_ropes, n, head_dim // 2] float32
        sin: Tensor,  # [num_ropes, n, head_dim // 2] float32
        kv_caches: Sequence[KVCache],  # one per layer; see `supports_cache`
        metadata: AttentionMetadata,
    ) -> Tensor:
        """The last layer's output, normalised. [n, hidden]"""
        layers, norm = self._weights
        shape = self._shape
        num_heads, num_kv_heads, dim = shape[:3]
        n, hidden = residual.shape
        for struct, kv_cache in zip(self._layers, kv_caches, strict=True):
            struct.keys, struct.values = keys_and_values(kv_cache)
        x, q = torch.empty_like(residual), residual.new_empty(n, num_heads, dim)
        attended = torch.empty_like(q)
        qkv = residual.new_empty(n, num_heads + 2 * num_kv_heads, dim)
        gate_up = residual.new_empty(n, (2 if shape.is_gated else 1) * shape.intermediate)
        activated = residual.new_empty(n, shape.intermediate)
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        q_norm = layers[0].q_norm
        arguments = DecoderArguments(
            layers=ctypes.addressof(self._layers),
            norm=norm.data_ptr(),
            residual=residual.data_ptr(),
            x=x.data_ptr(),
            qkv=qkv.data_ptr(),
            gate_up=gate_up.data_ptr(),
            activated=activated.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=metadata.slot_mapping.data_ptr(),
            num_layers=len(layers),
            n=n,
            hidden=hidden,
            intermediate=shape.intermediate,
            activation=ACTIVATIONS.index(shape.activation),
            gated=shape.is_gated,
            whole_norm=q_norm is not None and q_norm.numel() != dim,
            eps=shape.eps,
            multiplier=shape.multiplier,
            attention=attention_arguments(
                q, attended, kv_caches[0], metadata, shape.scale, None, shape.soft_cap
            ),
        )
        build.loaded().decode(ctypes.byref(arguments))
        return x
