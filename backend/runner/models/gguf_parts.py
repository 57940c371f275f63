"""The files of a GGUF model that is split into parts: NAME-00001-of-00003.gguf and so on."""

import re
from pathlib import Path

_PART = re.compile(r"(?P<name>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


def part_paths(path: Path) -> list[Path]:
    """All parts of the model that a file belongs to, in order; of one that is not split, itself.

    Raises:
        FileNotFoundError: parts are missing; names them.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    paths = [
        path.with_name(f"{match['name']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)
    ]
    if missing := [part.name for part in paths if not part.is_file()]:
        raise FileNotFoundError(
            f"{path} is one of {count} parts of a model. Missing beside it: {', '.join(missing)}"
        )
    return paths
