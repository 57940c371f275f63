"""From a checkpoint's config to the shape that the decoder reads: one function per architecture.

Every key of the config is read here, or known not to change a result, or refused by name: a model
that would be computed wrongly is not loaded.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from tritium.backend.runner.models.config import ExpertsConfig, ModelConfig, WeightNames
from tritium.backend.runner.models.quantized import read_quantization
from tritium.backend.runner.models.rope import Rope, max_positions, no_rope, read_rope
from tritium.backend.runner.models.unsupported import UnsupportedModel

# Keys that change no result: about training, saving, other software, sampling (that of
# generation_config.json is not used either), or repeated by other keys.
_HARMLESS = """
    _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled _model_name_or_path
    _name_or_path add_cross_attention architectures attention_dropout attention_probs_dropout_prob
    attn_implementation attn_pdrop auto_map bad_words_ids begin_suppress_tokens bos_token_id
    cache_implementation chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size
    eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing hidden_dropout hidden_dropout_prob id2label
    initializer_range is_decoder is_encoder_decoder is_llama_config label2id length_penalty license
    max_length max_seq_len max_seq_length max_sequence_length min_length model_max_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty resid_pdrop residual_dropout
    return_dict return_dict_in_generate router_aux_loss_coef sep_token_id seq_length suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p
    torch_dtype torchscript transformers.js_config transformers_version typical_p unk_token_id
    unsloth_fixed unsloth_version use_bfloat16 use_cache use_mrope
"""
# What models that also see images say about those.
_VISION = """
    boi_token_index eoi_token_index image_token_id image_token_index mm_tokens_per_image
    multimodal_projector_bias projector_hidden_act spatial_merge_size text_config video_token_id
    vision_config vision_end_token_id vision_feature_layer vision_start_token_id vision_token_id
"""
_OFF: tuple[object, ...] = (None, False, "", [], {})  # the values of a key that switch nothing on
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
}
_PARTLY_ROTATED = ("phi3",)  # the others ignore partial_rotary_factor
# Beginnings of names where a model also sees images: of its text's weights, and of the others.
_RENAMED = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_IGNORED = (
    "visual.",
    "model.visual.",
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
)


class _Reader:
    """Reads a transformers config and remembers which keys were read."""

    def __init__(self, hf_config: Any, given: Mapping[str, Any], max_model_len: int | None) -> None:
        self.config = hf_config
        self.max_model_len = max_model_len
        self._given = given
        self._read: set[str] = set()

    def __call__(self, name: str, *default: Any) -> Any:
        self._read.add(name)
        return getattr(self.config, name, *default)

    def mark(self, *names: str) -> None:
        """These keys have been read, too."""
        self._read.update(names)

    def refuse_others(self) -> None:
        """Raise ValueError if the checkpoint's config has keys that nobody has read."""
        known = self._read.union(_HARMLESS.split())
        for name, value in self._given.items():
            if name not in known and value not in _OFF:
                raise UnsupportedModel(
                    f"The model has {name} {value!r:.100} in its config, which is not supported "
                    f"for model_type {self.config.model_type}."
                )


_Fields = dict[str, Any]


def _llama(read: _Reader) -> _Fields:
    bias = bool(read("attention_bias", False))
    return {"attention_bias": bias, "o_bias": bias, "mlp_bias": bool(read("mlp_bias", False))}


def _mistral(read: _Reader) -> _Fields:
    return {"windows": (read("sliding_window"),) * read("num_hidden_layers")}


def _qwen2(read: _Reader) -> _Fields:
    read.mark("attention_bias", "use_sliding_window", "max_window_layers", "sliding_window")
    return {"attention_bias": True}  # its config does not list its biases


def _qwen3(read: _Reader) -> _Fields:
    return {**_qwen2(read), **_llama(read), "qk_norm": "head"}


