"""Broken files: the error names the file and the cause."""

import os
import re
from pathlib import Path

import pytest

from tritium.backend.files import check_file, read_json

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=re.escape(str(path))) as refused:
        read_json(path)
    message = str(refused.value)
    assert message.startswith(f"{path} ")
    return message.removeprefix(f"{path} ")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (POINTER.encode(), "is a git-lfs pointer, not the file itself: run `git lfs pull` in its"),
        (b"", "is empty; its copy or download was broken off: repeat it"),
        (b"\n<!DOCTYPE html><html>", "is a web page, not the file itself; its download failed"),
        (b"<HTML>404</HTML>", "is a web page"),
        (b'{"a": 1,\n "b": }', "is not valid JSON: line 2, column 7: Expecting value"),
        (b'{"a": 1', "is not valid JSON: line 1, column 8: Expecting ',' delimiter"),
        (b'{"a": "\xff"}', "is not UTF-8 text: byte 0xff at 7"),
        (b"[1, 2]", "should hold a JSON object, not [1, 2]"),
        (b"[" * 200_000, "is not valid JSON: it is nested too deeply"),
    ],
    ids=["pointer", "empty", "page", "html", "line", "cut", "bytes", "list", "deep"],
)
def test_a_broken_file(tmp_path, content, expected):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert refusal(path).startswith(expected)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json does not exist$"):
        read_json(tmp_path / "none.json")


def test_a_folder(tmp_path):
    assert refusal(tmp_path) == "can't be read: Is a directory"


def test_no_permission(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, os.strerror(13))

    path = tmp_path / "config.json"
    path.write_text("{}")
    monkeypatch.setattr(Path, "open", refuse)  # the tests may run as root
    assert refusal(path) == "can't be read: Permission denied"


def test_a_good_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": "é"}', encoding="utf-8")
    check_file(path)
    assert read_json(path) == {"a": "é"}
