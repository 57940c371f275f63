"""The rules of the house: who may import whom, and how the two Tritons are named."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.architecture import (
    ROOT,
    RULES,
    TOP_FOLDERS,
    arrows,
    files,
    forbidden_imports,
    name_of,
)

PYTHON_FILES = sorted(
    path
    for folder in (*TOP_FOLDERS, "model_repository", "tests", "tritium")
    for path in (ROOT / folder).rglob("*.py")
)
TEXT_FILES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "model_repository/**/*.pbtxt", "Makefile", "Dockerfile")
    for path in ROOT.glob(pattern)
)


def test_the_shape_of_the_repository():
    for folder in (*TOP_FOLDERS, "model_repository", "tests", "tritium"):
        assert (ROOT / folder).is_dir(), folder
    for file in ("Makefile", "README.md", "pyproject.toml", "Dockerfile"):
        assert (ROOT / file).is_file(), file
    assert list((ROOT / "model_repository").glob("*/config.pbtxt"))
    assert list((ROOT / "model_repository").glob("*/1/model.py"))


def test_the_image_is_built_from_all_packages():
    links = {path.name for path in (ROOT / "tritium").iterdir() if path.is_symlink()}
    assert links == {*TOP_FOLDERS, "model_repository"}
    assert {f"!{name}" for name in links} <= set((ROOT / ".dockerignore").read_text().split())


# -- who imports whom --


def test_arrows_point_in_one_direction():
    order = list(RULES)
    assert [(a, b) for a, b in arrows() if order.index(b) > order.index(a)] == []


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_a_file_imports_what_its_package_may(path):
    assert forbidden_imports(path) == set()


def test_three_files_touch_the_python_backend_s_types():
    touching = {
        name_of(path) for path in files() if "triton_python_backend_utils" in path.read_text()
    }
    assert touching == {
        "backend/triton_model.py",
        "backend/trtllm/model.py",
        "backend/accounts/metrics.py",
    }


# -- Triton Server or Triton-lang --

ALLOWED = r"Triton Server|Triton-lang|Triton Inference Server|vLLM's Triton backend"
BARE = re.compile(rf"\b(?!(?:{ALLOWED})\b)(?<!vLLM's )Triton\b")


def bare_names(text: str) -> list[str]:
    text = re.sub(r"\s*\n\s*(#\s*)?", " ", text)
    return [text[max(m.start() - 30, 0) : m.end() + 30] for m in BARE.finditer(text)]


def prose(path: Path) -> str:
    """The comments and docstrings of a Python file."""
    source = path.read_text(encoding="utf-8")
    comments = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented)
    ]
    return "\n".join([*comments, "", *docstrings])


@pytest.mark.parametrize(
    ("text", "num_bare"),
    [
        ("Triton kernels", 1),
        ("a Triton, or Triton.", 2),
        ("Triton\nServer and Triton-lang", 0),
        ("# of Triton\n# Server", 0),
        ("NVIDIA Triton Inference Server", 0),
        ("TritonServer, TritonError, TritonPythonModel, TRITON_INTERPRET, triton", 0),
        ("vLLM's Triton backend", 0),
        ("the Triton backend", 1),
        ("Triton Serverless", 1),
    ],
)
def test_bare_names_are_found(text, num_bare):
    assert len(bare_names(text)) == num_bare


@pytest.mark.parametrize("path", PYTHON_FILES, ids=name_of)
def test_comments_say_which_triton(path):
    assert bare_names(prose(path)) == []


@pytest.mark.parametrize("path", TEXT_FILES, ids=name_of)
def test_pages_say_which_triton(path):
    assert bare_names(path.read_text(encoding="utf-8")) == []