def _mixtral(read: _Reader) -> _Fields:
    read.mark("router_jitter_noise")  # of training
    num_layers = read("num_hidden_layers")
    experts = ExpertsConfig(
        num_experts=read("num_local_experts"),
        num_per_token=read("num_experts_per_tok"),
        intermediate_size=read("intermediate_size"),
        is_normalised=True,
        layers=(True,) * num_layers,
        module="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )
    return {**_mistral(read), "experts": experts}


def _qwen_experts(read: _Reader) -> ExpertsConfig:
    read.mark("num_local_experts")  # a second name
    num_experts, step = read("num_experts"), read("decoder_sparse_step")
    dense = read("mlp_only_layers")
    layers = (
        i not in dense and num_experts > 0 and (i + 1) % step == 0
        for i in range(read("num_hidden_layers"))
    )
    return ExpertsConfig(
        num_experts=num_experts,
        num_per_token=read("num_experts_per_tok"),
        intermediate_size=read("moe_intermediate_size"),
        is_normalised=bool(read("norm_topk_prob")),
        layers=tuple(layers),
        shared_size=read("shared_expert_intermediate_size", 0),
    )


def _qwen2_moe(read: _Reader) -> _Fields:
    bias = bool(read("qkv_bias"))
    return {**_qwen2(read), "attention_bias": bias, "experts": _qwen_experts(read)}


def _qwen3_moe(read: _Reader) -> _Fields:
    window = read("sliding_window") or None  # in all layers
    return {
        **_qwen3(read),
        "windows": (window,) * read("num_hidden_layers"),
        "experts": _qwen_experts(read),
    }


def _smollm3(read: _Reader) -> _Fields:
    read.mark("use_sliding_window", "max_window_layers", "sliding_window")
    read.mark("no_rope_layer_interval")
    rotates = read("no_rope_layers")[: read("num_hidden_layers")]  # 1: a layer with positions
    head_dim = _head_dim(read)
    return {
        **_llama(read),
        "ropes": (_rope(read, read("rope_parameters"), None), no_rope(head_dim)),
        "layer_ropes": tuple(0 if rotated else 1 for rotated in rotates),
    }


def _granite(read: _Reader) -> _Fields:
    return {
        **_llama(read),
        "attention_scale": read("attention_multiplier"),
        "embedding_multiplier": read("embedding_multiplier"),
        "residual_multiplier": read("residual_multiplier"),
        "logits_divisor": read("logits_scaling"),
    }


def _olmo2(read: _Reader) -> _Fields:
    names = WeightNames(
        attention_norm=None,
        attention_out_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_out_norm="post_feedforward_layernorm",
    )
    return {**_llama(read), "qk_norm": "projection", "names": names}


def _seed_oss(read: _Reader) -> _Fields:
    return {**_llama(read), "o_bias": bool(read("attention_out_bias"))}


def _ernie(read: _Reader) -> _Fields:
    bias = bool(read("use_bias"))
    return {
        "attention_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "is_rope_interleaved": True,
    }


def _arcee(read: _Reader) -> _Fields:
    return {**_llama(read), "is_gated": False, "names": WeightNames(gate_up=("up_proj",))}


def _phi3(read: _Reader) -> _Fields:
    read.mark("original_max_position_embeddings", "partial_rotary_factor")
    read.mark("full_attn_mod", "interpolate_factor")  # of Phi-4-mini: 1, and read by nobody
    return {**_mistral(read), "names": WeightNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))}


def _gemma(read: _Reader) -> _Fields:
    read.mark("hidden_act")
    return {
        "attention_bias": bool(read("attention_bias")),
        "o_bias": bool(read("attention_bias")),
        "activation": _activation(read, "hidden_activation", "hidden_act"),
        "embedding_multiplier": read("hidden_size") ** 0.5,
        "norm_offset": 1.0,
    }


def _gemma2(read: _Reader) -> _Fields:
    names = WeightNames(
        attention_out_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_out_norm="post_feedforward_layernorm",
    )
    return {
        **_gemma(read),
        "attention_scale": read("query_pre_attn_scalar") ** -0.5,
        "attention_soft_cap": read("attn_logit_softcapping"),
        "logit_soft_cap": read("final_logit_softcapping"),
        "names": names,
    }


def _gemma3(read: _Reader) -> _Fields:
    read.mark("sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq")
    return {
        **_gemma2(read),
        "qk_norm": "head",
        # Includes what scaling adds.
        "max_position_embeddings": read("max_position_embeddings"),
    }


def _with_images(text: Callable[[_Reader], _Fields]) -> Callable[[_Reader], _Fields]:
    """Of a model that also sees images, the part that reads and writes text."""

    def read_text(read: _Reader) -> _Fields:
        read.mark(*_VISION.split())
        fields = text(read)
        names: WeightNames = fields.get("names", WeightNames())
        return {**fields, "names": replace(names, renamed=_RENAMED, ignored=_IGNORED)}

    return read_text


_ARCHITECTURES: dict[str, Callable[[_Reader], _Fields]] = {
    "arcee": _arcee,
    "ernie4_5": _ernie,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _with_images(_gemma3),
    "gemma3_text": _gemma3,
    "granite": _granite,
    "llama": _llama,
    "mistral": _mistral,
    "mistral3": _with_images(_mistral),
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_5_vl": _with_images(_qwen2),
    "qwen2_vl": _with_images(_qwen2),
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl": _with_images(_qwen3),
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
}
# Types of the text's config inside those of models that see images.
_TEXT_TYPES = {
    "gemma3": ("gemma3_text",),
    "mistral3": ("mistral",),
    "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen2_vl": ("qwen2_vl_text",),
    "qwen3_vl": ("qwen3_vl_text",),
}
SUPPORTED_MODEL_TYPES = tuple(_ARCHITECTURES)


