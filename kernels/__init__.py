"""The operations a model is made of, one public function each.

Each picks the Triton-lang kernel for tensors on CUDA, the C function (`cpu.py`), if there is one,
on a CPU with AVX2 or AMX, and its plain PyTorch twin (`reference.py`) elsewhere, so that no model
code knows which runs. Nothing here imports from `backend/`.
"""

import torch
from torch import Tensor

from tritium.kernels import cpu, reference
from tritium.kernels.cpu import Arena, PackedWeight
from tritium.kernels.metadata import AttentionMetadata, KVCache
from tritium.kernels.sampling_tensors import SamplingTensors

__all__ = [
    "Arena",
    "AttentionMetadata",
    "KVCache",
    "PackedWeight",
    "SamplingTensors",
    "add_bias",
    "add_rms_norm",
    "apply_mask",
    "apply_penalties",
    "attention",
    "bind_threads",
    "linear",
    "pack_linear",
    "rms_norm",
    "rope_and_cache",
    "sample",
    "silu_and_mul",
]

bind_threads = cpu.bind_threads


def pack_linear(
    weight: Tensor, bits: int = 16, arena: Arena | None = None
) -> Tensor | PackedWeight:
    """A weight [out_features, in_features] as `linear`, which alone can read it, wants it.

    Args:
        bits: 8 or 4: rounded to so many. Only bfloat16, on a CPU with AVX2.
        arena: Of the model's other weights.

    Raises:
        ValueError: it can't be had in so few bits here.
    """
    if cpu.packs(weight):
        return cpu.pack(weight, bits, arena)
    if bits < 16:
        raise ValueError(
            f"weights in {bits} bits need bfloat16, a CPU with AVX2, a C compiler, and sizes that "
            f"are multiples of 32, not {list(weight.shape)} in {weight.dtype} on {weight.device}"
        )
    return reference.pack_linear(weight)


def linear(
    x: Tensor,  # [num_tokens, in_features]
    weight: Tensor | PackedWeight,  # [out_features, in_features], or what `pack_linear` made of it
    bias: Tensor | None = None,  # [out_features]
    dtype: torch.dtype | None = None,  # of the result; None: as `x`
    batch_invariant: bool = False,
) -> Tensor:
    """x @ weight.T + bias. [num_tokens, out_features]

    Args:
        batch_invariant: On CUDA, whether a row's result may not depend on how many rows there are.
    """
    if isinstance(weight, PackedWeight):
        return cpu.linear(x, weight, bias, dtype or x.dtype)
    if x.is_cuda and batch_invariant:
        from tritium.kernels.cuda.matmul import matmul

        return matmul(x, weight, bias, dtype)
    return reference.linear(x, weight, bias).to(dtype or x.dtype)


