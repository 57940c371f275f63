"""The Llama family on the operations of `kernels`: Llama, SmolLM, Mistral, Qwen2, Qwen3.

Knows tokens, positions and the cache's tensors; nothing of sequences, requests or sampling.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.models.config import ModelConfig
from kernels import (
    AttentionMetadata,
    add_rms_norm,
    attention,
    linear,
    pack_linear,
    rms_norm,
    rope_and_cache,
    silu_and_mul,
)


class LlamaModel:
    """A decoder with its weights.

    Args:
        weights: (name in transformers, tensor) of each weight; see `loader.load_weights`.

    Raises:
        ValueError: a weight is missing, unexpected or of the wrong shape; the message names it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        hidden_size, vocab_size = config.hidden_size, config.vocab_size
        self.embed_tokens = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.layers = [
            _DecoderLayer(config, f"model.layers.{i}", dtype, device)
            for i in range(config.num_layers)
        ]
        self.norm = torch.empty(hidden_size, dtype=dtype, device=device)  # [hidden]
        self.lm_head = (
            self.embed_tokens if config.tie_word_embeddings else torch.empty_like(self.embed_tokens)
        )
        self._load(weights)
        for layer in self.layers:
            layer.pack()
        self.lm_head = pack_linear(self.lm_head)

        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device=device)
        inv_freq = torch.tensor(config.rope_inv_freq, dtype=torch.float32, device=device)
        angles = positions[:, None] * inv_freq
        self.cos = angles.cos() * config.rope_scale  # [max_position_embeddings, head_dim // 2]
        self.sin = angles.sin() * config.rope_scale  # the same

    def forward(
        self,
        input_ids: Tensor,  # [num_tokens] int64
        positions: Tensor,  # [num_tokens] int64
        kv_caches: Sequence[Tensor],  # a layer: [2, num_blocks, block_size, num_kv_heads, head_dim]
        metadata: AttentionMetadata,
    ) -> Tensor:
        """One step over the tokens of all sequences; writes their keys and values to the caches.

        To be called under `torch.inference_mode`.

        Returns:
            [num_tokens, hidden], the final norm applied.
        """
        eps = self.config.rms_norm_eps
        cos, sin = self.cos[positions], self.sin[positions]  # [num_tokens, head_dim // 2]
        residual = F.embedding(input_ids, self.embed_tokens)  # [num_tokens, hidden]
        x = rms_norm(residual, self.layers[0].input_norm, eps)  # [num_tokens, hidden]
        # Each addition to the residual stream is fused with the norm of whoever reads it next.
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for layer, kv_cache, next_norm in zip(self.layers, kv_caches, next_norms, strict=True):
            x = layer.attend(x, cos, sin, kv_cache, metadata)
            x, residual = add_rms_norm(x, residual, layer.post_attention_norm, eps)
            x = layer.feed_forward(x)
            x, residual = add_rms_norm(x, residual, next_norm, eps)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] out of `forward` -> [n, vocab_size] float32."""
        return linear(hidden, self.lm_head).float()

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each weight to its place, converting its dtype and moving it to the device."""
        places = dict(self._places())
        tied_head = None
        for name, weight in weights:
            if name.endswith("rotary_emb.inv_freq"):  # in old checkpoints; the config says it too
                continue
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                tied_head = weight
                continue
            if name not in places:
                raise ValueError(f"The checkpoint holds {name}, which the model has no place for.")
            place = places.pop(name)
            if weight.shape != place.shape:
                raise ValueError(
                    f"{name} is {list(weight.shape)} in the checkpoint, "
                    f"but {list(place.shape)} by the config."
                )
            place.copy_(weight)
        if places:
            first = ", ".join(list(places)[:5])
            raise ValueError(f"The checkpoint lacks {len(places)} weights, among them {first}.")
        if tied_head is not None and not torch.equal(
            tied_head.to(self.device, self.dtype), self.embed_tokens
        ):
            raise ValueError(
                "The config ties lm_head.weight to the embeddings, but the checkpoint holds "
                "another. If the checkpoint is right, set tie_word_embeddings to false."
            )

    def _places(self) -> Iterator[tuple[str, Tensor]]:
        """(name in transformers, where it goes) of each weight."""
        yield "model.embed_tokens.weight", self.embed_tokens
        for layer in self.layers:
            yield from layer.places()
        yield "model.norm.weight", self.norm
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.lm_head


