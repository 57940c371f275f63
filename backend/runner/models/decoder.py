"""The one decoder on the operations of `kernels`: whatever its config describes.

Knows tokens, positions and the cache's tensors. Does not know sequences, requests or sampling.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tritium import kernels
from tritium.backend.runner.models.config import ModelConfig
from tritium.backend.runner.models.linear import Linear, Slot, Slots
from tritium.backend.runner.models.lora import (
    BaseWeights,
    LoraRows,
    PackedLora,
    read_adapter,
    stack,
)
from tritium.backend.runner.models.mlp import ExpertsMlp, Mlp
from tritium.kernels import (
    AttentionMetadata,
    KVCache,
    PackedLinear,
    PackedWeight,
    StoredWeight,
)
from tritium.kernels.cpu import Decoder, LayerWeights, Shape

_FIRST_POSITIONS = 4096  # until the size of the KV cache is known


class DecoderModel:
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
        weights: Iterable[tuple[str, StoredWeight]],
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
        weight_bits: int = 16,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.batch_invariant = batch_invariant
        like = torch.empty(0, dtype=dtype, device=device)
        self.embed_tokens = like.new_empty(config.vocab_size, config.hidden_size)
        self.layers = [
            _DecoderLayer(config, i, like, batch_invariant) for i in range(config.num_layers)
        ]
        self.norm = like.new_empty(config.hidden_size, dtype=torch.float32)
        self.lm_head: PackedLinear = (
            self.embed_tokens if config.tie_word_embeddings else torch.empty_like(self.embed_tokens)
        )
        self._load(weights)
        arena = kernels.Arena()
        for layer in self.layers:
            layer.pack(weight_bits, arena)
        self.lm_head = kernels.pack_linear(self.lm_head, weight_bits, arena)
        self._decoder = Decoder.of(
            [layer.weights() for layer in self.layers], self.norm, _c_shape(config), dtype
        )
        self.cos = self.sin = torch.empty(0)
        self.set_num_positions(min(config.max_position_embeddings, _FIRST_POSITIONS))

    def set_num_positions(self, num_positions: int) -> None:
        """Prepare for sequences of up to this many tokens."""
        tables = [rope.tables(num_positions, self.device) for rope in self.config.ropes]
        # [num_ropes, num_positions, head_dim // 2]
        self.cos = torch.stack([cos for cos, _ in tables])
        self.sin = torch.stack([sin for _, sin in tables])

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
        # [num_ropes, num_tokens, head_dim // 2]
        cos, sin = self.cos[:, positions], self.sin[:, positions]
        residual = F.embedding(input_ids, self.embed_tokens)  # [num_tokens, hidden]
        if self.config.embedding_multiplier != 1:
            residual *= self.config.embedding_multiplier
        if self._decoder and not lora and self._decoder.supports_cache(kv_caches[0]):
            return self._decoder(residual, cos, sin, kv_caches, metadata)
        x = self._norm(residual, self.layers[0].attention_norm)  # [num_tokens, hidden]
        # Each addition to the residual stream is fused with the norm that reads it next.
        next_norms = [layer.attention_norm for layer in self.layers[1:]] + [self.norm]
        for layer, kv_cache, next_norm in zip(self.layers, kv_caches, next_norms, strict=True):
            x = layer.attend(x, cos[layer.rope], sin[layer.rope], kv_cache, metadata, lora)
            x, residual = self._add(x, residual, layer.attention_out_norm, layer.mlp_norm)
            x = layer.mlp(x, lora)
            x, residual = self._add(x, residual, layer.mlp_out_norm, next_norm)
        return x

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """x normalised; x itself where the model has no norm. [num_tokens, hidden]"""
        return x if weight is None else kernels.rms_norm(x, weight, self.config.rms_norm_eps)

    def _add(
        self, x: Tensor, residual: Tensor, out_norm: Tensor | None, next_norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(next_norm(sum), sum), sum = residual + out_norm(x) * residual_multiplier.

        [num_tokens, hidden] each; the sum may overwrite `residual`.
        """
        x = self._norm(x, out_norm)
        if self.config.residual_multiplier != 1:
            x = x * self.config.residual_multiplier
        if next_norm is None:
            residual = residual + x
            return residual, residual
        return kernels.add_rms_norm(x, residual, next_norm, self.config.rms_norm_eps)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] from `forward` -> [n, vocab_size] float32."""
        logits = kernels.linear(
            hidden, self.lm_head, dtype=torch.float32, batch_invariant=self.batch_invariant
        )
        if self.config.logits_divisor != 1:
            logits /= self.config.logits_divisor
        if cap := self.config.logit_soft_cap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def is_batch_invariant(self, kv_cache: KVCache) -> bool:
        """Whether, without adapters, a token's logits depend only on its sequence, to the bit.

        Args:
            kv_cache: A cache like those that the layers will use.
        """
        if self.device.type == "cuda":
            return self.batch_invariant
        runs_in_c = self._decoder is not None and self._decoder.supports_cache(kv_cache)
        return runs_in_c and isinstance(self.lm_head, PackedWeight)

    def load_adapter(self, name: str, directory: Path, base: BaseWeights) -> None:
        """Load a LoRA adapter as PEFT stores it. `forward`'s argument says which tokens it changes.

        Args:
            base: Makes the weights that this model was made from, by their stored names.

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

        def named() -> Iterator[tuple[str, StoredWeight]]:
            return ((self._name(stored_name), weight) for stored_name, weight in base())

        adapter = read_adapter(directory, shapes, named)
        for part in linears:
            if (weights := stack(part.parts, adapter)) is not None:
                weights = weights._replace(b=part.in_order(weights.b))
                a, b = (
                    kernels.pack_linear(weight.to(self.device, self.dtype)) for weight in weights
                )
                part.adapters[name] = PackedLora(a, b)

    def _load(self, weights: Iterable[tuple[str, StoredWeight]]) -> None:
        """Put each weight into its slot, which converts the dtype and moves it to the device."""
        slots = dict(self._slots())
        tied_head = None
        for stored_name, weight in weights:
            name = self._name(stored_name)
            if name.endswith("rotary_emb.inv_freq"):  # in old checkpoints; the config has it, too
                continue
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                tied_head = kernels.as_tensor(weight)
                continue
            if name not in slots and name.endswith(".bias") and not kernels.as_tensor(weight).any():
                continue  # of software that stores a bias with each weight
            if name not in slots:
                raise ValueError(f"The checkpoint holds {name}, which the model has no place for.")
            slot = slots.pop(name)
            if weight.shape != slot.shape:
                raise ValueError(
                    f"{name} is {list(weight.shape)} in the checkpoint, "
                    f"but {list(slot.shape)} by the config."
                )
            if name.endswith("norm.weight") and self.config.norm_offset:
                slot.fill(kernels.as_tensor(weight).float() + self.config.norm_offset)
            else:
                slot.fill(weight)
        if slots:
            first = ", ".join(list(slots)[:5])
            raise ValueError(f"The checkpoint lacks {len(slots)} weights, among them {first}.")
        if tied_head is not None and not torch.equal(
            tied_head.to(self.device, self.dtype), self.embed_tokens
        ):
            raise ValueError(
                "The config ties lm_head.weight to the embeddings, but the checkpoint holds "
                "another. If the checkpoint is right, set tie_word_embeddings to false."
            )

    def _name(self, stored: str) -> str:
        """A weight's name in a checkpoint of text alone."""
        for beginning, here in self.config.names.renamed:
            if stored.startswith(beginning):
                return here + stored.removeprefix(beginning)
        return stored

    def _slots(self) -> Slots:
        yield "model.embed_tokens.weight", Slot.of(self.embed_tokens)
        for layer in self.layers:
            yield from layer.slots()
        yield "model.norm.weight", Slot.of(self.norm)
        if not self.config.tie_word_embeddings:
            assert isinstance(self.lm_head, Tensor), "packed"
            yield "lm_head.weight", Slot.of(self.lm_head)


