"""Reads a safetensors file, tensor by tensor. Knows what weights can be, not whose they are."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tritium.backend.files import check_file

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_QUANTIZED = (torch.float8_e4m3fn, torch.int32)


def read_safetensors(
    path: Path, ignored: tuple[str, ...] = (), is_quantized: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor on the CPU) of each tensor of a file, in the file's order.

    Args:
        ignored: Beginnings of the names of tensors that are not read.
        is_quantized: Whether numbers of quantised formats are allowed as well.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or a tensor holds no usable weights; names both.
    """
    check_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                if not name.startswith(ignored):
                    tensor = file.get_tensor(name)
                    if not (is_quantized and tensor.dtype in _QUANTIZED):
                        _check_dtype(path, name, tensor)
                        check_finite(path, name, tensor)
                    yield name, tensor
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged or cut short: its {path.stat().st_size:,} bytes are not a whole "
            f"safetensors file ({error}); repeat its copy or download"
        ) from None


def check_finite(path: Path, name: str, weight: Tensor) -> None:
    """Raise ValueError if a weight of this file has numbers that are not finite."""
    # Both are NaN if any number is; and there is no mask as large as the weight.
    if weight.numel() and not torch.stack(weight.aminmax()).isfinite().all():
        raise ValueError(
            f"{path} holds NaN or infinity in {name}: the file is damaged, or its training failed"
        )


def _check_dtype(path: Path, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        dtype, *supported = (str(kind).removeprefix("torch.") for kind in (tensor.dtype, *_DTYPES))
        raise ValueError(
            f"{path} holds {name} as {dtype}, which is not supported: numbers of a quantized "
            f"checkpoint mean nothing without its scales. Supported: {', '.join(supported)}"
        )
