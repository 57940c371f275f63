"""The Llama family on the operations of `kernels`: Llama, SmolLM, Mistral, Qwen2, Qwen3.

Knows tokens, positions and the cache's tensors. Does not know sequences, requests or sampling.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tritium import kernels
from tritium.backend.runner.models.config import ModelConfig
from tritium.backend.runner.models.lora import LoraRows, PackedLora, add_lora, read_adapter, stack
from tritium.kernels import AttentionMetadata, KVCache, PackedWeight
from tritium.kernels.cpu import Decoder, LayerWeights


class LlamaModel:
    """A decoder with its weights.

    Args:
        weights: (name in transformers, tensor) of each weight; see `loader.load_weights`.
        batch_invariant: On CUDA, whether a token's numbers must be bit-identical in any batch, at
            a cost; see `is_batch_invariant`.
        weight_bits: 8 or 4 round the linears' weights to that many bits; see `kernels.pack_linear`.

    Raises:
        ValueError: a weight is missing, unexpected or of the wrong shape, and the message names it;
            or the weights can't be rounded to 8 or 4 bits on this machine.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
        weight_bits: int = 16,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.batch_invariant = batch_invariant
        empty = partial(torch.empty, dtype=dtype, device=device)
        self.embed_tokens = empty(config.vocab_size, config.hidden_size)
        self.layers = [
            _DecoderLayer(config, f"model.layers.{i}", empty, batch_invariant)
            for i in range(config.num_layers)
        ]
        self.norm = empty(config.hidden_size)
        self.lm_head: Tensor | PackedWeight = (
            self.embed_tokens if config.tie_word_embeddings else torch.empty_like(self.embed_tokens)
        )
        self._load(weights)
        arena = kernels.Arena()
        for layer in self.layers:
            layer.pack(weight_bits, arena)
        self.lm_head = kernels.pack_linear(self.lm_head, weight_bits, arena)
        self._decoder = Decoder.of(
            [layer.weights() for layer in self.layers], self.norm, config.rms_norm_eps
        )

        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device=device)
        inv_freq = torch.tensor(config.rope_inv_freq, dtype=torch.float32, device=device)
        angles = positions[:, None] * inv_freq
        self.cos = angles.cos() * config.rope_scale  # [max_position_embeddings, head_dim // 2]
        self.sin = angles.sin() * config.rope_scale  # [max_position_embeddings, head_dim // 2]

    def forward(
        self,
        input_ids: Tensor,  # [num_tokens] int64
        positions: Tensor,  # [num_tokens] int64
        kv_caches: Sequence[KVCache],  # one per layer
        metadata: AttentionMetadata,
        lora: LoraRows | None = None,
    ) -> Tensor:
        """One step over the tokens of all sequences; writes their keys and values to the caches.

        Call it under `torch.inference_mode`.

        Args:
            lora: The tokens that each loaded adapter changes; None or empty: no adapter is used.

        Returns:
            [num_tokens, hidden], after the final norm.
        """
        eps = self.config.rms_norm_eps
        cos, sin = self.cos[positions], self.sin[positions]  # [num_tokens, head_dim // 2]
        residual = F.embedding(input_ids, self.embed_tokens)  # [num_tokens, hidden]
        if self._decoder and not lora and self._decoder.supports_cache(kv_caches[0]):
            scale, window = self.config.head_dim**-0.5, self.config.sliding_window
            return self._decoder(residual, cos, sin, kv_caches, metadata, scale, window)
        x = kernels.rms_norm(residual, self.layers[0].input_norm, eps)  # [num_tokens, hidden]
        # Each addition to the residual stream is fused with the norm that reads it next.
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for layer, kv_cache, next_norm in zip(self.layers, kv_caches, next_norms, strict=True):
            x = layer.attend(x, cos, sin, kv_cache, metadata, lora)
            x, residual = kernels.add_rms_norm(x, residual, layer.post_attention_norm, eps)
            x = layer.feed_forward(x, lora)
            x, residual = kernels.add_rms_norm(x, residual, next_norm, eps)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] from `forward` -> [n, vocab_size] float32."""
        return kernels.linear(
            hidden, self.lm_head, dtype=torch.float32, batch_invariant=self.batch_invariant
        )

    def is_batch_invariant(self, kv_cache: KVCache) -> bool:
        """Whether, without adapters, a token's logits depend only on its sequence, to the bit.

        Args:
            kv_cache: A cache like those that the layers will use.
        """
        if self.device.type == "cuda":
            return self.batch_invariant
        runs_in_c = self._decoder is not None and self._decoder.supports_cache(kv_cache)
        return runs_in_c and isinstance(self.lm_head, PackedWeight)

    def load_adapter(self, name: str, directory: Path) -> None:
        """Load a LoRA adapter as PEFT stores it. `forward`'s argument says which tokens it changes.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: it is damaged, not supported, or not for this model.
        """
        linears = [part for layer in self.layers for part in layer.linears]
        shapes = {
            projection: (out_features, part.in_features)
            for part in linears
            for projection, out_features in part.parts.items()
        }
        adapter = read_adapter(directory, shapes)
        for part in linears:
            if (weights := stack(part.parts, adapter)) is not None:
                a, b = (
                    kernels.pack_linear(weight.to(self.device, self.dtype)) for weight in weights
                )
                part.adapters[name] = PackedLora(a, b)

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each weight into its tensor, which converts the dtype and moves it to the device."""
        targets = dict(self._targets())
        tied_head = None
        for name, weight in weights:
            if name.endswith("rotary_emb.inv_freq"):  # in old checkpoints; the config has it, too
                continue
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                tied_head = weight
                continue
            if name not in targets:
                raise ValueError(f"The checkpoint holds {name}, which the model has no place for.")
            target = targets.pop(name)
            if weight.shape != target.shape:
                raise ValueError(
                    f"{name} is {list(weight.shape)} in the checkpoint, "
                    f"but {list(target.shape)} by the config."
                )
            target.copy_(weight)
        if targets:
            first = ", ".join(list(targets)[:5])
            raise ValueError(f"The checkpoint lacks {len(targets)} weights, among them {first}.")
        if tied_head is not None and not torch.equal(
            tied_head.to(self.device, self.dtype), self.embed_tokens
        ):
            raise ValueError(
                "The config ties lm_head.weight to the embeddings, but the checkpoint holds "
                "another. If the checkpoint is right, set tie_word_embeddings to false."
            )

    def _targets(self) -> Iterator[tuple[str, Tensor]]:
        """(name in transformers, tensor) of each weight."""
        yield "model.embed_tokens.weight", self.embed_tokens
        for layer in self.layers:
            yield from layer.targets()
        yield "model.norm.weight", self.norm
        if not self.config.tie_word_embeddings:
            assert isinstance(self.lm_head, Tensor), "packed"
            yield "lm_head.weight", self.lm_head


