"""The plain PyTorch twin of each kernel.

It runs on a CPU where the C functions of `kernels/cpu` do not support the tensors, and kernel tests
compare with it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tritium.kernels.metadata import (
    QUANTISED_MAX,
    SMALLEST_MAX,
    AttentionMetadata,
    DecodeGroup,
    KVCache,
)
from tritium.kernels.sampling_tensors import SamplingTensors

GROUP_SIZE = 32  # weights that share a scale in 4 bits


def pack_linear(weight: Tensor) -> Tensor:
    """Lay out a weight [out_features, in_features] so that `linear` reads it fastest.

    On a CPU: oneDNN's blocked layout for bfloat16, column-major for float32. Only `linear` reads
    the result.
    """
    if weight.device.type != "cpu":
        return weight
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        return packed
    return weight.t().contiguous().t()


class Quantized(NamedTuple):
    """A weight [out_features, in_features], about `values * scales + offsets`.

    8 bits: int8, one scale per row [out_features, 1] float32, no offset. 4 bits: uint8 from 0 to
    15, one scale and one offset per group of 32 [out_features, in_features / 32] float16.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None

    def dequantize(self) -> Tensor:
        """[out_features, in_features] float32"""
        values = self.values.float()
        if self.offsets is None:
            return values * self.scales
        groups = values.unflatten(1, (-1, GROUP_SIZE))
        weight: Tensor = groups * self.scales[..., None] + self.offsets[..., None].float()
        return weight.flatten(1)


def quantize(weight: Tensor, bits: int) -> Quantized:
    """Round a weight [out_features, in_features] to the nearest value in 8 or 4 bits.

    8 bits: symmetric, a row's largest magnitude becomes 127. 4 bits: a group's smallest value
    becomes 0, its largest 15.
    """
    weight = weight.float()
    if bits == 8:
        scales = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
        return Quantized((weight / scales).round().to(torch.int8), scales, None)
    assert bits == 4
    groups = weight.unflatten(1, (-1, GROUP_SIZE))
    smallest, largest = groups.aminmax(dim=2)
    offsets = smallest.half()
    scales = ((largest - offsets) / 15).half()
    steps = (groups - offsets[..., None]) / scales.float().clamp(min=1e-30)[..., None]
    return Quantized(steps.round().clamp(0, 15).to(torch.uint8).flatten(1), scales, offsets)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [num_tokens, in_features] @ weight.T + bias -> [num_tokens, out_features]."""
    if weight.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def tokens_of_experts(
    expert_ids: Tensor,  # [num_tokens, k] int64
    weights: Tensor,  # [num_tokens, k] float32
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, its tokens [n] int64, their weights [n, 1]) of each expert that a token uses."""
    num_per_token = expert_ids.shape[1]
    order = expert_ids.flatten().argsort(stable=True)
    pairs, counts = expert_ids.flatten()[order].unique_consecutive(return_counts=True)
    parts = order.split(counts.tolist())
    for expert, part in zip(pairs.tolist(), parts, strict=True):
        yield expert, part // num_per_token, weights.flatten()[part, None]


def experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
) -> Tensor:
    """See `kernels.experts`."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert, tokens, weight in tokens_of_experts(expert_ids, weights):
        hidden = activate(F.linear(x[tokens], gate_up[expert]), activation, is_gated=True)
        out.index_add_(0, tokens, F.linear(hidden, down[expert]).float() * weight)
    return out.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich, 2019)."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(residual + x), residual + x); the sum overwrites `residual`."""
    residual += x
    return rms_norm(residual, weight, eps), residual


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def activate(x: Tensor, activation: str, is_gated: bool) -> Tensor:
    """See `kernels.activate`."""
    if not is_gated:
        return _ACTIVATIONS[activation](x)
    gate, up = x.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up


