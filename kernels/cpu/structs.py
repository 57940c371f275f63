"""The structures, constants and signatures of ops.c, for ctypes. Keep both in step."""

import ctypes
from typing import Any

import torch
from torch import Tensor

TILE_ROWS = 16  # ROWS
TILE_PAIRS = 32  # PAIRS: bfloat16 numbers in a row of a tile
MAX_DIM = 256  # of a head
FORMS = (torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn)  # enum form: of values
ACTIVATIONS = ("silu", "gelu_tanh", "relu2")  # enum activation

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a tensor's data; None becomes NULL."""
    return None if tensor is None else tensor.data_ptr()


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Attention(ctypes.Structure):
    """struct attention"""

    _fields_ = [
        *_fields(_POINTER, "q keys values starts seq_lens blocks out"),
        *_fields(_INT, "num_seqs max_blocks block_size num_heads num_kv_heads dim window"),
        *_fields(_FLOAT, "scale soft_cap"),
    ]


class Weight(ctypes.Structure):
    """struct weight"""

    _fields_ = [*_fields(_POINTER, "values scales"), ("form", _INT)]


class Linear(ctypes.Structure):
    """struct linear"""

    _fields_ = [("weight", Weight), ("bias", _POINTER)]


class Layer(ctypes.Structure):
    """struct layer"""

    _fields_ = [
        *_fields(_POINTER, "attention_norm attention_out_norm mlp_norm mlp_out_norm q_norm k_norm"),
        *_fields(Linear, "qkv o gate_up down"),
        *_fields(_POINTER, "keys values"),
        *_fields(_INT, "window rope"),
    ]


class DecoderArguments(ctypes.Structure):
    """struct decoder"""

    _fields_ = [
        *_fields(_POINTER, "layers norm residual x qkv gate_up activated cos sin slots"),
        *_fields(_INT, "num_layers n hidden intermediate activation gated whole_norm"),
        *_fields(_FLOAT, "eps multiplier"),
        ("attention", Attention),
    ]


class Sampling(ctypes.Structure):
    """struct sampling"""

    _fields_ = [
        *_fields(_POINTER, "logits temperature top_p min_p top_k keys tokens"),
        *_fields(_INT, "n size"),
    ]


_SIGNATURES: dict[str, list[Any]] = {
    "bind_threads": [],
    "linear": [_POINTER, ctypes.POINTER(Weight), *[_POINTER] * 2, ctypes.c_int, *[_INT] * 3],
    "rms_norm": [*[_POINTER] * 3, _FLOAT, _POINTER, *[_INT] * 2],
    "activate": [*[_POINTER] * 2, *[_INT] * 4],
    "rope_and_cache": [*[_POINTER] * 6, _INT, _FLOAT, *[_POINTER] * 3, *[_INT] * 4],
    "attention": [ctypes.POINTER(Attention)],
    "decode": [ctypes.POINTER(DecoderArguments)],
    "sample": [ctypes.POINTER(Sampling)],
}


def declare(lib: ctypes.CDLL) -> None:
    """Set the argument types of the library's functions; all of them return nothing."""
    for name, argtypes in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = argtypes, None
