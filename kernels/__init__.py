"""The operations of a model, one public function per operation.

Each function runs the Triton-lang kernel for tensors on CUDA (`kernels/cuda`), the C function on a
CPU with AVX2 or AMX if it supports the tensors (`kernels/cpu`), and the PyTorch twin elsewhere
(`reference.py`). So no model code knows which one runs. Nothing here imports from `backend/`.
"""

from operator import itemgetter

import torch
from torch import Tensor

from tritium.kernels import cpu, reference
from tritium.kernels.cpu import Arena, PackedWeight
from tritium.kernels.metadata import AttentionMetadata, KVCache
from tritium.kernels.quantized_weight import QuantizedWeight, StoredWeight, as_tensor
from tritium.kernels.sampling_tensors import SamplingTensors

__all__ = [
    "Arena",
    "AttentionMetadata",
    "KVCache",
    "PackedExperts",
    "PackedLinear",
    "PackedWeight",
    "QuantizedWeight",
    "SamplingTensors",
    "StoredWeight",
    "activate",
    "add_bias",
    "add_rms_norm",
    "apply_mask",
    "apply_penalties",
    "as_tensor",
    "attention",
    "bind_threads",
    "experts",
    "linear",
    "pack_experts",
    "pack_linear",
    "rms_norm",
    "rope_and_cache",
    "sample",
]

bind_threads = cpu.bind_threads

# What `linear` reads: with a `QuantizedWeight`, only on CUDA.
PackedLinear = StoredWeight | PackedWeight
# The weights of all experts: together on CUDA, elsewhere each in the layout of `linear`.
PackedExperts = StoredWeight | list[PackedLinear]


def pack_linear(weight: StoredWeight, bits: int = 16, arena: Arena | None = None) -> PackedLinear:
    """A weight [out_features, in_features] in the layout that only `linear` reads.

    A quantised weight of `bits` or fewer stays as it is stored where there is code for its form.

    Args:
        bits: 8 or 4 round the weight to that many bits. Only for bfloat16 on a CPU with AVX2.
        arena: Shared with the model's other weights.

    Raises:
        ValueError: this weight can't be rounded to 8 or 4 bits on this machine.
    """
    if isinstance(weight, QuantizedWeight):
        if _stays_on_cuda(weight, bits):
            return weight
        if weight.bits <= bits and cpu.supports_quantized(weight):
            return cpu.pack_quantized(weight, arena)
        weight = weight.dequantize()
    if cpu.supports_packing(weight):
        return cpu.pack(weight, bits, arena)
    if bits < 16:
        raise ValueError(
            f"weights in {bits} bits need bfloat16, a CPU with AVX2, a C compiler, and rows of a "
            f"multiple of 32, not {list(weight.shape)} in {weight.dtype} on {weight.device}"
        )
    return reference.pack_linear(weight)


def linear(
    x: Tensor,  # [num_tokens, in_features]
    weight: PackedLinear,  # [out_features, in_features]; see `pack_linear`
    bias: Tensor | None = None,  # [out_features]
    dtype: torch.dtype | None = None,  # of the result; None: the dtype of `x`
    batch_invariant: bool = False,
) -> Tensor:
    """x @ weight.T + bias. [num_tokens, out_features]

    Args:
        batch_invariant: On CUDA, whether a row's result must not depend on the number of rows.
    """
    if isinstance(weight, PackedWeight):
        return cpu.linear(x, weight, bias, dtype or x.dtype)
    if isinstance(weight, QuantizedWeight) or (x.is_cuda and batch_invariant):
        from tritium.kernels.cuda.matmul import matmul

        return matmul(x, weight, bias, dtype)
    return reference.linear(x, weight, bias).to(dtype or x.dtype)


def pack_experts(weight: StoredWeight, bits: int = 16, arena: Arena | None = None) -> PackedExperts:
    """Weights [num_experts, out_features, in_features] in the layout that only `experts` reads.

    Args and errors: as those of `pack_linear`.
    """
    if isinstance(weight, QuantizedWeight):
        if _stays_on_cuda(weight, bits):
            return weight
        experts = [weight.map(itemgetter(i)) for i in range(weight.shape[0])]
        if not weight.values.is_cuda:
            return [pack_linear(expert, bits, arena) for expert in experts]
        weight = torch.stack([one.dequantize() for one in experts])
    if weight.is_cuda and bits == 16:
        return weight
    return [pack_linear(expert, bits, arena) for expert in weight]


