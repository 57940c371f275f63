"""The operations a model is made of, one public function each.

Each picks the Triton-lang kernel for tensors on CUDA and its plain PyTorch twin (`reference.py`)
elsewhere, so that no model code knows which runs. Nothing here imports from `backend/`.
"""

from torch import Tensor

from kernels import reference
from kernels.metadata import AttentionMetadata

__all__ = [
    "AttentionMetadata",
    "add_rms_norm",
    "attention",
    "linear",
    "pack_linear",
    "rms_norm",
    "rope_and_cache",
    "silu_and_mul",
]

# Operations without a Triton-lang kernel of their own run the twin on every device.
add_rms_norm = reference.add_rms_norm
linear = reference.linear
pack_linear = reference.pack_linear
rms_norm = reference.rms_norm
silu_and_mul = reference.silu_and_mul


def attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim]
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of every query token over its sequence's cached keys and values.

    The step's own keys and values must already be in `kv_cache` (see `rope_and_cache`).

    Returns:
        [num_tokens, num_heads, head_dim], the dtype of `q`.
    """
    if q.is_cuda:
        from kernels.paged_attention import paged_attention

        return paged_attention(q, kv_cache, metadata, scale, sliding_window)
    return reference.attention(q, kv_cache, metadata, scale, sliding_window)


def rope_and_cache(
    qkv: Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    cos: Tensor,  # [num_tokens, head_dim // 2] float32
    sin: Tensor,  # [num_tokens, head_dim // 2] float32
    kv_cache: Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim]
    slot_mapping: Tensor,  # [num_tokens] int64
) -> Tensor:
    """Rotate queries and keys by their positions and write keys and values to their slots.

    `qkv` may be overwritten. A token whose slot is -1 is padding and is not written.

    Returns:
        The rotated queries, [num_tokens, num_heads, head_dim], the dtype of `qkv`.
    """
    if qkv.is_cuda:
        from kernels.rope_cache import rope_and_cache as on_cuda

        return on_cuda(qkv, cos, sin, kv_cache, slot_mapping)
    return reference.rope_and_cache(qkv, cos, sin, kv_cache, slot_mapping)
