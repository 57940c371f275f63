"""`make kernel-table`: writes what is generated of docs/kernels.md, between its marks."""

import argparse
import re
from pathlib import Path

from tritium.benchmarks import roofline

PAGE = Path(__file__).resolve().parents[1] / "docs/kernels.md"


def replaced(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks of that name.

    Raises:
        ValueError: they are not there.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"no {begin} and {end}")
    return pattern.sub(lambda _: f"{begin}\n\n{text}\n\n{end}", page)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tritium benchmark pages", description=__doc__)
    parser.parse_args(arguments)
    from tritium.kernels.cuda import aot  # imports all kernels

    page = PAGE.read_text(encoding="utf-8")
    page = replaced(page, "kernels", aot.table(aot.compile_all()))
    page = replaced(page, "roofline", "\n\n".join(roofline.report(1024, roofline.H200)))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
