"""GGUF files: keys and defaults as llama.cpp has them, parts, refusals."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tritium.backend.runner.models.config import ModelConfig
from tritium.backend.runner.models.loader import load_config, load_weights, resolve

METADATA: dict[str, Any] = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
TENSORS = {"token_embd.weight": np.ones((96, 64), dtype=np.float32)}


def write(
    path: Path,
    changes: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any]] = TENSORS,
    architecture: str = "llama",
    **general: int,
) -> Path:
    """Write a GGUF file with METADATA and `changes` to it; None takes a key away."""
    writer = gguf.GGUFWriter(path, architecture)
    values = {f"{architecture}.{k}": v for k, v in (METADATA | dict(changes or {})).items()}
    values |= {f"split.{name}": value for name, value in general.items()}
    for key, value in values.items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config_of(path: Path, changes: Mapping[str, Any] | None = None, **more: Any) -> ModelConfig:
    return load_config(write(path / "model.gguf", changes, **more))


def refusal(path: Path, changes: Mapping[str, Any], **more: Any) -> str:
    write(path / "model.gguf", changes, **more)
    with pytest.raises(ValueError, match=r"\.$") as refused:
        load_config(path / "model.gguf")
    return str(refused.value)


def plain(theta: float = 10000.0) -> list[float]:
    """The rotary frequencies of a head of 16 numbers."""
    return [theta ** (-i / 16) for i in range(0, 16, 2)]


# -- what is read --


def test_the_optional_keys_have_llama_cpp_s_defaults(tmp_path):
    config = config_of(tmp_path, {"attention.head_count_kv": None})
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 4, 16)
    assert config.ropes[0].inv_freq == pytest.approx(plain())
    assert config.max_position_embeddings == 64
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"rope.scale_linear": 4.0}, 4.0),  # of files from before August 2023
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, 2.0),
        ({"rope.scale_linear": 1.0}, 1.0),
        ({"rope.scale_linear": 0.0}, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
        ({"rope.scaling.type": "linear"}, 1.0),
    ],
    ids=str,
)
def test_linear_scaling(tmp_path, keys, factor):
    config = config_of(tmp_path, keys)
    assert config.ropes[0].inv_freq == pytest.approx([f / factor for f in plain()])
    assert config.ropes[0].scale == (1.0,) * 8
    assert config.max_position_embeddings == 64 * factor


def test_yarn(tmp_path):
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
    }
    config = config_of(tmp_path, keys)
    assert config.ropes[0].scale == pytest.approx((1 + 0.1 * math.log(4),) * 8)
    assert config.max_position_embeddings == 64
    scaled = config_of(tmp_path, keys | {"rope.scaling.attn_factor": 2.0})
    assert scaled.ropes[0].scale == pytest.approx((2 * (1 + 0.1 * math.log(4)),) * 8)
    assert scaled.ropes[0].inv_freq == config.ropes[0].inv_freq
    steep = keys | {"rope.scaling.yarn_beta_fast": 1.0, "rope.scaling.yarn_beta_slow": 0.5}
    assert config_of(tmp_path, steep).ropes[0].inv_freq != config.ropes[0].inv_freq
    # Without it, llama.cpp takes the context length.
    short = config_of(tmp_path, keys | {"rope.scaling.original_context_length": None})
    whole = config_of(tmp_path, keys | {"rope.scaling.original_context_length": 64})
    assert short == whole != config


@pytest.mark.parametrize("name", ["attention.head_count", "attention.head_count_kv"])
def test_layers_that_are_alike(tmp_path, name):
    assert config_of(tmp_path, {name: [4, 4]}) == config_of(tmp_path, {name: 4})


# -- what is refused --


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention.scale", 0.5),
        ("logit_scale", 2.0),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("residual_scale", 0.5),
        ("embedding_scale", 8.0),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.causal", False),
        ("attention.sliding_window", 4096),
        ("attention.temperature_scale", 0.25),
        ("attention.value_length", 32),
        ("attention.key_length_mla", 32),
        ("expert_count", 8),
        ("expert_used_count", 2),
        ("pooling_type", 1),
        ("rope.freq_base_swa", 1e4),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.attn_factor", 2.0),
        ("rope.scaling.alpha", 2.0),
        ("rope.scaling.yarn_log_multiplier", 0.25),
        ("rope.scaling.yarn_ext_factor", 1.0),
        ("use_parallel_residual", True),
        ("hidden_activation", "gelu"),
        ("a_key_of_next_year", 1),
        ("feed_forward_length", [96, 128]),
        ("attention.head_count", [4, 2]),
        ("attention.head_count_kv", [2, 1]),
    ],
)
def test_a_key_that_would_change_results(tmp_path, name, value):
    message = refusal(tmp_path, {name: value})
    assert message.startswith(
        f"{tmp_path / 'model.gguf'} has llama.{name} {value!r} in its metadata, which is not "
        "supported for architecture llama"
    )


def test_yarn_with_a_part_that_is_not_computed(tmp_path):
    for name in ("yarn_ext_factor", "yarn_attn_factor"):
        keys = {"rope.scaling.type": "yarn", f"rope.scaling.{name}": 0.5}
        assert f"has llama.rope.scaling.{name} 0.5 in its metadata" in refusal(tmp_path, keys)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expert_count", 0),
        ("logit_scale", 0.0),
        ("attention.causal", True),
        ("attention.clamp_kqv", 0.0),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("pooling_type", 0),
        ("vocab_size", 96),
        ("tensor_data_layout", "Meta AI original pth"),
        ("rope.scaling.finetuned", True),
        ("rope.scaling.attn_factor", 1.0),
        ("rope.dimension_count", 16),
    ],
)
def test_a_key_that_changes_nothing(tmp_path, name, value):
    assert config_of(tmp_path, {name: value}) == config_of(tmp_path)


def test_other_refusals(tmp_path):
    assert "partial_rotary_factor 0.5" in refusal(tmp_path, {"rope.dimension_count": 8})
    assert "has no llama.context_length in its metadata" in refusal(
        tmp_path, {"context_length": None}
    )
    assert "GGUF architecture 'gemma', which is not supported. Supported: llama, qwen2, qwen3" in (
        refusal(tmp_path, {}, architecture="gemma")
    )
    assert "holds no model: it has no token_embd.weight" in refusal(tmp_path, {}, tensors={})


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_numbers_that_are_not_finite(tmp_path, dtype):
    weight = np.ones((96, 64), dtype=dtype)
    weight[3, 5] = np.nan
    path = write(tmp_path / "model.gguf", tensors={"token_embd.weight": weight})
    with pytest.raises(ValueError, match=r"model\.gguf holds NaN or infinity in token_embd\.weig"):
        list(load_weights(path))


def test_a_tensor_of_integers(tmp_path):
    tensors = {**TENSORS, "blk.0.attn_q.weight": np.ones((64, 64), dtype=np.int8)}
    path = write(tmp_path / "model.gguf", tensors=tensors)
    with pytest.raises(ValueError, match=r"holds blk\.0\.attn_q\.weight as I8, which is not supp"):
        list(load_weights(path))


# -- parts --


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model in three files, as llama.cpp's gguf-split writes them."""
    names = ["output_norm.weight", "blk.0.attn_norm.weight"]
    tensors: list[dict[str, np.ndarray[Any, Any]]] = [TENSORS]
    tensors += [{name: np.full(64, i + 2, dtype=np.float32)} for i, name in enumerate(names)]
    paths = [tmp_path / f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    nothing = dict.fromkeys(METADATA)
    for i, path in enumerate(paths):
        split = {"no": i, "count": 3, "tensors.count": 3}
        write(path, nothing if i else {}, tensors[i], **split)
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_all_parts_are_read_whichever_is_named(parts, given):
    path = resolve(str(parts[given]))
    assert path == parts[0]
    assert load_config(path).num_layers == 2
    weights = dict(load_weights(path))
    assert list(weights) == [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
    ]
    assert torch.equal(weights["model.norm.weight"], torch.full((64,), 2.0))
    assert torch.equal(weights["model.layers.0.input_layernorm.weight"], torch.full((64,), 3.0))


def test_a_missing_part(parts):
    parts[1].unlink()
    with pytest.raises(FileNotFoundError) as refused:
        resolve(str(parts[0]))
    assert str(refused.value) == (
        f"{parts[0]} is one of 3 parts of a model. Missing beside it: model-00002-of-00003.gguf"
    )


def test_a_broken_part(parts):
    parts[2].write_bytes(parts[2].read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model-00003-of-00003\.gguf is cut short"):
        list(load_weights(parts[0]))


def test_parts_with_wrong_names(parts):
    alone = parts[0].with_name("model.gguf")
    parts[0].rename(alone)
    with pytest.raises(ValueError, match=r"model\.gguf is part 1 of 3 by its metadata\. Parts mu"):
        load_config(alone)
    alone.rename(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.gguf is part 3 of 3 by its meta"):
        load_config(parts[0])


def test_parts_of_two_models(parts):
    write(parts[1], dict.fromkeys(METADATA), {}, no=1, count=3)
    with pytest.raises(ValueError, match="hold 2 tensors instead of 3: they are not parts of one"):
        load_config(parts[0])