def rope_and_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: KVCache,
    slot_mapping: Tensor,
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """See `kernels.rope_and_cache`. Rotates a head's halves (Su et al., 2021), as Llama does."""
    num_kv_heads, head_dim = kv_cache.data.shape[-2:]
    num_rotated = qkv.shape[1] - num_kv_heads
    rotated, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
    if qk_norm is not None:
        q, k = rotated[:, :-num_kv_heads], rotated[:, -num_kv_heads:]
        q_weight, k_weight, eps = qk_norm
        normed = [
            rms_norm(x.reshape(len(x), -1, weight.numel()), weight, eps).view(x.shape)
            for x, weight in ((q, q_weight), (k, k_weight))
        ]
        rotated = torch.cat(normed, dim=1)
    x1, x2 = rotated.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(qkv.dtype)
    q, k = rotated[:, :-num_kv_heads], rotated[:, -num_kv_heads:]

    written = slot_mapping >= 0
    if not written.all():
        slot_mapping, k, v = slot_mapping[written], k[written], v[written]
    for i, x in enumerate((k, v)):
        cached = kv_cache.data[i].view(-1, num_kv_heads, head_dim)
        if kv_cache.scales is None:
            cached.index_copy_(0, slot_mapping, x)
        else:
            scales = kv_cache.scales[i].view(-1, num_kv_heads)
            cached[slot_mapping], scales[slot_mapping] = _quantise(x, cached.dtype)
    return q


def _quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] ~ data * scales: data [..., head_dim] of `dtype`, scales [...] float32.

    The largest |x| becomes the largest number of the dtype.
    """
    x = x.float()
    scales = x.abs().amax(dim=-1).clamp_min(SMALLEST_MAX) / QUANTISED_MAX[dtype]
    data = x / scales[..., None]
    return (data.round() if dtype == torch.int8 else data).to(dtype), scales


def attention(
    q: Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """See `kernels.attention`. First decoding sequences in groups, then one prefill at a time."""
    out = torch.empty_like(q)
    for group in metadata.decode_groups:
        out[group.rows] = _decode(q[group.rows], kv_cache, group, scale, sliding_window, soft_cap)
    num_kv_heads, head_dim = kv_cache.data.shape[-2:]
    for start, query_len, seq_len, block_ids in metadata.prefills:
        k, v = (
            cached.view(-1, num_kv_heads, head_dim)[:seq_len].transpose(0, 1)
            for cached in _gather(kv_cache, block_ids, q.dtype)
        )
        rows = q[start : start + query_len].transpose(0, 1)
        if query_len == seq_len and not sliding_window and not soft_cap:
            mask = None
        else:
            mask = _causal_mask(query_len, seq_len, sliding_window, q.device)
        attended = _sdpa(rows[None], k[None], v[None], mask, scale, soft_cap)
        out[start : start + query_len] = attended[0].transpose(0, 1)
    return out


def _gather(kv_cache: KVCache, block_ids: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """The blocks' keys, then values: [num_blocks, block_size, num_kv_heads, head_dim] each."""
    for i, cached in enumerate(kv_cache.data):
        x = cached.index_select(0, block_ids)
        if kv_cache.scales is not None:
            x = x.float().mul_(kv_cache.scales[i, block_ids][..., None]).to(dtype)
        yield x