def rms_norm(
    x: Tensor,  # [n, size]
    weight: Tensor,  # [size]
    eps: float,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of each row (Zhang & Sennrich, 2019). [n, size]"""
    if x.is_cuda:
        from tritium.kernels.cuda.norm import rms_norm as on_cuda

        return on_cuda(x, weight, eps)
    if cpu.takes(x):
        return cpu.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(
    x: Tensor,  # [n, size]
    residual: Tensor,  # [n, size]
    weight: Tensor,  # [size]
    eps: float,
) -> tuple[Tensor, Tensor]:
    """residual + x, and its rms_norm. Returns (normed, residual); `residual` is overwritten."""
    if x.is_cuda:
        from tritium.kernels.cuda.norm import add_rms_norm as on_cuda

        return on_cuda(x, residual, weight, eps)
    if cpu.takes(x):
        return cpu.rms_norm(x, weight, eps, residual), residual
    return reference.add_rms_norm(x, residual, weight, eps)


def silu_and_mul(
    gate_up: Tensor,  # [n, 2 * size], the gate first
) -> Tensor:
    """silu(gate) * up (SwiGLU; Shazeer, 2020). [n, size]"""
    if gate_up.is_cuda:
        from tritium.kernels.cuda.activation import silu_and_mul as on_cuda

        return on_cuda(gate_up)
    if cpu.takes(gate_up):
        return cpu.silu_and_mul(gate_up)
    return reference.silu_and_mul(gate_up)


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
        scale: Of the scores.
        sliding_window: How many keys up to its own a token sees; None: all.
        soft_cap: Bounds the scaled scores smoothly: s -> soft_cap * tanh(s / soft_cap)
            (Gemma 2, 2024).
        batch_invariant: On CUDA, whether a token's result may depend on nothing but its sequence.

    Returns:
        [num_tokens, num_heads, head_dim], the dtype of `q`.
    """
    if cpu.attends(q, kv_cache, soft_cap):
        return cpu.attention(q, kv_cache, metadata, scale, sliding_window)
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
        qk_norm: The weights [head_dim] and the epsilon of an RMS norm of each query and key
            before the rotation (Qwen3, 2025): (of queries, of keys, epsilon).

    Returns:
        The rotated queries, [num_tokens, num_heads, head_dim], the dtype of `qkv`.
    """
    if qkv.is_cuda:
        from tritium.kernels.cuda.rope_cache import rope_and_cache as on_cuda

        return on_cuda(qkv, cos, sin, kv_cache, slot_mapping, qk_norm)
    if cpu.caches(qkv, kv_cache):
        return cpu.rope_and_cache(qkv, cos, sin, kv_cache, slot_mapping, qk_norm)
    return reference.rope_and_cache(qkv, cos, sin, kv_cache, slot_mapping, qk_norm)


def add_bias(
    logits: Tensor,  # [num_rows, vocab_size] float32, changed in place
    token_ids: Tensor,  # [total] int32
    values: Tensor,  # [total] float32
    starts: Tensor,  # [num_rows + 1] int32: row i's are elements [starts[i], starts[i + 1])
) -> None:
    """Add a value to the logit of each of a row's tokens, which differ or all get -inf."""
    if logits.is_cuda:
        from tritium.kernels.cuda.sampling import add_bias as on_cuda

        return on_cuda(logits, token_ids, values, starts)
    return reference.add_bias(logits, token_ids, values, starts)


def apply_penalties(
    logits: Tensor,  # [num_rows, vocab_size] float32, changed in place
    token_ids: Tensor,  # [total] int32: each of a row's tokens so far once
    counts: Tensor,  # [total] int32: how often it is in the output; 0: only in the prompt
    starts: Tensor,  # [num_rows + 1] int32: row i's are elements [starts[i], starts[i + 1])
    repetition: Tensor,  # [num_rows] float32, 1: none
    presence: Tensor,  # [num_rows] float32, 0: none
    frequency: Tensor,  # [num_rows] float32, 0: none
) -> None:
    """Make tokens that were there less likely (or more), as vLLM does.

    Repetition divides a positive logit and multiplies another, for all of the tokens; then
    `frequency * count` and, for those in the output, `presence` are taken off.
    """
    if logits.is_cuda:
        from tritium.kernels.cuda.sampling import apply_penalties as on_cuda

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
        from tritium.kernels.cuda.sampling import apply_mask as on_cuda

        return on_cuda(logits, mask)
    return reference.apply_mask(logits, mask)


def sample(
    logits: Tensor,  # [num_rows, vocab_size] float32
    sampling: SamplingTensors | None,  # None: the most likely token in every row
) -> Tensor:
    """Choose a token for each row, without waiting for the device. [num_rows] int64

    It is drawn from softmax(logits / temperature) over the tokens that min-p, top-k and top-p
    (of what the other two left) leave. Tokens whose logits are equal are left together.
    """
    if logits.is_cuda:
        from tritium.kernels.cuda.sampling import sample as on_cuda

        return on_cuda(logits, sampling)
    if cpu.samples(logits):
        return cpu.sample(logits, sampling)
    return reference.sample(logits, sampling)
