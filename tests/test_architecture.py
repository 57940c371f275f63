"""The rules of the house: who may import whom, and how the two Tritons are named."""

import ast
import io
import re
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BACKEND = ROOT / "backend"
FOLDERS = [
    "backend",
    "benchmarks",
    "client",
    "kernels",
    "loadtests",
    "model_repository",
    "tests",
    "tritium",
]
PYTHON_FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TEXT_FILES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "model_repository/**/*.pbtxt", "Makefile", "Dockerfile")
    for path in ROOT.glob(pattern)
)

SERVER_TYPES = "triton_python_backend_utils"
PURE = [
    "sequence",
    "admission",
    "scheduler",
    "waiting_queue",
    "deadlines",
    "drafts",
    "speculative",
    "block_manager",
    "prefix_index",
    "usage",
    "sampling_params",
    "structured_params",
    "output",
]
ENGINE = [
    "engine",
    "sequence",
    "admission",
    "scheduler",
    "waiting_queue",
    "deadlines",
    "drafts",
    "block_manager",
    "prefix_index",
    "usage",
    "sampler",
    "model_runner",
]
FRONT = [
    "output",
    "protocol",
    "front",
    "input_processor",
    "output_thread",
    "tokenizer",
    "sampling_params",
    "structured",
    "structured_params",
    "tools",
    "metrics",
    "trace",
    "billing",
    "ledger",
    "triton_model",
]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_path(module: str) -> Path | None:
    """The file of one of our modules, None for others' modules."""
    path = ROOT / module.replace(".", "/")
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def imports(path: Path) -> set[str]:
    """All modules that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            found.add(node.module)
            submodules = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {module for module in submodules if module_path(module)}
    return found


def all_imports(path: Path) -> set[str]:
    """The same, and what our modules among them import in turn."""
    found: set[str] = set()
    queue = [path]
    while queue:
        new = imports(queue.pop()) - found
        found |= new
        queue += [ours for module in new if (ours := module_path(module))]
    return found


def packages(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_the_shape_of_the_repository():
    for folder in FOLDERS:
        assert (ROOT / folder).is_dir(), folder
    for file in ("Makefile", "README.md", "pyproject.toml", "Dockerfile"):
        assert (ROOT / file).is_file(), file
    assert list((ROOT / "model_repository").glob("*/config.pbtxt"))
    assert list((ROOT / "model_repository").glob("*/1/model.py"))


def test_the_image_is_built_from_all_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {f"!{name.partition('.')[0]}" for name in project["tool"]["setuptools"]["packages"]}
    assert folders <= set((ROOT / ".dockerignore").read_text().split())


# -- who imports whom --


@pytest.mark.parametrize("module", PURE)
def test_bookkeeping_needs_neither_torch_nor_a_triton(module):
    path = BACKEND / f"{module}.py"
    forbidden = {"torch", "triton", SERVER_TYPES, "transformers", "kernels"}
    assert not packages(all_imports(path)) & forbidden


def test_the_kernels_know_nothing_of_the_backend():
    for path in (ROOT / "kernels").rglob("*.py"):
        assert "backend" not in packages(imports(path)), name_of(path)


def test_three_files_touch_the_python_backend_s_types():
    touching = {
        name_of(path)
        for path in PYTHON_FILES
        if "tests" not in path.parts and SERVER_TYPES in path.read_text(encoding="utf-8")
    }
    assert touching == {
        "backend/triton_model.py",
        "backend/trtllm_model.py",
        "backend/metrics.py",
    }


@pytest.mark.parametrize(
    "path",
    [*(BACKEND / f"{module}.py" for module in ENGINE), *sorted((BACKEND / "models").glob("*.py"))],
    ids=name_of,
)
def test_the_engine_and_below_know_nothing_of_text(path):
    forbidden = {f"backend.{module}" for module in FRONT}
    assert not all_imports(path) & forbidden


@pytest.mark.parametrize("module", ["output", "protocol", "tokenizer", "sampling_params"])
def test_the_text_side_knows_nothing_of_blocks(module):
    forbidden = {f"backend.{name}" for name in ENGINE if name != "sequence"} | {"backend.models"}
    assert not all_imports(BACKEND / f"{module}.py") & forbidden


def test_the_front_reaches_the_engine_only_through_its_door():
    inner = {f"backend.{name}" for name in ENGINE if name not in ("engine", "sequence", "usage")}
    for module in ("front", "input_processor", "output_thread"):
        assert not imports(BACKEND / f"{module}.py") & inner


@pytest.mark.parametrize("module", ["trtllm", "trtllm_model"])
def test_the_second_door_is_small(module):
    """Its process has neither torch nor what else takes time or memory to import."""
    assert packages(all_imports(BACKEND / f"{module}.py")) & {"torch", "pydantic"} == set()


def test_the_client_stands_alone():
    for path in (ROOT / "client").rglob("*.py"):
        assert not packages(imports(path)) & {"backend", "kernels", "torch"}, name_of(path)


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
