"""The operations of a model in bfloat16 on CPUs, in C, built on first use for this processor.

With AMX they are several times as fast as PyTorch's; with AVX2 alone, weights of 2 bytes that are
multiplied in float32 make small batches fast. `takes()` says whether they take a tensor; elsewhere
the twins of `reference.py` run.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritium.kernels import reference
from tritium.kernels.metadata import AttentionMetadata, KVCache
from tritium.kernels.sampling_tensors import SamplingTensors

logger = logging.getLogger("tritium")

_SOURCE = Path(__file__).with_name("ops.c")
_SOURCES = [_SOURCE, *sorted(_SOURCE.parent.glob("*.h"))]
_FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-fopenmp"]
_AMX_FLAGS = ["-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]
_AVX2_FLAGS = ["-march=x86-64-v3", "-ffp-contract=off"]  # as rows would be contracted unequally
_MAX_DIM = 256
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_TILE_ROWS = 16
_TILE_PAIRS = 32
_ALIGNMENT = 64  # bytes


class _Attention(ctypes.Structure):
    """struct attention of ops.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "starts", "seq_lens")),
        *((name, ctypes.c_void_p) for name in ("blocks", "out")),
        *((name, ctypes.c_int64) for name in ("num_seqs", "max_blocks", "block_size")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "dim", "window")),
        ("scale", ctypes.c_float),
    ]


class _Weight(ctypes.Structure):
    """struct weight of ops.c."""

    _fields_ = [
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bits", ctypes.c_int64),
    ]


class _Linear(ctypes.Structure):
    """struct linear of ops.c."""

    _fields_ = [("weight", _Weight), ("bias", ctypes.c_void_p)]


class _Layer(ctypes.Structure):
    """struct layer of ops.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_attention_norm")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
        *((name, _Linear) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
    ]


class _Decoder(ctypes.Structure):
    """struct decoder of ops.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("layers", "norm", "residual", "x", "qkv")),
        *((name, ctypes.c_void_p) for name in ("gate_up", "activated", "cos", "sin", "slots")),
        *((name, ctypes.c_int64) for name in ("num_layers", "n", "hidden", "intermediate")),
        ("eps", ctypes.c_float),
        ("attention", _Attention),
    ]


class _Sampling(ctypes.Structure):
    """struct sampling of ops.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "temperature", "top_p", "min_p")),
        *((name, ctypes.c_void_p) for name in ("top_k", "keys", "tokens")),
        *((name, ctypes.c_int64) for name in ("n", "size")),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled operations; None where there is no AVX2 or no compiler."""
    has_amx = torch.cpu._is_amx_tile_supported()
    if not has_amx and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    try:
        lib = ctypes.CDLL(str(_build(_FLAGS + (_AMX_FLAGS if has_amx else _AVX2_FLAGS))))
    except (OSError, subprocess.CalledProcessError) as error:
        logger.warning(
            "kernels/cpu/ops.c can't be built, so PyTorch does its work, more slowly: %s %s",
            error,
            getattr(error, "stderr", ""),
        )
        return None
    if has_amx and lib.request_amx() != 0:
        return None
    # Memory of large results is kept for the next step's: to get it anew takes 2 of 45 ms.
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**30)
    pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    signatures: dict[str, list[Any]] = {
        "bind_threads": [],
        "linear": [pointer, ctypes.POINTER(_Weight)] + [pointer] * 2 + [ctypes.c_int] + [size] * 3,
        "rms_norm": [pointer] * 3 + [real, pointer] + [size] * 2,
        "silu_and_mul": [pointer] * 2 + [size] * 2,
        "rope_and_cache": [pointer] * 6 + [real] + [pointer] * 3 + [size] * 4,
        "attention": [ctypes.POINTER(_Attention)],
        "decode": [ctypes.POINTER(_Decoder)],
        "sample": [ctypes.POINTER(_Sampling)],
    }
    for name, argtypes in signatures.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = argtypes, None
    return lib


