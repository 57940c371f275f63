"""Every architecture of docs/models.md: the tokens of transformers, and what is refused."""

import re

import pytest
from transformers import GraniteConfig, LlamaConfig, Phi3Config, SmolLM3Config

from tritium.backend.runner.models import read_model_config
from tritium.backend.runner.models.architectures import SUPPORTED_MODEL_TYPES
from tritium.benchmarks.model_checks import Checked, architectures, check
from tritium.benchmarks.quantized_models import Format, formats

ARCHITECTURES = list(architectures())
FORMATS = list(formats())


@pytest.mark.slow
@pytest.mark.parametrize("checked", ARCHITECTURES, ids=[c.model_type for c in ARCHITECTURES])
def test_the_tokens_are_those_of_transformers(checked: Checked) -> None:
    result = check(checked)
    assert result.num_equal == result.num_tokens == 72
    assert result.error < 1.5 * result.their_error


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS, ids=[form.name for form in FORMATS])
def test_quantised_checkpoints(form: Format) -> None:
    result = check(ARCHITECTURES[0], form)
    assert result.num_equal == result.num_tokens == 72
    assert result.error < 1.5 * result.their_error


def test_every_architecture_is_checked() -> None:
    assert {c.model_type for c in ARCHITECTURES} == set(SUPPORTED_MODEL_TYPES)


# -- what would change a result, and is not computed, is refused by name --


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_factor", 2.0),
        ("no_rope_layers", [1, 0]),
        ("logits_scaling", 8.0),
        ("residual_multiplier", 0.22),
        ("final_logit_softcapping", 30.0),
        ("num_local_experts", 8),
        ("sliding_window", 4096),
        ("never_heard_of", 1),
    ],
)
def test_unknown_key_of_a_config(key: str, value: object) -> None:
    config = LlamaConfig()
    given = {"model_type": "llama", key: value}
    with pytest.raises(ValueError, match=f"{key} {re.escape(repr(value))} in its config"):
        read_model_config(config, given=given)


@pytest.mark.parametrize("off", [None, False, [], ""])
def test_unknown_key_that_switches_nothing_on(off: object) -> None:
    read_model_config(LlamaConfig(), given={"model_type": "llama", "never_heard_of": off})


# What published config.json files have beyond the keys of transformers' own classes.
PUBLISHED = {
    "smollm2": (
        LlamaConfig(),
        {
            "is_llama_config": True,
            "rope_interleaved": False,
            "transformers.js_config": {"kv_cache_dtype": {}},
            "pretraining_tp": 1,
        },
    ),
    "vicuna": (LlamaConfig(), {"max_sequence_length": 2048, "_name_or_path": "vicuna"}),
    "smollm3": (SmolLM3Config(), {"max_window_layers": 28, "pretraining_tp": 2}),
    "phi-4-mini": (
        Phi3Config(),
        {
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "resid_pdrop": 0.1,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_of_published_configs(name: str) -> None:
    config, keys = PUBLISHED[name]
    read_model_config(config, given=config.to_dict() | keys)


def test_interleaved_rotation_is_refused_where_it_is_not_the_architecture_s() -> None:
    with pytest.raises(ValueError, match="rope_interleaved True in its config"):
        read_model_config(LlamaConfig(), given={"rope_interleaved": True})


def test_unknown_key_of_rope_parameters() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attn_factor": 0.7}
    config = LlamaConfig(rope_parameters=yarn)
    with pytest.raises(ValueError, match=r"attn_factor 0\.7 in its rope_parameters"):
        read_model_config(config)


# -- length --


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "linear", "factor": 2.5}, 160),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        ({"rope_type": "default"}, 64),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            64,
        ),
    ],
)
def test_positions_with_scaling(rope: dict, positions: int) -> None:
    config = LlamaConfig(max_position_embeddings=64, rope_parameters={"rope_theta": 1e4, **rope})
    assert read_model_config(config).max_position_embeddings == positions


def test_dynamic_frequencies_are_those_of_the_longest_sequence() -> None:
    """Within the original positions they are not scaled."""
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = LlamaConfig(max_position_embeddings=64, rope_parameters=dict(parameters))
    plain = read_model_config(LlamaConfig(max_position_embeddings=64)).ropes[0].inv_freq
    assert read_model_config(config, max_model_len=64).ropes[0].inv_freq == plain
    # theta * (2 * 128 / 64 - 1) ** (128 / 126)
    scaled = read_model_config(config).ropes[0].inv_freq
    assert scaled[1] == pytest.approx((1e4 * 3 ** (128 / 126)) ** (-2 / 128), rel=1e-6)


def test_longrope_factors_are_those_of_the_longest_sequence() -> None:
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 48,
        "long_factor": [4.0] * 48,
    }
    config = Phi3Config(
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters=dict(parameters),
    )
    assert read_model_config(config, max_model_len=64).ropes[0].inv_freq[0] == 1.0
    assert read_model_config(config, max_model_len=65).ropes[0].inv_freq[0] == 0.25


# -- the shape --


def test_layers_without_positions() -> None:
    config = read_model_config(SmolLM3Config(num_hidden_layers=5, no_rope_layers=[1, 0, 1, 1, 0]))
    assert config.layer_ropes == (0, 1, 0, 0, 1)
    assert set(config.ropes[1].inv_freq) == {0.0}


def test_multipliers() -> None:
    config = read_model_config(
        GraniteConfig(
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            logits_scaling=8.0,
            attention_multiplier=0.0078125,
        )
    )
    assert config.embedding_multiplier == 12.0
    assert config.residual_multiplier == 0.22
    assert config.logits_divisor == 8.0
    assert config.attention_scale == 0.0078125


def test_swish_is_silu() -> None:
    assert read_model_config(LlamaConfig(hidden_act="swish")).activation == "silu"
