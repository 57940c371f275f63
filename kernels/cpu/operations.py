"""One function per operation, each a call of ops.c. Which tensors are supported: `support.py`."""

import ctypes
import os

import torch
from torch import Tensor

from tritium.kernels.cpu import build
from tritium.kernels.cpu.structs import ACTIVATIONS, Attention, Sampling, pointer
from tritium.kernels.cpu.weights import PackedWeight
from tritium.kernels.metadata import AttentionMetadata, KVCache
from tritium.kernels.sampling_tensors import SamplingTensors


def bind_threads() -> None:
    """Bind this thread, and each of the OpenMP threads that compute with it, to a core of its own.

    Otherwise two of them may stay on one core, waiting for each other, while another process has
    the other cores. Only where there are as many threads as cores: dividing the cores is not this
    process's decision.
    """
    if build.is_available() and torch.get_num_threads() == len(os.sched_getaffinity(0)):
        build.loaded().bind_threads()


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See `kernels.linear`."""
    x = x.contiguous()
    m, k, n = len(x), weight.in_features, weight.out_features + weight.padding
    assert x.shape[1] == k
    assert dtype in (torch.bfloat16, torch.float32)
    out = x.new_empty(m, n, dtype=dtype)
    if bias is not None and weight.padding:
        bias = torch.cat((bias, bias.new_zeros(weight.padding)))
    build.loaded().linear(
        x.data_ptr(),
        weight.struct(),
        pointer(bias),
        out.data_ptr(),
        dtype == torch.float32,
        m,
        k,
        n,
    )
    return out[:, : weight.out_features].contiguous()  # a copy only if there is padding


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """See `kernels.rms_norm`; with a residual, `kernels.add_rms_norm`."""
    out = torch.empty_like(x)
    assert x.is_contiguous()
    assert weight.dtype == torch.float32
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    build.loaded().rms_norm(
        x.data_ptr(),
        pointer(residual),
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        x.numel() // x.shape[-1],
        x.shape[-1],
    )
    return out


def activate(x: Tensor, activation: str, is_gated: bool) -> Tensor:
    """See `kernels.activate`."""
    n, size = len(x), x.shape[1] // (2 if is_gated else 1)
    assert x.is_contiguous()
    out = x.new_empty(n, size)
    kind = ACTIVATIONS.index(activation)
    build.loaded().activate(x.data_ptr(), out.data_ptr(), n, size, kind, is_gated)
    return out


def rope_and_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: KVCache,
    slot_mapping: Tensor,
    qk_norm: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """See `kernels.rope_and_cache`."""
    num_kv_heads, dim = kv_cache.data.shape[-2:]
    n, num_heads = len(qkv), qkv.shape[1] - 2 * num_kv_heads
    assert qkv.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    q = qkv.new_empty(n, num_heads, dim)
    q_norm, k_norm, eps = qk_norm or (None, None, 0.0)
    build.loaded().rope_and_cache(
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        slot_mapping.data_ptr(),
        pointer(q_norm),
        pointer(k_norm),
        q_norm is not None and q_norm.numel() != dim,
        eps,
        q.data_ptr(),
        *keys_and_values(kv_cache),
        n,
        num_heads,
        num_kv_heads,
        dim,
    )
    return q


def attention(
    q: Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """See `kernels.attention`."""
    q = q.contiguous()
    out = torch.empty_like(q)
    arguments = attention_arguments(q, out, kv_cache, metadata, scale, sliding_window, soft_cap)
    build.loaded().attention(ctypes.byref(arguments))
    return out


def sample(logits: Tensor, sampling: SamplingTensors | None) -> Tensor:
    """See `kernels.sample`."""
    assert logits.is_contiguous()
    n, size = logits.shape
    tokens = torch.empty(n, dtype=torch.int64)
    arguments = Sampling(logits=logits.data_ptr(), tokens=tokens.data_ptr(), n=n, size=size)
    if sampling:
        for name, column in sampling._asdict().items():
            if isinstance(column, Tensor):
                assert column.is_contiguous()
                assert len(column) == n
                setattr(arguments, name, column.data_ptr())
    build.loaded().sample(ctypes.byref(arguments))
    return tokens


def attention_arguments(
    q: Tensor,
    out: Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Attention:
    """For C: the pointers are valid as long as the tensors live."""
    _, _, block_size, num_kv_heads, dim = kv_cache.data.shape
    keys, values = keys_and_values(kv_cache)
    assert metadata.block_tables.is_contiguous()
    return Attention(
        q=q.data_ptr(),
        keys=keys,
        values=values,
        starts=metadata.query_start_loc.data_ptr(),
        seq_lens=metadata.seq_lens.data_ptr(),
        blocks=metadata.block_tables.data_ptr(),
        out=out.data_ptr(),
        num_seqs=len(metadata.seq_lens),
        max_blocks=metadata.block_tables.shape[1],
        block_size=block_size,
        num_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        dim=dim,
        window=sliding_window or 0,
        scale=scale,
        soft_cap=soft_cap or 0.0,
    )


def keys_and_values(kv_cache: KVCache) -> tuple[int, int]:
    """The addresses of a layer's keys and values."""
    keys = kv_cache.data.data_ptr()
    return keys, keys + kv_cache.data.nbytes // 2