def _build(flags: list[str]) -> Path:
    """Compile ops.c, unless that was done before."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise OSError("no C compiler was found (Debian and Ubuntu: apt-get install gcc libc6-dev)")
    # PyTorch's own OpenMP, so that there is one pool of threads.
    openmp = next(Path(torch.__file__).parent.glob("lib/libgomp*.so*"), None)
    if not openmp:
        raise OSError("this PyTorch brings no libgomp")
    key = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES))
    key.update(" ".join([compiler, str(openmp), *flags]).encode())
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    built = caches / "tritium" / f"cpu-{key.hexdigest()[:16]}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as directory:
            compiled, linked = Path(directory) / "cpu.o", Path(directory) / "cpu.so"
            for command in (
                [compiler, *flags, "-c", str(_SOURCE), "-o", str(compiled)],
                [compiler, "-shared", str(compiled), str(openmp), "-lm", "-o", str(linked)],
            ):
                subprocess.run(command, check=True, capture_output=True, text=True)
            linked.rename(built)
    return built


def bind_threads() -> None:
    """Give this thread, and each of those that compute with it, a core of its own.

    Else two of them may be kept on one core, waiting for each other, while another process has the
    rest. Only where there are as many as cores: to share them out is no business of one process.
    """
    if library() is not None and torch.get_num_threads() == len(os.sched_getaffinity(0)):
        _library().bind_threads()


def takes(x: Tensor) -> bool:
    """Whether the operations here take rows like these."""
    return (
        x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and x.shape[-1] % _TILE_PAIRS == 0
        and library() is not None
    )


class PackedWeight(NamedTuple):
    """A weight [out_features, in_features], laid out for `linear`: in 16, 8 or 4 bits."""

    values: Tensor  # [n / 16, k / 2, 16, 2] bfloat16 or int8; [n / 16, k / 2, 16] uint8: two each
    scales: Tensor | None  # of 8 bits: [n] float32; of 4: [n / 16, k / 32, 2, 16] float16

    @property
    def out_features(self) -> int:
        return len(self.values) * _TILE_ROWS

    @property
    def in_features(self) -> int:
        return self.values.shape[1] * 2

    def struct(self) -> _Weight:
        """For C: pointers that hold as long as this does."""
        bits = self.values.nbytes * 8 // (self.out_features * self.in_features)
        return _Weight(self.values.data_ptr(), _pointer(self.scales), bits)


class Arena:
    """Keeps tensors beside each other, so that small ones, too, lie in pages of 2 MiB.

    Steps of one sequence, with SmolLM2's weights of 0.3 to 3.5 MB: 18 ms without, 14 ms so.
    """

    _SIZE = 2**25

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy, or the tensor itself where it is large."""
        if tensor.nbytes >= self._SIZE:
            return tensor
        size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._free):
            self._free = torch.empty(self._SIZE, dtype=torch.uint8)
        place, self._free = self._free[: tensor.nbytes], self._free[size:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def packs(weight: Tensor) -> bool:
    """Whether `pack` takes this weight [out_features, in_features]."""
    return takes(weight) and weight.shape[0] % _TILE_ROWS == 0


def pack(weight: Tensor, bits: int = 16, arena: Arena | None = None) -> PackedWeight:
    """For `linear`, rounded to 8 or 4 bits where they say so, and kept in the arena."""
    packed = _packed(weight, bits)
    return packed._replace(values=arena.keep(packed.values)) if arena else packed


def _packed(weight: Tensor, bits: int) -> PackedWeight:
    if bits == 16:
        return PackedWeight(_tiles(weight), None)
    values, scales, offsets = reference.quantize(weight, bits)
    if offsets is None:
        return PackedWeight(_tiles(values), scales.flatten())
    first, last = _tiles(values).flatten(2).split(_TILE_ROWS, dim=2)
    scales = torch.stack([scales, offsets])  # [2, n, k / 32]
    scales = scales.unflatten(1, (-1, _TILE_ROWS)).permute(1, 3, 0, 2).contiguous()
    return PackedWeight(first | last << 4, scales)


def _tiles(weight: Tensor) -> Tensor:
    """[out_features, in_features] -> [out_features / 16, in_features / 2, 16, 2]."""
    return weight.view(-1, _TILE_ROWS, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See `kernels.linear`."""
    x = x.contiguous()
    m, k, n = len(x), weight.in_features, weight.out_features
    assert x.shape[1] == k
    assert dtype in (torch.bfloat16, torch.float32)
    out = x.new_empty(m, n, dtype=dtype)
    _library().linear(
        x.data_ptr(),
        weight.struct(),
        _pointer(bias),
        out.data_ptr(),
        dtype == torch.float32,
        m,
        k,
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
        _pointer(residual),
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
    assert qkv.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    q = qkv.new_empty(n, num_heads, dim)
    q_norm, k_norm, eps = qk_norm or (None, None, 0.0)
    _library().rope_and_cache(
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        slot_mapping.data_ptr(),
        _pointer(q_norm),
        _pointer(k_norm),
        eps,
        q.data_ptr(),
        *_keys_and_values(kv_cache),
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
        and q.shape[-2] <= _TILE_ROWS * num_kv_heads
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
    q = q.contiguous()
    out = torch.empty_like(q)
    arguments = _attention(q, out, kv_cache, metadata, scale, sliding_window)
    arguments.keys, arguments.values = _keys_and_values(kv_cache)
    _library().attention(ctypes.byref(arguments))
    return out


def samples(logits: Tensor) -> bool:
    """Whether `sample` takes these."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and library() is not None


def sample(logits: Tensor, sampling: SamplingTensors | None) -> Tensor:
    """See `kernels.sample`."""
    assert logits.is_contiguous()
    n, size = logits.shape
    tokens = torch.empty(n, dtype=torch.int64)
    arguments = _Sampling(logits=logits.data_ptr(), tokens=tokens.data_ptr(), n=n, size=size)
    if sampling:
        for name, column in sampling._asdict().items():
            if isinstance(column, Tensor):
                assert column.is_contiguous()
                assert len(column) == n
                setattr(arguments, name, column.data_ptr())
    _library().sample(ctypes.byref(arguments))
    return tokens


class LayerWeights(NamedTuple):
    """Of one decoder layer; each pair is a weight and its bias."""

    input_norm: Tensor
    post_attention_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: tuple[PackedWeight, Tensor | None]
    o: tuple[PackedWeight, Tensor | None]
    gate_up: tuple[PackedWeight, Tensor | None]
    down: tuple[PackedWeight, Tensor | None]


class Decoder:
    """All layers of a Llama in one call: between operations nothing of Python runs.

    Args:
        norm: Of the last layer's output.
    """

    def __init__(self, layers: Sequence[LayerWeights], norm: Tensor, eps: float) -> None:
        self._weights = layers, norm  # whose memory the pointers below are to
        self._eps = eps
        self._layers = (_Layer * len(layers))()
        for struct, layer in zip(self._layers, layers, strict=True):
            for name, value in layer._asdict().items():
                if isinstance(value, tuple):
                    weight, bias = value
                    setattr(struct, name, _Linear(weight.struct(), _pointer(bias)))
                else:
                    setattr(struct, name, _pointer(value))

    @classmethod
    def of(
        cls, layers: Sequence[LayerWeights | None], norm: Tensor, eps: float
    ) -> "Decoder | None":
        """None where not all that is in a layer is for the operations here."""
        taken = [layer for layer in layers if layer]
        return cls(taken, norm, eps) if takes(norm) and len(taken) == len(layers) else None

    def takes(self, kv_cache: KVCache) -> bool:
        """Whether layers can have caches like this."""
        dim = kv_cache.data.shape[-1]
        return attends(self._weights[1].new_empty(self._num_heads(kv_cache), dim), kv_cache, None)

    def __call__(
        self,
        residual: Tensor,  # [n, hidden]: embeddings, overwritten
        cos: Tensor,  # [n, head_dim // 2] float32
        sin: Tensor,  # [n, head_dim // 2] float32
        kv_caches: Sequence[KVCache],  # such as `attends` takes
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """The last layer's output, normalised. [n, hidden]"""
        layers, norm = self._weights
        num_kv_heads, dim = kv_caches[0].data.shape[-2:]
        n, hidden = residual.shape
        num_heads = self._num_heads(kv_caches[0])
        intermediate = layers[0].down[0].in_features
        for struct, kv_cache in zip(self._layers, kv_caches, strict=True):
            struct.keys, struct.values = _keys_and_values(kv_cache)
        x, q = torch.empty_like(residual), residual.new_empty(n, num_heads, dim)
        attended = torch.empty_like(q)
        qkv = residual.new_empty(n, num_heads + 2 * num_kv_heads, dim)
        gate_up, activated = (
            residual.new_empty(n, 2 * intermediate),
            residual.new_empty(n, intermediate),
        )
        arguments = _Decoder(
            layers=ctypes.addressof(self._layers),
            norm=norm.data_ptr(),
            residual=residual.data_ptr(),
            x=x.data_ptr(),
            qkv=qkv.data_ptr(),
            gate_up=gate_up.data_ptr(),
            activated=activated.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=metadata.slot_mapping.data_ptr(),
            num_layers=len(layers),
            n=n,
            hidden=hidden,
            intermediate=intermediate,
            eps=self._eps,
            attention=_attention(q, attended, kv_caches[0], metadata, scale, sliding_window),
        )
        _library().decode(ctypes.byref(arguments))
        return x

    def _num_heads(self, kv_cache: KVCache) -> int:
        num_kv_heads, dim = kv_cache.data.shape[-2:]
        return self._weights[0][0].qkv[0].out_features // dim - 2 * num_kv_heads


def _attention(
    q: Tensor,
    out: Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> _Attention:
    """Without the addresses of keys and values."""
    _, _, block_size, num_kv_heads, dim = kv_cache.data.shape
    assert metadata.block_tables.is_contiguous()
    return _Attention(
        q=q.data_ptr(),
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


def _keys_and_values(kv_cache: KVCache) -> tuple[int, int]:
    keys = kv_cache.data.data_ptr()
    return keys, keys + kv_cache.data.nbytes // 2


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _library() -> ctypes.CDLL:
    lib = library()
    assert lib is not None
    return lib