def _decode(
    q: Tensor,  # [num_rows, num_heads, head_dim]
    kv_cache: KVCache,
    group: DecodeGroup,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """One query token per sequence. [num_rows, num_heads, head_dim]

    The query heads that share a KV head are the rows of one attention problem.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.data.shape[-2]
    k, v = (
        cached.view(num_rows, -1, num_kv_heads, head_dim).transpose(1, 2)
        for cached in _gather(kv_cache, group.block_ids, q.dtype)
    )  # [num_rows, num_kv_heads, width, head_dim]
    bias = group.bias
    if sliding_window:
        positions = torch.arange(bias.shape[-1], device=q.device)
        seq_lens = (bias == 0).sum(dim=-1, keepdim=True)  # [num_rows, 1, 1, 1]
        bias = bias.masked_fill(positions < seq_lens - sliding_window, float("-inf"))
    grouped = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return _sdpa(grouped, k, v, bias, scale, soft_cap).reshape(q.shape)


def _sdpa(
    q: Tensor,  # [n, num_heads, query_len, head_dim]
    k: Tensor,  # [n, num_kv_heads, width, head_dim]
    v: Tensor,  # [n, num_kv_heads, width, head_dim]
    mask: Tensor | None,  # bool, or a float32 bias; None: causal, query_len == width
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """softmax(scale * q k^T + mask) v. [n, num_heads, query_len, head_dim]"""
    if not soft_cap:
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    assert mask is not None
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = soft_cap * torch.tanh(q.float() @ k.mT * (scale / soft_cap))
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, float("-inf"))
    else:
        scores += mask
    return (scores.softmax(dim=-1) @ v).to(q.dtype)


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


# -- sampling --

_NUM_CANDIDATES = 256  # most likely tokens; filters that keep fewer look at no other token
_IN_CACHE = 2**16  # floats; a core's own cache holds a few times as many


def add_bias(logits: Tensor, token_ids: Tensor, values: Tensor, starts: Tensor) -> None:
    """See `kernels.add_bias`."""
    indices = _rows(starts) * logits.shape[-1] + token_ids
    logits.view(-1)[indices] += values


def apply_penalties(
    logits: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    starts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """See `kernels.apply_penalties`."""
    rows = _rows(starts)
    indices = rows * logits.shape[-1] + token_ids
    r, p, f = (penalty.index_select(0, rows) for penalty in (repetition, presence, frequency))
    x = logits.view(-1).index_select(0, indices)
    x = torch.where(x > 0, x / r, x * r) - f * counts - p * (counts > 0)
    logits.view(-1).index_copy_(0, indices, x)


def _rows(starts: Tensor) -> Tensor:
    """[total] int64: the row of each element of a ragged list."""
    return torch.repeat_interleave(starts.diff().long())


def apply_mask(logits: Tensor, mask: Tensor) -> None:
    """See `kernels.apply_mask`."""
    bits = mask[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))


def sample(logits: Tensor, sampling: SamplingTensors | None) -> Tensor:
    """See `kernels.sample`."""
    tokens = _argmax(logits)
    if sampling is None:
        return tokens
    vocab_size = logits.shape[-1]
    drawn = sampling.temperature > 0
    thresholds = torch.full_like(sampling.temperature, -torch.inf)
    if sampling.any_filtered:
        filtered = (sampling.top_k < vocab_size) | (sampling.top_p < 1) | (sampling.min_p > 0)
        rows = (drawn & filtered).nonzero().flatten()
        x, part = logits[rows], _take(sampling, rows)
        top, token_ids = x.topk(min(_NUM_CANDIDATES, vocab_size), dim=-1)
        found = _find_thresholds(x, top, part)
        index = _draw(top, token_ids.int(), found, part)
        tokens[rows] = token_ids.gather(-1, index[:, None]).flatten()

        drawn[rows] = beyond = found <= top[:, -1]
        if beyond.any():
            x, part = x[beyond], _take(part, beyond)
            descending = torch.from_numpy(-np.sort(-x.numpy()))  # much faster than torch's sort
            thresholds[rows[beyond]] = _find_thresholds(x, descending, part)
    if drawn.any():
        vocabulary = torch.from_numpy(np.arange(vocab_size, dtype=np.int32))  # faster than torch's
        for rows in _few_rows(drawn.nonzero().flatten(), vocab_size):
            tokens[rows] = _draw(logits[rows], vocabulary, thresholds[rows], _take(sampling, rows))
    return tokens


def _few_rows(x: Tensor, row_size: int) -> tuple[Tensor, ...]:
    """Parts of x with so few rows that each thread's rows stay in its cache between operations."""
    parts: tuple[Tensor, ...] = x.split(torch.get_num_threads() * max(1, _IN_CACHE // row_size))
    return parts


def _take(sampling: SamplingTensors, rows: Tensor) -> SamplingTensors:
    """The parameters of these rows."""
    temperature, top_k, top_p, min_p, keys = (column[rows] for column in sampling[:5])
    return SamplingTensors(temperature, top_k, top_p, min_p, keys, sampling.any_filtered)


def _argmax(x: Tensor) -> Tensor:
    """[n]: the index of each row's first maximum, x [n, m]. numpy is 20 times as fast as torch."""
    return torch.from_numpy(x.numpy().argmax(axis=-1))


def _find_thresholds(
    logits: Tensor,  # [n, vocab_size]
    top: Tensor,  # [n, m]: the largest logits, in descending order
    sampling: SamplingTensors,
) -> Tensor:
    """[n]: the smallest logit that the filters keep, or the last of `top` if they may keep more.

    The filters act in the kernel's order: min-p, top-k, top-p.
    """
    temperature, top_k, top_p, min_p = (column[:, None] for column in sampling[:4])
    best, last = top[:, :1], top[:, -1:]
    kth = top.gather(-1, top_k.clamp(max=top.shape[-1]).long() - 1)
    kth = kth.where(top_k < logits.shape[-1], -torch.inf)
    cut = torch.maximum(best + temperature * min_p.log(), kth)

    # The weight of the tokens that min-p and top-k keep: those of `top` from the cut on, or all.
    parts = zip(*(_few_rows(x, logits.shape[-1]) for x in (logits, best, temperature)), strict=True)
    mass = torch.cat([_weigh(*part).sum(dim=-1, keepdim=True) for part in parts])
    weights = _weigh(top, best, temperature)
    left = weights.masked_fill(top < cut, 0.0).sum(dim=-1, keepdim=True).where(cut > last, mass)
    before = weights.cumsum(dim=-1, dtype=torch.float64) - weights
    num_left = ((before < top_p * left) | (top_p >= 1)).sum(dim=-1, keepdim=True)
    threshold = torch.maximum(cut, top.gather(-1, num_left.sub_(1).clamp_(min=0)))
    known = (cut > last) | (cut == -torch.inf) | (top.shape == logits.shape)
    return threshold.where(known, last).flatten()


def _weigh(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Each token's probability relative to the best token's."""
    return ((logits - best) / temperature).exp_()


def _draw(
    logits: Tensor,  # [n, m]
    token_ids: Tensor,  # [m] or [n, m] int32
    thresholds: Tensor,  # [n]
    sampling: SamplingTensors,
) -> Tensor:
    """[n]: each row's argmax of logit + temperature * noise over logits >= threshold."""
    scores = gumbel(token_ids, sampling.keys).mul_(sampling.temperature[:, None]).add_(logits)
    if sampling.any_filtered:
        scores.masked_fill_(logits < thresholds[:, None], -torch.inf)
    return _argmax(scores)


def gumbel(token_ids: Tensor, keys: Tensor) -> Tensor:
    """Gumbel noise per token and row's key; the same on every device.

    -log(-log(1 - v)), with v uniform in (0, 1), from 31 bits that are a hash of token and key:
    lowbias32 (Wellons, 2018) of a Weyl sequence that starts at one half of the key; the other half
    is mixed in midway. Rare tokens need the largest noise, so v is exact near 0: noise up to 22.

    Args:
        token_ids: [m] or [n, m] int32
        keys: [n] int64

    Returns:
        [n, m] float32
    """
    low, high = keys.view(torch.int32).view(-1, 2, 1).unbind(1)  # [n, 1]
    x = token_ids * (0x9E3779B9 - 2**32) + low
    x ^= (x >> 16).bitwise_and_(0xFFFF)  # a logical shift of int32
    x *= 0x7FEB352D
    x ^= high
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    v = x.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_((1 - 2**-24) / 2**31)
    return v.neg_().log1p_().neg_().log_().neg_()
