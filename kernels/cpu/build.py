"""Compiles ops.c for this processor on first use, and loads it. Knows nothing of tensors."""

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

from tritium.kernels.cpu import structs

logger = logging.getLogger("tritium")

_SOURCE = Path(__file__).with_name("ops.c")
_SOURCES = [_SOURCE, *sorted(_SOURCE.parent.glob("*.h"))]
_FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-fopenmp"]
_AMX_FLAGS = ["-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]
# Without contraction: it would differ from row to row.
_AVX2_FLAGS = ["-march=x86-64-v3", "-ffp-contract=off"]
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


@cache
def library() -> ctypes.CDLL | None:
    """The compiled operations; None on a CPU without AVX2, or without a C compiler."""
    has_amx = torch.cpu._is_amx_tile_supported()
    if not has_amx and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    try:
        lib = ctypes.CDLL(str(_build(_FLAGS + (_AMX_FLAGS if has_amx else _AVX2_FLAGS))))
    except (OSError, subprocess.CalledProcessError) as error:
        logger.warning(
            "kernels/cpu/ops.c can't be built, so PyTorch computes instead, more slowly: %s %s",
            error,
            getattr(error, "stderr", ""),
        )
        return None
    if has_amx and lib.request_amx() != 0:
        return None
    # Keep the memory of large results for the next step: allocating it anew takes 2 of 45 ms.
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**30)
    structs.declare(lib)
    return lib


def is_available() -> bool:
    """Whether the C operations run here."""
    return library() is not None


def loaded() -> ctypes.CDLL:
    """The compiled operations, which must be available."""
    lib = library()
    assert lib is not None
    return lib


def _build(flags: list[str]) -> Path:
    """Compile ops.c, unless the user's cache holds the result for these sources and flags."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise OSError("no C compiler was found (Debian and Ubuntu: apt-get install gcc libc6-dev)")
    # PyTorch's own OpenMP, so that there is one pool of threads.
    openmp = next(Path(torch.__file__).parent.glob("lib/libgomp*.so*"), None)
    if not openmp:
        raise OSError("this PyTorch has no libgomp")
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
