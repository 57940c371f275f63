"""Broken and unexpected files of a model: refused, naming the file and the cause."""

import builtins
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.backend.test_files import POINTER
from tritium.backend import hub
from tritium.backend.runner.models.config import WeightNames
from tritium.backend.runner.models.loader import load_config, load_weights, resolve

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in two shards, with one weight each."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for i, name in enumerate([WEIGHT, "model.norm.weight"]):
        save_file({name: torch.ones(64, 64)}, directory / f"model-{i}.safetensors")
        weight_map[name] = f"model-{i}.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def load(folder: Path) -> None:
    path = resolve(str(folder))
    load_config(path)
    list(load_weights(path))


def refusal(folder: Path, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as refused:
        load(folder)
    return str(refused.value)


def change_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def test_the_whole_folder(folder: Path) -> None:
    path = resolve(str(folder))
    assert load_config(path).eos_token_ids == (7,)
    weights = dict(load_weights(path))
    assert list(weights) == [WEIGHT, "model.norm.weight"]
    assert torch.equal(weights[WEIGHT], torch.ones(64, 64))
    config = replace(load_config(path), names=WeightNames(ignored=("model.layers.",)))
    assert list(dict(load_weights(path, config))) == ["model.norm.weight"]


def test_a_name_on_the_hub_is_downloaded_unless_there_is_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "download", {"org/name@main": folder}.__getitem__)
    assert resolve("org/name@main") == folder
    shutil.copytree(folder, "org/name")
    assert resolve("org/name") == Path("org/name")


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors.index.json"],
)
@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (
            '{\n  "a": 1,\n  "b" 2\n}',
            "is not valid JSON: line 3, column 7: Expecting ':' delimiter",
        ),
        (POINTER, "is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder"),
        ("<!DOCTYPE html>", "is a web page, not the file itself; its download failed"),
        ("", "is empty; its copy or download was broken off: repeat it"),
        ("[]", "should hold a JSON object, not []"),
    ],
    ids=["line", "pointer", "page", "empty", "list"],
)
def test_a_broken_json_file(folder: Path, name: str, content: str, cause: str) -> None:
    (folder / name).write_text(content)
    assert refusal(folder) == f"{folder / name} {cause}"


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {WEIGHT: 1}}])
def test_an_index_of_another_structure(folder: Path, index: dict[str, object]) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    assert refusal(folder) == f"{path} has no weight_map with the file of each weight"


def test_a_missing_shard(folder: Path) -> None:
    (folder / "model-1.safetensors").unlink()
    message = refusal(folder, FileNotFoundError)
    assert message == (
        f"{folder / 'model.safetensors.index.json'} names files that are missing: "
        "model-1.safetensors."
    )


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("size", [1000, 60, 5])
def test_a_shard_that_is_cut_short(folder: Path, size: int) -> None:
    path = folder / "model-1.safetensors"
    cut(path, size)
    message = refusal(folder)
    assert message.startswith(
        f"{path} is damaged or cut short: its {size:,} bytes are not a whole safetensors file ("
    )
    assert message.endswith("); repeat its copy or download")


def test_shards_that_are_something_else(folder: Path) -> None:
    path = folder / "model-1.safetensors"
    path.write_text(POINTER)
    assert refusal(folder) == (
        f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder"
    )
    cut(path, 0)
    assert refusal(folder).startswith(f"{path} is empty")
    path.write_text("<html>Sign in</html>")
    assert refusal(folder).startswith(f"{path} is a web page")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_not_finite(folder: Path, number: float, dtype: torch.dtype) -> None:
    path = folder / "model-0.safetensors"
    weight = torch.randn(64, 64).to(dtype)
    weight[17, 31] = number
    save_file({WEIGHT: weight}, path)
    assert refusal(folder) == (
        f"{path} holds NaN or infinity in {WEIGHT}: the file is damaged, or its training failed"
    )


