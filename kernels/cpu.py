"""The operations for CPUs with AMX, in C: bfloat16 only. Built by the C compiler on first use.

`takes()` says whether they take a tensor; elsewhere the twins of `reference.py` run.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.metadata import AttentionMetadata, KVCache

logger = logging.getLogger("tritium")

_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ["-std=gnu11", "-O3", "-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]
_MAX_DIM = 256
_TILE_ROWS = 16
_TILE_PAIRS = 32


class _Attention(ctypes.Structure):
    """struct attention of cpu.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "starts", "seq_lens")),
        *((name, ctypes.c_void_p) for name in ("blocks", "out")),
        *((name, ctypes.c_int64) for name in ("num_seqs", "max_blocks", "block_size")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "dim", "window")),
        ("scale", ctypes.c_float),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled operations; None where there is no AMX or no compiler."""
    if not torch.cpu._is_amx_tile_supported():
        return None
    try:
        lib = ctypes.CDLL(str(_build()))
    except (OSError, subprocess.CalledProcessError) as error:
        logger.warning(
            "kernels/cpu.c can't be built, so PyTorch does its work, more slowly: %s %s",
            error,
            getattr(error, "stderr", ""),
        )
        return None
    if lib.request_amx() != 0:
        return None
    pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    signatures = {
        "linear": [pointer] * 4 + [ctypes.c_int] + [size] * 3,
        "rms_norm": [pointer] * 3 + [real, pointer] + [size] * 2,
        "silu_and_mul": [pointer] * 2 + [size] * 2,
        "rope_and_cache": [pointer] * 6 + [real] + [pointer] * 3 + [size] * 4,
        "attention": [ctypes.POINTER(_Attention)],
    }
    for name, argtypes in signatures.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = argtypes, None
    return lib


def _build() -> Path:
    """Compile cpu.c, unless that was done before."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise OSError("no C compiler was found (Debian and Ubuntu: apt-get install gcc libc6-dev)")
    # PyTorch's own OpenMP, so that there is one pool of threads.
    [openmp] = Path(torch.__file__).parent.glob("lib/libgomp*.so*")
    key = hashlib.sha256(_SOURCE.read_bytes())
    key.update(" ".join([compiler, str(openmp), *_FLAGS]).encode())
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    built = caches / "tritium" / f"cpu-{key.hexdigest()[:16]}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as directory:
            compiled, linked = Path(directory) / "cpu.o", Path(directory) / "cpu.so"
            for command in (
                [compiler, *_FLAGS, "-fPIC", "-fopenmp", "-c", str(_SOURCE), "-o", str(compiled)],
                [compiler, "-shared", str(compiled), str(openmp), "-lm", "-o", str(linked)],
            ):
                subprocess.run(command, check=True, capture_output=True, text=True)
            linked.rename(built)
    return built


def takes(x: Tensor) -> bool:
    """Whether the operations here take rows like these."""
    return (
        x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and x.shape[-1] % _TILE_PAIRS == 0
        and library() is not None
    )


def packs(weight: Tensor) -> bool:
    """Whether `pack` takes this weight [out_features, in_features]."""
    return takes(weight) and weight.shape[0] % _TILE_ROWS == 0


def pack(weight: Tensor) -> Tensor:
    """[out_features, in_features] -> [out_features / 16, in_features / 2, 16, 2], for `linear`."""
    return weight.view(-1, _TILE_ROWS, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See `kernels.linear`."""
    x = x.contiguous()
    m, n = len(x), len(packed) * _TILE_ROWS
    assert x.shape[1] == 2 * packed.shape[1] and dtype in (torch.bfloat16, torch.float32)
    out = x.new_empty(m, n, dtype=dtype)
    _library().linear(
        x.data_ptr(),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        dtype == torch.float32,
        m,
        x.shape[1],
        n,
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """See `kernels.rms_norm`; with a residual, of residual += x."""
    out = torch.empty_like(x)
    assert x.is_contiguous()
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    _library().rms_norm(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        x.numel() // x.shape[-1],
        x.shape[-1],
    )
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.silu_and_mul`."""
    n, size = len(gate_up), gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(n, size)
    _library().silu_and_mul(gate_up.data_ptr(), out.data_ptr(), n, size)
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
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    q = qkv.new_empty(n, num_heads, dim)
    q_norm, k_norm, eps = qk_norm or (None, None, 0.0)
    _library().rope_and_cache(
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        slot_mapping.data_ptr(),
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        eps,
        q.data_ptr(),
        kv_cache.data[0].data_ptr(),
        kv_cache.data[1].data_ptr(),
        n,
        num_heads,
        num_kv_heads,
        dim,
    )
    return q


def caches(x: Tensor, kv_cache: KVCache) -> bool:
    """Whether `rope_and_cache` takes these."""
    return takes(x) and kv_cache.data.dtype == x.dtype and x.shape[-1] <= _MAX_DIM


def attends(q: Tensor, kv_cache: KVCache, soft_cap: float | None) -> bool:
    """Whether `attention` takes these."""
    block_size, num_kv_heads = kv_cache.data.shape[2:4]
    return (
        caches(q, kv_cache)
        and block_size % _TILE_ROWS == 0
        and q.shape[1] <= _TILE_ROWS * num_kv_heads
        and soft_cap is None
    )


def attention(
    q: Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """See `kernels.attention`."""
    _, _, block_size, num_kv_heads, dim = kv_cache.data.shape
    q = q.contiguous()
    assert metadata.block_tables.is_contiguous()
    out = torch.empty_like(q)
    arguments = _Attention(
        q=q.data_ptr(),
        keys=kv_cache.data[0].data_ptr(),
        values=kv_cache.data[1].data_ptr(),
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
    )
    _library().attention(ctypes.byref(arguments))
    return out


def _library() -> ctypes.CDLL:
    lib = library()
    assert lib is not None
    return lib
