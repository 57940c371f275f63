"""The plain PyTorch twin of each kernel: what the CPU runs, and the oracle of kernel tests."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.metadata import AttentionMetadata, DecodeGroup


def pack_linear(weight: Tensor) -> Tensor:
    """Lay out a weight [out_features, in_features] the way `linear` reads it fastest.

    On CPU: oneDNN's blocked layout for bfloat16, column-major for float32. The result is
    only meant for `linear`.
    """
    if weight.device.type != "cpu":
        return weight
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.ops.mkldnn._reorder_linear_weight(weight)
    return weight.t().contiguous().t()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [num_tokens, in_features] @ weight.T + bias -> [num_tokens, out_features]."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich, 2019)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual + x, and its rms_norm. Returns (normed, residual); `residual` is overwritten."""
    residual += x
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (SwiGLU; Shazeer, 2020). [n, 2 * size] (gate first) -> [n, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_and_cache(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """See `kernels.rope_and_cache`. Rotates halves, as Llama does (Su et al., 2021)."""
    num_kv_heads, head_dim = kv_cache.shape[-2:]
    num_rotated = qkv.shape[1] - num_kv_heads
    rotated, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
    x1, x2 = rotated.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(qkv.dtype)
    q, k = rotated[:, :-num_kv_heads], rotated[:, -num_kv_heads:]

    written = slot_mapping >= 0
    if not written.all():
        slot_mapping, k, v = slot_mapping[written], k[written], v[written]
    keys, values = kv_cache.view(2, -1, num_kv_heads, head_dim)
    keys.index_copy_(0, slot_mapping, k)
    values.index_copy_(0, slot_mapping, v)
    return q


def attention(
    q: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """See `kernels.attention`. Decoding sequences in groups, then each prefill by itself."""
    out = torch.empty_like(q)
    for group in metadata.decode_groups:
        out[group.rows] = _decode(q[group.rows], kv_cache, group, scale, sliding_window)
    num_kv_heads, head_dim = kv_cache.shape[-2:]
    for start, query_len, seq_len, block_ids in metadata.prefills:
        k, v = (
            c.index_select(0, block_ids).view(-1, num_kv_heads, head_dim)[:seq_len].transpose(0, 1)
            for c in kv_cache
        )
        rows = q[start : start + query_len].transpose(0, 1)
        if query_len == seq_len and not sliding_window:
            mask = None
        else:
            mask = _causal_mask(query_len, seq_len, sliding_window, q.device)
        attended = F.scaled_dot_product_attention(
            rows[None], k[None], v[None], mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        out[start : start + query_len] = attended[0].transpose(0, 1)
    return out


def _decode(
    q: Tensor,  # [num_rows, num_heads, head_dim]
    kv_cache: Tensor,
    group: DecodeGroup,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """One query token a sequence. [num_rows, num_heads, head_dim]

    The query heads that share a KV head stand as the rows of one attention problem.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[-2]
    k, v = (
        c.index_select(0, group.block_ids)
        .view(num_rows, -1, num_kv_heads, head_dim)
        .transpose(1, 2)
        for c in kv_cache
    )  # [num_rows, num_kv_heads, width, head_dim]
    bias = group.bias
    if sliding_window:
        positions = torch.arange(bias.shape[-1], device=q.device)
        seq_lens = (bias == 0).sum(dim=-1, keepdim=True)  # [num_rows, 1, 1, 1]
        bias = bias.masked_fill(positions < seq_lens - sliding_window, float("-inf"))
    grouped = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return F.scaled_dot_product_attention(grouped, k, v, bias, scale=scale).reshape(q.shape)


def _causal_mask(
    query_len: int, seq_len: int, sliding_window: int | None, device: torch.device
) -> Tensor:
    """[query_len, seq_len] bool: which keys each query token sees."""
    query_pos = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    key_pos = torch.arange(seq_len, device=device)
    seen = key_pos <= query_pos
    if sliding_window:
        seen &= key_pos > query_pos - sliding_window
    return seen
