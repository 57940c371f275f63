"""The operations of a model on CPUs, in C, in bfloat16 (sampling: float32).

With AMX they are several times as fast as PyTorch's; with AVX2 alone, weights of 2 bytes that are
multiplied in float32 make small batches fast. `supports_...` say which tensors an operation
supports; for all others the PyTorch twins of `reference.py` run.

    build.py       compiles ops.c and loads it
    structs.py     the structures and signatures of ops.c
    support.py     which tensors are supported
    weights.py     the layout of weights
    operations.py  one function per operation
    decoder.py     all layers of a model in one call
"""

from tritium.kernels.cpu.build import is_available, library
from tritium.kernels.cpu.decoder import Decoder, LayerWeights, Shape
from tritium.kernels.cpu.operations import (
    activate,
    attention,
    bind_threads,
    linear,
    rms_norm,
    rope_and_cache,
    sample,
)
from tritium.kernels.cpu.support import (
    supports_attention,
    supports_cache,
    supports_packing,
    supports_quantized,
    supports_rows,
    supports_sampling,
)
from tritium.kernels.cpu.weights import Arena, PackedWeight, pack, pack_quantized

__all__ = [
    "Arena",
    "Decoder",
    "LayerWeights",
    "PackedWeight",
    "Shape",
    "activate",
    "attention",
    "bind_threads",
    "is_available",
    "library",
    "linear",
    "pack",
    "pack_quantized",
    "rms_norm",
    "rope_and_cache",
    "sample",
    "supports_attention",
    "supports_cache",
    "supports_packing",
    "supports_quantized",
    "supports_rows",
    "supports_sampling",
]
