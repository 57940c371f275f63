"""A model repository with one model, for `tritium serve --model`."""

import json
import re
from pathlib import Path

from tritium.backend import hub


def write_repository(repository: Path, model: str) -> str:
    """Write the folder of one model into an empty model repository.

    Args:
        model: As the parameter `model` of config.pbtxt, but relative to the working directory. A
            model on the Hugging Face Hub is downloaded.

    Returns:
        The model's name in the repository.

    Raises:
        FileNotFoundError: there is no such model.
    """
    name = _name(model)
    if not model.startswith("package:"):
        if not Path(model).exists() and hub.is_name(model):
            model = str(hub.download(model))
        if not Path(model).exists():
            raise FileNotFoundError(f"there is no model {model}: neither a folder nor a file")
        model = str(Path(model).absolute())
    (repository / name / "1").mkdir(parents=True)
    text = json.dumps(model, ensure_ascii=False)
    (repository / name / "config.pbtxt").write_text(
        'backend: "tritium"\n'
        f'parameters [ {{ key: "model", value: {{ string_value: {text} }} }} ]\n',
        encoding="utf-8",
    )
    return name


def _name(model: str) -> str:
    """Qwen/Qwen3-0.6B@main -> Qwen3-0.6B; weights/a b.gguf -> a-b."""
    path = model.partition("@")[0] if hub.is_name(model) else model
    name = Path(path).name or Path(path).absolute().name
    name = re.sub(r"[^\w.-]+", "-", name.removesuffix(".gguf"), flags=re.ASCII)
    return name.strip(".-") or "model"
