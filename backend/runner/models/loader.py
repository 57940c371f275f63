"""Finds a model by its name and reads its config and weights. Knows formats, not architectures."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from tritium.backend import hub
from tritium.backend.files import read_json
from tritium.backend.runner.models.architectures import (
    SUPPORTED_MODEL_TYPES,
    as_token_ids,
    read_model_config,
    refuse,
    require,
)
from tritium.backend.runner.models.config import ModelConfig
from tritium.backend.runner.models.gguf_parts import part_paths
from tritium.backend.runner.models.quantized import read_quantized
from tritium.backend.runner.models.safetensors_file import read_safetensors
from tritium.kernels import StoredWeight

_PACKAGE = "package:"
_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def resolve(model: str) -> Path:
    """Find a model.

    Args:
        model: A directory with config.json and safetensors; a .gguf file; `package:NAME/PATH`, one
            of these inside an installed Python package; or, if there is no such path, the name of
            a model on the Hugging Face Hub (see `hub.download`).

    Returns:
        The directory or file; of a GGUF model in parts, the first. Resolved again, it is the same.

    Raises:
        FileNotFoundError: the model, or a part of it, does not exist; the message says what is
            missing and where.
        ValueError: the file is not a .gguf file, the weights have another format, or `package:` is
            malformed.
    """
    path = _in_package(model) if model.startswith(_PACKAGE) else Path(model)
    if not path.exists() and hub.is_name(model):
        path = hub.download(model)
    if path.is_dir():
        _check_directory(path)
    elif not path.is_file():
        raise FileNotFoundError(f"Model {model!r} not found: {path} does not exist.")
    elif path.suffix != ".gguf":
        raise ValueError(f"Model file {path} is not a .gguf file.")
    else:
        path = part_paths(path)[0]
    return path


def load_config(path: Path, max_model_len: int | None = None) -> ModelConfig:
    """Read the config of a model that `resolve` found.

    Args:
        max_model_len: See `architectures.read_model_config`.

    Raises:
        ValueError: the model is not supported, or its file is damaged; names the file.
    """
    if path.is_dir():
        given = read_json(path / _CONFIG)
        eos_token_ids = _generation_eos_token_ids(path)
        try:
            return read_model_config(_hf_config(given), eos_token_ids, given, max_model_len)
        except ValueError as error:
            raise ValueError(f"{path / _CONFIG}: {error}") from error
        except Exception as error:
            raise ValueError(f"{path / _CONFIG}: a value makes no sense: {error}") from error
    # Imported here, as only a GGUF file needs the package gguf.
    from tritium.backend.runner.models.gguf_file import GGUFFile

    file = GGUFFile(path)
    config = read_model_config(file.hf_config(), max_model_len=max_model_len)
    if (factors := file.rope_factors()) is not None:
        (rope,) = config.ropes
        inv_freq = torch.tensor(rope.inv_freq) / factors
        config = replace(config, ropes=(rope._replace(inv_freq=tuple(inv_freq.tolist())),))
    return config


def load_weights(
    path: Path, config: ModelConfig | None = None
) -> Iterator[tuple[str, StoredWeight]]:
    """(name in transformers, weight on the CPU) of each weight of a model that `resolve` found.

    One at a time, so that the whole checkpoint is never in memory next to the model. The dtype is
    the file's; the quantised weights of GGUF files are converted to float32.

    Args:
        config: The model's: it says which weights are not read, and how they are quantised. None:
            all of them, not quantised.

    Raises:
        FileNotFoundError: a shard that the index names is missing.
        ValueError: a file is damaged, or a tensor holds no usable weights; names them.
    """
    if path.is_file():
        from tritium.backend.runner.models.gguf_file import GGUFFile

        yield from GGUFFile(path).weights()
        return
    ignored, quantization = (config.names.ignored, config.quantization) if config else ((), None)
    is_quantized = quantization is not None
    stored = chain.from_iterable(
        read_safetensors(shard, ignored, is_quantized) for shard in _shards(path)
    )
    yield from read_quantized(stored, quantization) if quantization else stored


def _check_directory(path: Path) -> None:
    """Make sure that a directory has what `load_config` and `load_weights` read."""
    if not (path / _CONFIG).is_file():
        found = ", ".join(sorted(file.name for file in path.glob("*.gguf"))[:5])
        hint = f" It holds GGUF files: name one of them ({found})." if found else ""
        raise FileNotFoundError(f"Model directory {path} has no {_CONFIG}.{hint}")
    if (path / _SINGLE).is_file() or (path / _INDEX).is_file():
        return
    if pickled := sorted(file.name for kind in _PICKLED for file in path.glob(kind)):
        raise ValueError(
            f"Model directory {path} has its weights as {', '.join(pickled[:3])}. Pickled weights "
            "are not read, as they can run any code: convert them to safetensors, with "
            "transformers' from_pretrained and save_pretrained."
        )
    raise FileNotFoundError(
        f"Model directory {path} has no weights: neither {_SINGLE} nor {_INDEX}."
    )


def _hf_config(given: dict[str, Any]) -> Any:
    """A checkpoint's config.json as a transformers config, which has the defaults.

    Not by `AutoConfig.from_pretrained`: code that comes with a model is neither run nor asked
    about.
    """
    model_type = str(given.get("model_type"))
    require("model_type", model_type, SUPPORTED_MODEL_TYPES)
    if model_type == "mistral" and "layer_types" in given:  # which is Ministral, to transformers
        refuse("layer_types", given["layer_types"], ["none for model_type mistral"])
    try:
        return CONFIG_MAPPING[model_type].from_dict(given)
    except Exception as error:
        raise ValueError(f"transformers does not accept it: {error}") from error


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
    return as_token_ids(read_json(path).get("eos_token_id"))


def _shards(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.is_file():
        return [directory / _SINGLE]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ValueError(f"{index} has no weight_map with the file of each weight")
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise FileNotFoundError(f"{index} names files that are missing: {', '.join(missing)}.")
    return [directory / name for name in names]