class _DecoderLayer:
    def __init__(
        self,
        config: ModelConfig,
        index: int,
        like: Tensor,
        batch_invariant: bool,
    ) -> None:
        self.config = config
        self.name = f"model.layers.{index}"
        self.rope = config.layer_ropes[index]
        self.window = config.windows[index]
        self.batch_invariant = batch_invariant
        hidden = config.hidden_size
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        names, experts = config.names, config.experts
        self.norms: dict[str, Tensor] = {}  # by name in transformers

        def norm(name: str | None, size: int = hidden) -> Tensor | None:
            if name is None:
                return None
            self.norms[f"{self.name}.{name}"] = weight = like.new_empty(size, dtype=torch.float32)
            return weight

        self.attention_norm = norm(names.attention_norm)
        self.attention_out_norm = norm(names.attention_out_norm)
        self.mlp_norm = norm(names.mlp_norm)
        self.mlp_out_norm = norm(names.mlp_out_norm)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            per_head = config.qk_norm == "head"
            self.q_norm = norm("self_attn.q_norm", config.head_dim if per_head else q_size)
            self.k_norm = norm("self_attn.k_norm", config.head_dim if per_head else kv_size)

        sizes = (q_size, kv_size, kv_size) if len(names.qkv) == 3 else (q_size + 2 * kv_size,)
        attention = f"{self.name}.self_attn"
        qkv = {f"{attention}.{part}": size for part, size in zip(names.qkv, sizes, strict=True)}
        o, order = {f"{attention}.o_proj": hidden}, _order_of_pairs(config)
        self.qkv_proj = Linear(hidden, qkv, config.attention_bias, like, batch_invariant, order)
        self.o_proj = Linear(q_size, o, config.o_bias, like, batch_invariant)
        self.mlp: Mlp | ExpertsMlp
        if experts and experts.layers[index]:
            self.mlp = ExpertsMlp(config, experts, self.name, like, batch_invariant)
        else:
            size, name = config.intermediate_size, f"{self.name}.mlp"
            self.mlp = Mlp(config, name, size, like, batch_invariant)
        self.linears = (self.qkv_proj, self.o_proj, *self.mlp.linears)

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
        # [num_tokens, num_heads, head_dim]
        out = kernels.attention(
            q,
            kv_cache,
            metadata,
            config.attention_scale,
            self.window,
            config.attention_soft_cap,
            batch_invariant=self.batch_invariant,
        )
        return self.o_proj(out.flatten(1), lora)

    def slots(self) -> Slots:
        for name, weight in self.norms.items():
            yield f"{name}.weight", Slot.of(weight)
        yield from self.qkv_proj.slots()
        yield from self.o_proj.slots()
        yield from self.mlp.slots()

    def pack(self, weight_bits: int, arena: kernels.Arena) -> None:
        self.qkv_proj.pack(weight_bits, arena)
        self.o_proj.pack(weight_bits, arena)
        self.mlp.pack(weight_bits, arena)

    def weights(self) -> LayerWeights | None:
        """For `kernels.cpu`, after packing; None unless it knows all weights and their layout."""
        pairs = [
            (part.weight, part.bias)
            for part in self.linears
            if isinstance(part.weight, PackedWeight)
        ]
        if len(pairs) < len(self.linears) or isinstance(self.mlp, ExpertsMlp):
            return None
        qkv, o, gate_up, down = pairs
        return LayerWeights(
            self.attention_norm,
            self.attention_out_norm,
            self.mlp_norm,
            self.mlp_out_norm,
            self.q_norm,
            self.k_norm,
            qkv,
            o,
            gate_up,
            down,
            self.window,
            self.rope,
        )


