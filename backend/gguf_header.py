"""Reads the header of a GGUF file: its metadata, and where its tensors lie.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here
and not by a library: the `gguf` package takes seconds for it (one array per entry of the
vocabulary). Knows nothing of what the metadata means.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
from gguf import GGMLQuantizationType, GGUFValueType

from tritium.backend.files import check_file

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


class TensorInfo(NamedTuple):
    """What the header says of one tensor."""

    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int  # from the start of the tensor data


class GGUFHeader(NamedTuple):
    """The header of one GGUF file."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data_start: int  # of the tensor data, in bytes from the start of the file


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file.

    Raises:
        ValueError: as `check_file` and `read_header`.
    """
    check_file(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return read_header(path, data).metadata


def read_header(path: Path, data: mmap.mmap) -> GGUFHeader:
    """The header of a GGUF file.

    Args:
        path: Of the file, for errors.
        data: The whole file.

    Raises:
        ValueError: the file is not a GGUF file, has an unsupported version, or is cut short
            within its header.
    """
    if data[:4] != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: it does not start with 'GGUF'.")
    version = int.from_bytes(data[4:8], "little")
    if version not in (2, 3):
        raise ValueError(f"{path} is GGUF version {version}. Supported: 2, 3.")
    cursor = _Cursor(data, offset=8)
    try:
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_values)}
        tensors = {cursor.string(): cursor.tensor_info() for _ in range(num_tensors)}
    except (struct.error, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged or cut short: {error!r} in its header.") from error
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    return GGUFHeader(metadata, tensors, data_start=-(-cursor.offset // alignment) * alignment)


class _Cursor:
    """Reads the header's little-endian values one after another."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self.data = data
        self.offset = offset

    def scalar(self, kind: str) -> Any:
        (value,) = self._unpack(f"<{kind}")
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        (value,) = self._unpack(f"{length}s")
        return str(value, "utf-8")

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[GGUFValueType(kind)])
        item_kind, length = self.scalar("I"), self.scalar("Q")
        if item_kind in _SCALARS:
            return list(self._unpack(f"<{length}{_SCALARS[GGUFValueType(item_kind)]}"))
        return [self.value(item_kind) for _ in range(length)]

    def tensor_info(self) -> TensorInfo:
        sizes = [self.scalar("Q") for _ in range(self.scalar("I"))]
        kind, offset = self.scalar("I"), self.scalar("Q")
        return TensorInfo(tuple(reversed(sizes)), GGMLQuantizationType(kind), offset)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.data, self.offset)
        self.offset += struct.calcsize(layout)
        return values