class _DecoderLayer:
    def __init__(
        self,
        config: ModelConfig,
        name: str,
        empty: Callable[..., Tensor],
        batch_invariant: bool,
    ) -> None:
        self.config = config
        self.name = name
        self.batch_invariant = batch_invariant
        hidden, intermediate = config.hidden_size, config.intermediate_size
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.input_norm = empty(hidden)
        self.post_attention_norm = empty(hidden)
        self.q_norm = empty(config.head_dim) if config.qk_norm else None
        self.k_norm = empty(config.head_dim) if config.qk_norm else None

        def stacked(module: str, in_features: int, bias: bool, **parts: int) -> _Linear:
            named = {f"{name}.{module}.{part}": size for part, size in parts.items()}
            return _Linear(in_features, named, bias, empty, batch_invariant)

        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        gate_up = {"gate_proj": intermediate, "up_proj": intermediate}
        self.qkv_proj = stacked("self_attn", hidden, config.attention_bias, **qkv)
        self.o_proj = stacked("self_attn", q_size, config.o_bias, o_proj=hidden)
        self.gate_up_proj = stacked("mlp", hidden, config.mlp_bias, **gate_up)
        self.down_proj = stacked("mlp", intermediate, config.mlp_bias, down_proj=hidden)
        self.linears = (self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj)

    def attend(
        self,
        x: Tensor,  # [num_tokens, hidden]
        cos: Tensor,  # [num_tokens, head_dim // 2] float32
        sin: Tensor,  # [num_tokens, head_dim // 2] float32
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        lora: LoraRows | None,
    ) -> Tensor:
        """Self-attention -> [num_tokens, hidden]."""
        config = self.config
        # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        qkv = self.qkv_proj(x, lora).view(len(x), -1, config.head_dim)
        qk_norm = None
        if self.q_norm is not None and self.k_norm is not None:
            qk_norm = (self.q_norm, self.k_norm, config.rms_norm_eps)
        q = kernels.rope_and_cache(qkv, cos, sin, kv_cache, metadata.slot_mapping, qk_norm)
        scale, window = config.head_dim**-0.5, config.sliding_window
        # [num_tokens, num_heads, head_dim]
        out = kernels.attention(
            q, kv_cache, metadata, scale, window, batch_invariant=self.batch_invariant
        )
        return self.o_proj(out.flatten(1), lora)

    def feed_forward(self, x: Tensor, lora: LoraRows | None) -> Tensor:
        """down(silu(gate(x)) * up(x)). [num_tokens, hidden] -> [num_tokens, hidden]."""
        return self.down_proj(kernels.silu_and_mul(self.gate_up_proj(x, lora)), lora)

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        """(name in transformers, tensor) of each weight."""
        yield f"{self.name}.input_layernorm.weight", self.input_norm
        yield f"{self.name}.post_attention_layernorm.weight", self.post_attention_norm
        if self.q_norm is not None and self.k_norm is not None:
            yield f"{self.name}.self_attn.q_norm.weight", self.q_norm
            yield f"{self.name}.self_attn.k_norm.weight", self.k_norm
        for part in self.linears:
            yield from part.targets()

    def pack(self, weight_bits: int, arena: kernels.Arena) -> None:
        for part in self.linears:
            assert isinstance(part.weight, Tensor), "packed before"
            part.weight = kernels.pack_linear(part.weight, weight_bits, arena)

    def weights(self) -> LayerWeights | None:
        """For `kernels.cpu`, after packing; None unless all weights are in its layout."""
        pairs = [
            (part.weight, part.bias)
            for part in self.linears
            if isinstance(part.weight, PackedWeight)
        ]
        if len(pairs) < len(self.linears):
            return None
        return LayerWeights(
            self.input_norm, self.post_attention_norm, self.q_norm, self.k_norm, *pairs
        )


class _Linear:
    """x @ weight.T + bias of one or more of the checkpoint's projections, plus the adapters' part.

    The rows of the projections are stacked.

    Args:
        parts: Name in transformers -> out_features of each projection, in the order of stacking.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        bias: bool,
        empty: Callable[..., Tensor],
        batch_invariant: bool,
    ) -> None:
        self.batch_invariant = batch_invariant
        self.in_features = in_features
        self.parts = parts
        self.adapters: dict[str, PackedLora] = {}
        out_features = sum(parts.values())
        self.weight: Tensor | PackedWeight = empty(out_features, in_features)
        self.bias = empty(out_features) if bias else None

    def __call__(self, x: Tensor, lora: LoraRows | None) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        out = kernels.linear(x, self.weight, self.bias, batch_invariant=self.batch_invariant)
        if lora:
            add_lora(out, x, self.adapters, lora)
        return out

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        """(name in transformers, its rows) of each weight and bias; only before packing."""
        assert isinstance(self.weight, Tensor), "packed"
        sizes = list(self.parts.values())
        for kind, stacked in (("weight", self.weight), ("bias", self.bias)):
            if stacked is not None:
                for name, rows in zip(self.parts, stacked.split(sizes), strict=True):
                    yield f"{name}.{kind}", rows
