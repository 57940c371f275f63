"""The map of the house: which package may import which, read from the files themselves.

    python -m tests.architecture            # the table and the arrows of docs/design.md
    python -m tests.architecture --write    # puts them there

A file is under the rule of the longest path in `RULES` that it lies under, so a new file needs no
entry of its own.
"""

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/design.md"
HEAVY = {"torch", "triton", "transformers", "tokenizers", "pydantic"}


_INSIDE = "backend backend/engine backend/accounts backend/front backend/host backend/runner"


class Rule(NamedTuple):
    """What the files of a package may import besides each other and the standard library."""

    ours: str  # files and packages of this project
    heavy: str = ""  # those of `HEAVY`; other libraries are free


# A package imports only packages that stand above it.
RULES = {
    "client": Rule(""),
    "kernels": Rule("", "torch triton"),
    "backend/errors.py": Rule(""),
    "backend/files.py": Rule(""),
    "backend/gguf_header.py": Rule("backend/files.py"),
    "backend": Rule("backend/errors.py", "pydantic"),  # config.py
    "backend/engine": Rule("backend backend/errors.py"),
    "backend/accounts": Rule("backend backend/errors.py backend/engine"),
    "backend/front": Rule(
        "backend backend/errors.py backend/files.py backend/gguf_header.py backend/accounts "
        "backend/engine/engine.py backend/engine/request.py backend/engine/usage.py",
        "pydantic tokenizers transformers",
    ),
    "backend/trtllm": Rule("backend/errors.py"),
    "backend/host": Rule("backend backend/errors.py"),
    "backend/runner": Rule(
        "backend backend/errors.py backend/files.py backend/gguf_header.py backend/engine kernels",
        "torch pydantic transformers",
    ),
    "backend/triton_model.py": Rule(f"{_INSIDE} backend/errors.py backend/trtllm"),
    "benchmarks": Rule(f"{_INSIDE} kernels", "torch triton transformers"),
    "loadtests": Rule(
        f"{_INSIDE} backend/errors.py backend/triton_model.py kernels client",
        "torch transformers tokenizers",
    ),
}
TOP_FOLDERS = ("client", "kernels", "backend", "benchmarks", "loadtests")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def files() -> list[Path]:
    """All files that have a rule."""
    return sorted(path for folder in TOP_FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """All modules that a file imports, wherever in the file, and the names it takes from them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            assert node.module
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def file_of(module: str) -> Path | None:
    """The file of one of our modules; None for others' modules and for names in a module."""
    root, _, rest = module.partition(".")
    if root != "tritium" or not rest:
        return None
    path = ROOT / rest.replace(".", "/")
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def package_of(path: Path) -> str:
    """The key of the rule that a file is under."""
    name = name_of(path)
    return max((key for key in RULES if f"{name}/".startswith(f"{key}/")), key=len)


def imported_files(path: Path) -> set[Path]:
    """Files of ours that a file imports, outside of its package."""
    found = {file for module in imports(path) if (file := file_of(module))}
    return {file for file in found if package_of(file) != package_of(path)}


def forbidden_imports(path: Path) -> set[str]:
    """What a file imports and may not."""
    rule = RULES[package_of(path)]
    ours = {
        name_of(file)
        for file in imported_files(path)
        if not {name_of(file), package_of(file)} & set(rule.ours.split())
    }
    others = {module.partition(".")[0] for module in imports(path)}
    return ours | others & (HEAVY - set(rule.heavy.split()) | set(TOP_FOLDERS))


def arrows() -> set[tuple[str, str]]:
    """All (importing package, imported package)."""
    return {
        (package_of(path), package_of(file)) for path in files() for file in imported_files(path)
    }


def code_lines(path: Path) -> int:
    """Lines of a Python file with code in them: neither blank, nor comment, nor docstring."""
    source = path.read_text(encoding="utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node)
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in ignored and token.string
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - docstrings)


def table() -> Iterator[str]:
    """The packages as a Markdown table, and what they really import as a Mermaid graph."""
    yield "| package | code lines | may import |"
    yield "|---|---|---|"
    for package, rule in RULES.items():
        count = sum(code_lines(path) for path in files() if package_of(path) == package)
        names = [f"`{name}`" for name in rule.ours.split()] + rule.heavy.split()
        yield f"| `{package}` | {count:,} | {', '.join(names) or 'nothing'} |"
    yield ""
    yield "```mermaid"
    yield "graph TD"
    for package, other in sorted(arrows()):
        yield f"    {package} --> {other}"
    yield "```"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.architecture", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"put them into {name_of(PAGE)}")
    text = "\n".join(table())
    if not parser.parse_args().write:
        print(text)
        return
    page = PAGE.read_text(encoding="utf-8")
    start, end = "<!-- packages -->\n", "\n<!-- end of packages -->"
    before, _, rest = page.partition(start)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{start}{text}{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