def read_model_config(
    hf_config: Any,
    eos_token_ids: Iterable[int] = (),
    given: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
) -> ModelConfig:
    """Read a transformers config (`AutoConfig`).

    Args:
        eos_token_ids: Additional ids (from generation_config.json).
        given: The checkpoint's config.json; None: what the config itself has.
        max_model_len: Tokens of the longest sequence; None: as many as the model has positions.

    Raises:
        ValueError: the model needs an unsupported feature; the message names it and what is
            supported.
    """
    model_type = hf_config.model_type
    require("model_type", model_type, SUPPORTED_MODEL_TYPES)
    given = dict(hf_config.to_dict() if given is None else given)
    text, tied = hf_config, given.get("tie_word_embeddings")
    if model_type in _TEXT_TYPES:
        text = hf_config.text_config
        require("text_config's model_type", text.model_type, _TEXT_TYPES[model_type])
        given |= given.get("text_config") or {}
    read = _Reader(text, given, max_model_len)
    if tied is None:
        tied = given.get("tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
    read.mark("tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters")
    fields = _common(read) | _ARCHITECTURES[model_type](read)
    if quantization := given.get("quantization_config"):
        read.mark("quantization_config")
        fields["quantization"] = read_quantization(quantization)
    read.refuse_others()
    ends = [
        token_id
        for config in (text, hf_config)
        for token_id in as_token_ids(getattr(config, "eos_token_id", None))
    ]
    fields["eos_token_ids"] = tuple(dict.fromkeys([*ends, *eos_token_ids]))
    fields["tie_word_embeddings"] = bool(tied)
    return ModelConfig(**fields)


def require(name: str, found: object, supported: Collection[object]) -> None:
    """Raise ValueError, with all three arguments, if the value found is not supported."""
    if found not in supported:
        refuse(name, found, supported)


def refuse(name: str, found: object, supported: Collection[object]) -> NoReturn:
    """Raise ValueError with all three arguments."""
    listed = ", ".join(map(str, supported))
    raise UnsupportedModel(
        f"The model has {name} {found!r}, which is not supported. Supported: {listed}."
    )


def as_token_ids(value: int | list[int] | None) -> list[int]:
    """The three forms of `eos_token_id` in configs, as a list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _common(read: _Reader) -> _Fields:
    """What most architectures say alike."""
    num_layers, head_dim = read("num_hidden_layers"), _head_dim(read)
    layer_types = read("layer_types", None) or ["full_attention"] * num_layers
    for layer_type in layer_types:
        require("layer_types", layer_type, ("full_attention", "sliding_attention"))
    num_heads = read("num_attention_heads")
    num_kv_heads = read("num_key_value_heads", None) or num_heads
    if num_heads % num_kv_heads:
        refuse("num_key_value_heads", num_kv_heads, [f"divisors of {num_heads} heads"])
    window = read("sliding_window", None) if "sliding_attention" in layer_types else None
    parameters = read("rope_parameters")
    if set(parameters) & set(layer_types):  # one for each type of layers
        kinds = sorted(set(layer_types))
        ropes = [_rope(read, parameters[kind], kind) for kind in kinds]
        layer_ropes = [kinds.index(layer_type) for layer_type in layer_types]
    else:
        ropes, layer_ropes = [_rope(read, parameters, None)], [0] * num_layers
    return {
        "vocab_size": read("vocab_size"),
        "hidden_size": read("hidden_size"),
        "intermediate_size": read("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": read("rms_norm_eps"),
        "max_position_embeddings": max_positions(read("max_position_embeddings"), parameters),
        "ropes": tuple(ropes),
        "layer_ropes": tuple(layer_ropes),
        "windows": tuple(window if kind == "sliding_attention" else None for kind in layer_types),
        "attention_scale": head_dim**-0.5,
        "activation": _activation(read, "hidden_act", "hidden_activation"),
    }


def _head_dim(read: _Reader) -> int:
    head_dim: int | None = read("head_dim", None)
    return head_dim or read("hidden_size") // read("num_attention_heads")


def _activation(read: _Reader, *names: str) -> str:
    """The activation by the first of these keys that the config has."""
    found = next(value for name in names if (value := read(name, None)))
    require(names[0], found, _ACTIVATIONS)
    return _ACTIVATIONS[found]


def _rope(read: _Reader, parameters: Mapping[str, Any], layer_type: str | None) -> Rope:
    if read.config.model_type not in _PARTLY_ROTATED:
        require("partial_rotary_factor", parameters.get("partial_rotary_factor") or 1.0, (1.0,))
    length = read.max_model_len or max_positions(read("max_position_embeddings"), parameters)
    return read_rope(read.config, parameters, _head_dim(read), length, layer_type)