@pytest.mark.parametrize(
    ("weight", "dtype"),
    [
        (torch.ones(64, 64, dtype=torch.int8), "int8"),
        (torch.ones(64, 64, dtype=torch.uint8), "uint8"),
        (torch.ones(64, 64, dtype=torch.int32), "int32"),
        (torch.ones(64, 64).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.ones(64, 64).to(torch.float8_e5m2), "float8_e5m2"),
        (torch.ones(64, 64, dtype=torch.bool), "bool"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_numbers_of_a_quantized_checkpoint(folder: Path, weight: Tensor, dtype: str) -> None:
    path = folder / "model-0.safetensors"
    save_file({WEIGHT: weight}, path)
    assert refusal(folder) == (
        f"{path} holds {WEIGHT} as {dtype}, which is not supported: numbers of a quantized "
        "checkpoint mean nothing without its scales. Supported: float64, float32, bfloat16, float16"
    )


def test_weights_as_pickles(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model-00001-of-00002.bin").touch()
    assert refusal(folder) == (
        f"Model directory {folder} has its weights as pytorch_model-00001-of-00002.bin. Pickled "
        "weights are not read, as they can run any code: convert them to safetensors, with "
        "transformers' from_pretrained and save_pretrained."
    )


def test_a_folder_of_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_0.gguf").touch()
    assert refusal(tmp_path, FileNotFoundError) == (
        f"Model directory {tmp_path} has no config.json. It holds GGUF files: name one of them "
        "(model-Q4_0.gguf)."
    )


def test_a_gguf_file_that_is_something_else(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content, cause in [
        (POINTER, "is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder"),
        ("<html>", "is a web page, not the file itself; its download failed"),
        ("", "is empty; its copy or download was broken off: repeat it"),
        ("GGML", "is not a GGUF file: it does not start with 'GGUF'."),
    ]:
        path.write_text(content)
        assert refusal(path) == f"{path} {cause}"


@pytest.mark.parametrize("model_type", ["no_such_model", "mamba", ""])
def test_an_unknown_model_type_gets_our_list(folder: Path, model_type: str) -> None:
    change_config(folder, model_type=model_type)
    message = refusal(folder)
    assert message.startswith(
        f"{folder / 'config.json'}: The model has model_type {model_type!r}, which is not "
        "supported. Supported: arcee, "
    )
    assert "update" not in message.lower()
    assert message.endswith("engine: vllm).")


def test_code_beside_the_weights_is_neither_run_nor_asked_about(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("asked")

    monkeypatch.setattr(builtins, "input", ask)
    (folder / "code.py").write_text("raise AssertionError('run')")
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    change_config(folder, auto_map=code)
    assert load_config(folder).vocab_size == 96
    change_config(folder, auto_map=code, model_type="own_model")
    assert "model_type 'own_model', which is not supported" in refusal(folder)


def test_a_config_that_makes_no_sense(folder: Path) -> None:
    change_config(folder, hidden_size="wide")
    message = refusal(folder)
    assert message.startswith(f"{folder / 'config.json'}: transformers does not accept it: ")
    assert "hidden_size" in message
    change_config(folder, rope_scaling={"type": "linear", "factor": "4"})
    assert refusal(folder).startswith(f"{folder / 'config.json'}: a value makes no sense: ")
    change_config(folder, num_key_value_heads=3)
    assert "num_key_value_heads 3, which is not supported" in refusal(folder)
    change_config(folder, model_type="mistral", layer_types=["full_attention"])
    assert "layer_types ['full_attention'], which is not supported" in refusal(folder)


def test_the_first_shard_alone_is_not_the_model(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    assert refusal(folder, FileNotFoundError) == (
        f"Model directory {folder} has no weights: neither model.safetensors nor "
        "model.safetensors.index.json."
    )
    save_file(load_file(folder / "model-0.safetensors"), folder / "model.safetensors")
    assert list(dict(load_weights(resolve(str(folder))))) == [WEIGHT]
