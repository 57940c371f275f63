"""`make pages`: writes the generated parts of docs/, between their marks.

Run from the source tree. `kernels` compiles all kernels ahead of time and takes minutes.
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pydantic_core import PydanticUndefined

from tritium.backend.config import EngineConfig
from tritium.benchmarks import model_checks, roofline

ROOT = Path(__file__).resolve().parents[1]
_SETTING = re.compile(r'key: "(\w+)", value: \{ string_value: "([^"]*)" \}')


class Part(NamedTuple):
    """A generated part of a page."""

    page: Path
    text: Callable[[], str]


def replaced(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks of that name.

    Raises:
        ValueError: the page has no such marks.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"no {begin} and {end}")
    return pattern.sub(lambda _: f"{begin}\n\n{text}\n\n{end}", page)


def configuration_table() -> str:
    """All parameters of config.pbtxt: default, the shipped value where it differs, meaning."""
    shipped = dict(
        _SETTING.findall((ROOT / "model_repository/smollm2/config.pbtxt").read_text("utf-8"))
    )
    rows = ["| parameter | default | shipped | meaning |", "|---|---|---|---|"]
    for name, field in EngineConfig.model_fields.items():
        default = "required" if field.default is PydanticUndefined else _shown(field.default)
        value = f"`{shipped[name]}`" if name in shipped else ""
        meaning = (field.description or "").replace("|", "\\|").replace("<", "\\<")
        rows.append(f"| `{name}` | {default} | {'' if value == default else value} | {meaning} |")
    return "\n".join(rows)


def _shown(default: object) -> str:
    if default is None or default in ([], {}):
        return ""
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _kernels() -> str:
    from tritium.kernels.cuda import aot  # imports all kernels

    return aot.table(aot.compile_all())


PARTS = {
    "quantization": Part(ROOT / "docs/models.md", model_checks.quantization_table),
    "models": Part(ROOT / "docs/models.md", model_checks.table),
    "configuration": Part(ROOT / "docs/configuration.md", configuration_table),
    "roofline": Part(
        ROOT / "docs/kernels.md", lambda: "\n\n".join(roofline.report(1024, roofline.H200))
    ),
    "kernels": Part(ROOT / "docs/kernels.md", _kernels),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium benchmark pages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; default: all"
    )
    for name in parser.parse_args(arguments).parts or PARTS:
        path, text = PARTS[name]
        path.write_text(replaced(path.read_text(encoding="utf-8"), name, text()), encoding="utf-8")


if __name__ == "__main__":
    main()
