"""Finds a model by its name and reads its config and weights. Knows formats, not architectures."""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from tritium.backend.runner.models.architectures import as_token_ids, read_model_config
from tritium.backend.runner.models.config import ModelConfig

_PACKAGE = "package:"
_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def resolve(model: str) -> Path:
    """Find a model.

    Args:
        model: A directory with config.json and safetensors; a .gguf file; or
            `package:NAME/PATH`, one of these inside an installed Python package.

    Raises:
        FileNotFoundError: the model does not exist; the message says what is missing and where.
        ValueError: the file is not a .gguf file, or `package:` is malformed.
    """
    path = _in_package(model) if model.startswith(_PACKAGE) else Path(model)
    if path.is_dir():
        if not (path / _CONFIG).is_file():
            raise FileNotFoundError(f"Model directory {path} has no {_CONFIG}.")
        if not (path / _SINGLE).is_file() and not (path / _INDEX).is_file():
            raise FileNotFoundError(
                f"Model directory {path} has no weights: neither {_SINGLE} nor {_INDEX}."
            )
    elif not path.is_file():
        raise FileNotFoundError(f"Model {model!r} not found: {path} does not exist.")
    elif path.suffix != ".gguf":
        raise ValueError(f"Model file {path} is not a .gguf file.")
    return path


def load_config(path: Path, max_model_len: int | None = None) -> ModelConfig:
    """Read the config of a model that `resolve` found.

    Args:
        max_model_len: See `architectures.read_model_config`.

    Raises:
        ValueError: the model is not supported, or its file is damaged.
    """
    if path.is_dir():
        hf_config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        given = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
        return read_model_config(hf_config, _generation_eos_token_ids(path), given, max_model_len)
    # Imported here, as only a GGUF file needs the package gguf.
    from tritium.backend.runner.models.gguf_file import GGUFFile

    file = GGUFFile(path)
    config = read_model_config(file.hf_config(), max_model_len=max_model_len)
    if (factors := file.rope_factors()) is not None:
        (rope,) = config.ropes
        inv_freq = torch.tensor(rope.inv_freq) / factors
        config = replace(config, ropes=(rope._replace(inv_freq=tuple(inv_freq.tolist())),))
    return config


def load_weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(name in transformers, tensor on the CPU) of each weight of a model that `resolve` found.

    One at a time, so that the whole checkpoint is never in memory next to the model. The dtype is
    the file's; a GGUF file's quantized tensors are converted to float32.

    Raises:
        FileNotFoundError: a shard that the index names is missing.
    """
    if path.is_file():
        from tritium.backend.runner.models.gguf_file import GGUFFile

        yield from GGUFFile(path).weights()
        return
    for shard in _shards(path):
        with safe_open(shard, framework="pt") as file:
            for name in file.offset_keys():  # in the order of the file
                yield name, file.get_tensor(name)


def _in_package(model: str) -> Path:
    name, _, inside = model.removeprefix(_PACKAGE).partition("/")
    if not name.isidentifier() or not inside:
        raise ValueError(f"Model {model!r} is malformed: expected {_PACKAGE}NAME/PATH.")
    # Not imported: a package that contains a model may need others that are not installed.
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"Model {model!r} not found: no Python package {name} is installed."
        )
    return Path(spec.submodule_search_locations[0], inside)


def _generation_eos_token_ids(directory: Path) -> list[int]:
    path = directory / _GENERATION_CONFIG
    if not path.is_file():
        return []
    return as_token_ids(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))


def _shards(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.is_file():
        return [directory / _SINGLE]
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise FileNotFoundError(f"{index} names files that are missing: {', '.join(missing)}.")
    return [directory / name for name in names]
