"""All layers of a Llama in one call of C. Knows the order of the operations, not how they work."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritium.kernels.cpu import build
from tritium.kernels.cpu.operations import attention_arguments, keys_and_values
from tritium.kernels.cpu.structs import DecoderArguments, Layer, Linear, pointer
from tritium.kernels.cpu.support import supports_attention, supports_rows
from tritium.kernels.cpu.weights import PackedWeight
from tritium.kernels.metadata import AttentionMetadata, KVCache


class LayerWeights(NamedTuple):
    """The weights of one decoder layer. Each pair is a weight and its bias."""

    input_norm: Tensor  # [hidden]
    post_attention_norm: Tensor  # [hidden]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    qkv: tuple[PackedWeight, Tensor | None]
    o: tuple[PackedWeight, Tensor | None]
    gate_up: tuple[PackedWeight, Tensor | None]
    down: tuple[PackedWeight, Tensor | None]


class Decoder:
    """Runs all layers in one call, so that no Python runs between two operations.

    Args:
        norm: The weight of the norm after the last layer, [hidden].
    """

    def __init__(self, layers: Sequence[LayerWeights], norm: Tensor, eps: float) -> None:
        self._weights = layers, norm  # the structs below point into them
        self._eps = eps
        self._layers = (Layer * len(layers))()
        for struct, layer in zip(self._layers, layers, strict=True):
            for name, value in layer._asdict().items():
                if isinstance(value, tuple):
                    weight, bias = value
                    setattr(struct, name, Linear(weight.struct(), pointer(bias)))
                else:
                    setattr(struct, name, pointer(value))

    @classmethod
    def of(
        cls, layers: Sequence[LayerWeights | None], norm: Tensor, eps: float
    ) -> "Decoder | None":
        """A decoder; None if a layer's weights are not all supported."""
        packed = [layer for layer in layers if layer]
        return (
            cls(packed, norm, eps) if supports_rows(norm) and len(packed) == len(layers) else None
        )

    def supports_cache(self, kv_cache: KVCache) -> bool:
        """Whether the layers can use a cache like this one."""
        q = self._weights[1].new_empty(self._num_heads(kv_cache), kv_cache.data.shape[-1])
        return supports_attention(q, kv_cache, None)

    def __call__(
        self,
        residual: Tensor,  # [n, hidden]: embeddings, overwritten
        cos: Tensor,  # [n, head_dim // 2] float32
        sin: Tensor,  # [n, head_dim // 2] float32
        kv_caches: Sequence[KVCache],  # one per layer; see `supports_cache`
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """The last layer's output, normalised. [n, hidden]"""
        layers, norm = self._weights
        num_kv_heads, dim = kv_caches[0].data.shape[-2:]
        num_heads = self._num_heads(kv_caches[0])
        n, hidden = residual.shape
        intermediate = layers[0].down[0].in_features
        for struct, kv_cache in zip(self._layers, kv_caches, strict=True):
            struct.keys, struct.values = keys_and_values(kv_cache)
        x, q = torch.empty_like(residual), residual.new_empty(n, num_heads, dim)
        attended = torch.empty_like(q)
        qkv = residual.new_empty(n, num_heads + 2 * num_kv_heads, dim)
        gate_up = residual.new_empty(n, 2 * intermediate)
        activated = residual.new_empty(n, intermediate)
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
            intermediate=intermediate,
            eps=self._eps,
            attention=attention_arguments(
                q, attended, kv_caches[0], metadata, scale, sliding_window
            ),
        )
        build.loaded().decode(ctypes.byref(arguments))
        return x

    def _num_heads(self, kv_cache: KVCache) -> int:
        num_kv_heads, dim = kv_cache.data.shape[-2:]
        return self._weights[0][0].qkv[0].out_features // dim - 2 * num_kv_heads
