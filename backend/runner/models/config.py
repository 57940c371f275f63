"""The shape of a model, as plain data: what the one decoder (`decoder.py`) reads.

`architectures.py` makes it from a checkpoint's config.
"""

from dataclasses import dataclass, field
from typing import Literal

from tritium.backend.runner.models.quantized import Quantization
from tritium.backend.runner.models.rope import Rope


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Where a layer's weights lie in a checkpoint. None: the model has no such norm."""

    attention_norm: str | None = "input_layernorm"  # of what the attention reads
    attention_out_norm: str | None = None  # of what it adds to the residual stream
    mlp_norm: str | None = "post_attention_layernorm"  # of what the feed-forward block reads
    mlp_out_norm: str | None = None  # of what it adds to the residual stream
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # one name, if they are stored as one
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    renamed: tuple[tuple[str, str], ...] = ()  # (beginning in the checkpoint, here)
    ignored: tuple[str, ...] = ()  # beginnings of what text does not need


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of a layer's feed-forward block."""

    num_experts: int
    num_per_token: int
    intermediate_size: int  # of each expert
    is_normalised: bool  # whether the weights of a token's experts sum to 1
    layers: tuple[bool, ...]  # which layers have experts
    shared_size: int = 0  # intermediate size of an expert for all tokens, behind a gate; 0: none
    module: str = "mlp"  # where they lie in a layer of the checkpoint
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: RMSNorm, rotary positions, grouped-query attention, a feed-forward block.

    A layer computes, with norms that may be absent::

        x += attention_out_norm(attention(attention_norm(x))) * residual_multiplier
        x += mlp_out_norm(mlp(mlp_norm(x))) * residual_multiplier
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int  # including what scaling adds
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    ropes: tuple[Rope, ...] = field(repr=False)
    layer_ropes: tuple[int, ...] = field(repr=False)  # each layer's rope
    windows: tuple[int | None, ...] = field(repr=False)  # each layer's keys, its own included
    attention_scale: float  # of the scores
    attention_soft_cap: float | None = None  # bounds the scores; see `kernels.attention`
    logit_soft_cap: float | None = None  # bounds the logits: cap * tanh(logits / cap)
    attention_bias: bool = False  # of the query, key and value projections
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "projection"] | None = None  # what one RMSNorm of q or k spans
    norm_offset: float = 0.0  # added to the weights of norms
    activation: str = "silu"  # see `kernels.activate`
    is_gated: bool = True  # mlp: down(act(gate) * up), otherwise down(act(up))
    experts: ExpertsConfig | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    is_rope_interleaved: bool = False  # the checkpoint pairs a head's numbers 2i and 2i + 1
    names: WeightNames = field(default=WeightNames(), repr=False)
    quantization: Quantization | None = None  # of the checkpoint