def _stays_on_cuda(weight: QuantizedWeight, bits: int) -> bool:
    """Whether a weight is on CUDA, and computed there as it is stored."""
    if not weight.values.is_cuda or weight.bits > bits:
        return False
    from tritium.kernels.cuda.weights import supports

    return supports(weight)


def experts(
    x: Tensor,  # [num_tokens, hidden]
    expert_ids: Tensor,  # [num_tokens, k] int64: the experts of each token
    weights: Tensor,  # [num_tokens, k] float32: their parts in its result
    gate_up: PackedExperts,  # [num_experts, 2 * size, hidden], the gate first
    down: PackedExperts,  # [num_experts, hidden, size]
    activation: str,
    batch_invariant: bool = False,
) -> Tensor:
    """Each token's sum of weight * down(activation(gate(x)) * up(x)) over its experts.

    A mixture of experts (Shazeer et al., 2017). [num_tokens, hidden]

    Args:
        batch_invariant: On CUDA, whether a token's result must not depend on the number of tokens.
    """
    if not isinstance(gate_up, list):
        from tritium.kernels.cuda.experts import experts as on_cuda

        assert not isinstance(down, list)
        return on_cuda(x, expert_ids, weights, gate_up, down, activation, batch_invariant)
    assert isinstance(down, list)
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert, tokens, weight in reference.tokens_of_experts(expert_ids, weights):
        hidden = activate(linear(x[tokens], gate_up[expert]), activation)
        # In the order of the experts, so that a token's sum does not depend on other tokens.
        out.index_add_(0, tokens, linear(hidden, down[expert], dtype=torch.float32) * weight)
    return out.to(x.dtype)