def _order_of_pairs(config: ModelConfig) -> Tensor | None:
    """The stacked rows of queries, keys and values, in the order in which `Rope` pairs them.

    [out_features] int64; None if the checkpoint has that order. Queries and keys are permuted
    alike within each head, which changes no score. A checkpoint that rotates only the first
    numbers of a head pairs them among themselves::

        a b a' b' c d    ->  a b c a' b' d     the pairs are (a, a') and (b, b'); c, d stay
        a a' b b'        ->  a b a' b'         interleaved
    """
    half = config.head_dim // 2
    rotated = max(half - rope.inv_freq.count(0.0) for rope in config.ropes)
    within = torch.arange(config.head_dim)
    if config.is_rope_interleaved:
        within = within.view(half, 2).t().flatten()
    elif rotated < half:
        rest = within[2 * rotated :].chunk(2)
        pairs = within[: 2 * rotated].chunk(2)
        within = torch.cat((pairs[0], rest[0], pairs[1], rest[1]))
    else:
        return None
    heads = torch.arange(config.num_heads + config.num_kv_heads)[:, None] * config.head_dim
    permuted = (heads + within).flatten()
    values = torch.arange(config.num_kv_heads * config.head_dim) + len(permuted)
    return torch.cat((permuted, values))


def _c_shape(config: ModelConfig) -> Shape:
    return Shape(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.rms_norm_eps,
        config.attention_scale,
        config.attention_soft_cap or 0.0,
        config.residual_multiplier,
        config.activation,
        config.is_gated,
    )