class _DecoderLayer:
    def __init__(
        self, config: ModelConfig, name: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.name = name

        def vector(size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        hidden, intermediate = config.hidden_size, config.intermediate_size
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.input_norm = vector(hidden)  # [hidden]
        self.post_attention_norm = vector(hidden)  # [hidden]
        self.q_norm = vector(config.head_dim) if config.qk_norm else None  # [head_dim]
        self.k_norm = vector(config.head_dim) if config.qk_norm else None  # [head_dim]

        def stacked(in_features: int, parts: dict[str, int], bias: bool) -> _Linear:
            named = {f"{name}.{part}": size for part, size in parts.items()}
            return _Linear(in_features, named, bias, dtype, device)

        qkv = {
            "self_attn.q_proj": q_size,
            "self_attn.k_proj": kv_size,
            "self_attn.v_proj": kv_size,
        }
        gate_up = {"mlp.gate_proj": intermediate, "mlp.up_proj": intermediate}
        self.qkv_proj = stacked(hidden, qkv, config.attention_bias)
        self.o_proj = stacked(q_size, {"self_attn.o_proj": hidden}, config.o_bias)
        self.gate_up_proj = stacked(hidden, gate_up, config.mlp_bias)
        self.down_proj = stacked(intermediate, {"mlp.down_proj": hidden}, config.mlp_bias)
        self._linears = (self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj)

    def attend(
        self,
        x: Tensor,  # [num_tokens, hidden]
        cos: Tensor,  # [num_tokens, head_dim // 2] float32
        sin: Tensor,  # [num_tokens, head_dim // 2] float32
        kv_cache: Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim]
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Self-attention -> [num_tokens, hidden]."""
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        qkv = self.qkv_proj(x).view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, _ = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
            q.copy_(rms_norm(q, self.q_norm, config.rms_norm_eps))
            k.copy_(rms_norm(k, self.k_norm, config.rms_norm_eps))
        q = rope_and_cache(qkv, cos, sin, kv_cache, metadata.slot_mapping)
        # [num_tokens, num_heads, head_dim]
        out = attention(q, kv_cache, metadata, config.head_dim**-0.5, config.sliding_window)
        return self.o_proj(out.flatten(1))

    def feed_forward(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x)). [num_tokens, hidden] -> [num_tokens, hidden]."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))

    def places(self) -> Iterator[tuple[str, Tensor]]:
        """(name in transformers, where it goes) of each weight."""
        yield f"{self.name}.input_layernorm.weight", self.input_norm
        yield f"{self.name}.post_attention_layernorm.weight", self.post_attention_norm
        if self.q_norm is not None and self.k_norm is not None:
            yield f"{self.name}.self_attn.q_norm.weight", self.q_norm
            yield f"{self.name}.self_attn.k_norm.weight", self.k_norm
        for part in self._linears:
            yield from part.places()

    def pack(self) -> None:
        for part in self._linears:
            part.weight = pack_linear(part.weight)


class _Linear:
    """x @ weight.T + bias, with the rows of one or more of the checkpoint's projections stacked.

    Args:
        parts: name in transformers -> out_features of each, in the order of stacking.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.parts = parts
        out_features = sum(parts.values())
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        return linear(x, self.weight, self.bias)

    def places(self) -> Iterator[tuple[str, Tensor]]:
        """(name in transformers, its rows) of each weight and bias. Only before packing."""
        sizes = list(self.parts.values())
        for kind, stacked in (("weight", self.weight), ("bias", self.bias)):
            if stacked is not None:
                for name, rows in zip(self.parts, stacked.split(sizes), strict=True):
                    yield f"{name}.{kind}", rows