def rms_norm(
    x: Tensor,  # [n, size]
    weight: Tensor,  # [size] float32
    eps: float,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of each row (Zhang & Sennrich, 2019). [n, size]"""
    if x.is_cuda:
        from tritium.kernels.cuda.norm import rms_norm as on_cuda

        return on_cuda(x, weight, eps)
    if cpu.supports_rows(x):
        return cpu.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(
    x: Tensor,  # [n, size]
    residual: Tensor,  # [n, size]
    weight: Tensor,  # [size] float32
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(residual + x), residual + x); the sum overwrites `residual`."""
    if x.is_cuda:
        from tritium.kernels.cuda.norm import rms_norm as on_cuda

        return on_cuda(x, weight, eps, residual), residual
    if cpu.supports_rows(x):
        return cpu.rms_norm(x, weight, eps, residual), residual
    return reference.add_rms_norm(x, residual, weight, eps)


def activate(
    x: Tensor,  # [n, 2 * size], the gate first; [n, size] if not gated
    activation: str,
    is_gated: bool = True,
) -> Tensor:
    """activation(gate) * up (Shazeer, 2020), or activation(x). [n, size]

    Args:
        activation: silu: x * sigmoid(x); gelu_tanh: the approximation of GELU by tanh (Hendrycks &
            Gimpel, 2016); relu2: max(x, 0)^2 (So et al., 2021).
    """
    if x.is_cuda:
        from tritium.kernels.cuda.activation import activate as on_cuda

        return on_cuda(x, activation, is_gated)
    if cpu.supports_rows(x):
        return cpu.activate(x, activation, is_gated)
    return reference.activate(x, activation, is_gated)


def attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Causal attention of every query token over its sequence's cached keys and values.

    The step's own keys and values must already be in `kv_cache` (see `rope_and_cache`).

    Args:
        scale: Factor on the scores.
        sliding_window: A token sees this many keys, up to its own; None: all.
        soft_cap: Bounds the scaled scores smoothly: s -> soft_cap * tanh(s / soft_cap)
            (Gemma 2, 2024).
        batch_invariant: On CUDA, whether a token's result must depend only on its sequence.

    Returns:
        [num_tokens, num_heads, head_dim], the dtype of `q`.
    """
    if cpu.supports_attention(q, kv_cache):
        return cpu.attention(q, kv_cache, metadata, scale, sliding_window, soft_cap)
    if not q.is_cuda:
        return reference.attention(q, kv_cache, metadata, scale, sliding_window, soft_cap)
    if metadata.max_query_len == 1 and not batch_invariant:
        from tritium.kernels.cuda.decode_attention import decode_attention

        return decode_attention(q, kv_cache, metadata, scale, sliding_window, soft_cap)
    from tritium.kernels.cuda.paged_attention import paged_attention

    return paged_attention(q, kv_cache, metadata, scale, sliding_window, soft_cap, batch_invariant)


def rope_and_cache(
    qkv: Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    cos: Tensor,  # [num_tokens, head_dim // 2] float32
    sin: Tensor,  # [num_tokens, head_dim // 2] float32
    kv_cache: KVCache,
    slot_mapping: Tensor,  # [num_tokens] int64
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Rotate queries and keys by their positions and write keys and values to their slots.

    `qkv` may be overwritten. A token whose slot is -1 is padding and is not written.

    Args:
        qk_norm: An RMS norm of queries and keys before the rotation: (weight of queries, weight of
            keys, epsilon), float32. Weights [head_dim] normalise each head (Qwen3, 2025); weights
            [num_heads * head_dim] and [num_kv_heads * head_dim] all heads as one (OLMo 2, 2024).

    Returns:
        The rotated queries, [num_tokens, num_heads, head_dim], the dtype of `qkv`.
    """
    if qkv.is_cuda:
        from tritium.kernels.cuda.rope_cache import rope_and_cache as on_cuda

        return on_cuda(qkv, cos, sin, kv_cache, slot_mapping, qk_norm)
    if cpu.supports_cache(qkv, kv_cache):
        return cpu.rope_and_cache(qkv, cos, sin, kv_cache, slot_mapping, qk_norm)
    return reference.rope_and_cache(qkv, cos, sin, kv_cache, slot_mapping, qk_norm)


def add_bias(
    logits: Tensor,  # [num_rows, vocab_size] float32, changed in place
    token_ids: Tensor,  # [total] int32
    values: Tensor,  # [total] float32
    starts: Tensor,  # [num_rows + 1] int32: row i has the elements [starts[i], starts[i + 1])
) -> None:
    """Add values to logits. A row lists a token twice only if its value is -inf both times."""
    if logits.is_cuda:
        from tritium.kernels.cuda.add_bias import add_bias as on_cuda

        return on_cuda(logits, token_ids, values, starts)
    return reference.add_bias(logits, token_ids, values, starts)


def apply_penalties(
    logits: Tensor,  # [num_rows, vocab_size] float32, changed in place
    token_ids: Tensor,  # [total] int32: each distinct token of a row's text so far
    counts: Tensor,  # [total] int32: its occurrences in the output; 0: only in the prompt
    starts: Tensor,  # [num_rows + 1] int32: row i has the elements [starts[i], starts[i + 1])
    repetition: Tensor,  # [num_rows] float32, 1: none
    presence: Tensor,  # [num_rows] float32, 0: none
    frequency: Tensor,  # [num_rows] float32, 0: none
) -> None:
    """Make the tokens of the text so far less likely (or more likely), as vLLM does.

    First, for all of these tokens, `repetition` divides a positive logit and multiplies any other.
    Then `frequency * count` is subtracted, and `presence` if the token is in the output.
    """
    if logits.is_cuda:
        from tritium.kernels.cuda.apply_penalties import apply_penalties as on_cuda

        return on_cuda(logits, token_ids, counts, starts, repetition, presence, frequency)
    return reference.apply_penalties(
        logits, token_ids, counts, starts, repetition, presence, frequency
    )


def apply_mask(
    logits: Tensor,  # [num_rows, vocab_size] float32, changed in place
    mask: Tensor,  # [num_rows, ceil(vocab_size / 32)] int32
) -> None:
    """Forbid, with -inf, each token whose bit (token % 32 of word token // 32) is 0."""
    if logits.is_cuda:
        from tritium.kernels.cuda.apply_mask import apply_mask as on_cuda

        return on_cuda(logits, mask)
    return reference.apply_mask(logits, mask)


def sample(
    logits: Tensor,  # [num_rows, vocab_size] float32
    sampling: SamplingTensors | None,  # None: the most likely token in every row
) -> Tensor:
    """Choose a token for each row, without waiting for the device. [num_rows] int64

    The token is drawn from softmax(logits / temperature) over the tokens that min-p, top-k and
    top-p keep, with top-p applied to what the other two keep. Equal logits are kept together.
    """
    if logits.is_cuda:
        from tritium.kernels.cuda.sampling import sample as on_cuda

        return on_cuda(logits, sampling)
    if cpu.supports_sampling(logits):
        return cpu.sample(logits, sampling)
    return reference.sample(logits, sampling)
