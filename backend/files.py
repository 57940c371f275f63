"""Opens the files of a model: an error names the file and what has probably happened to it.

Knows what goes wrong when large files are copied and downloaded. Knows no format but JSON.
"""

import json
from pathlib import Path
from typing import Any

_POINTER = b"version https://git-lfs.github.com/spec"
_PAGES = (b"<!doctype html", b"<html", b"<?xml")


def check_file(path: Path) -> None:
    """Make sure that a file can be read and holds what its name says, as far as one can tell.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, unreadable, empty, a git-lfs pointer, or a web page.
    """
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    except OSError as error:  # a folder, permissions, a disk
        raise ValueError(f"{path} can't be read: {error.strerror or error}") from None
    if not start:
        raise ValueError(f"{path} is empty; its copy or download was broken off: repeat it")
    if start.startswith(_POINTER):
        raise ValueError(
            f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder"
        )
    if start.lstrip().lower().startswith(_PAGES):
        raise ValueError(f"{path} is a web page, not the file itself; its download failed")


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: as `check_file`, or it is not UTF-8.
    """
    check_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at {error.start}"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: as `read_text`, or it is not JSON, or not an object; says where.
    """
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except RecursionError:
        raise ValueError(f"{path} is not valid JSON: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} should hold a JSON object, not {value!r:.100}")
    return value
