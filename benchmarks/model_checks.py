"""Every supported architecture against transformers: the table of docs/models.md.

Each is a random model in the architecture's shape, made and saved by transformers, whose numbers
are all drawn at random: biases of 0 and norms of 1 would hide an error. Loaded from its folder, it
must choose the same tokens as transformers in float32.
"""

import copy
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tritium.backend.config import EngineConfig
from tritium.backend.runner.model_runner import ModelRunner
from tritium.backend.runner.models import DecoderModel, load_model
from tritium.benchmarks.batches import BLOCK_SIZE, metadata_of
from tritium.benchmarks.engine_runs import Work, generate, make_engine
from tritium.benchmarks.quantized_models import Format, formats, save
from tritium.kernels import KVCache

PROMPT_LENS = (3, 17, 40)  # beyond all the windows below
NUM_TOKENS = 24
_VOCAB_SIZE = 160
_SIZES = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WINDOW = {"sliding_window": 9}
_VISION = {  # as small as transformers allows
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 128,
}


class Checked(NamedTuple):
    """An architecture, and what of it is checked."""

    model_type: str
    example: str  # a well-known model of this shape
    shape: str  # what differs from Llama
    config: PretrainedConfig


class Result(NamedTuple):
    """What a model generated."""

    num_equal: int  # tokens equal to transformers' in float32
    num_tokens: int
    # In bfloat16, ||difference|| / ||logits|| of the prompts' tokens: ours, and transformers'.
    error: float
    their_error: float


def _config(name: str, **changes: Any) -> PretrainedConfig:
    config: PretrainedConfig = getattr(transformers, name)(**_SIZES | changes)
    return config


def _vision_config(name: str, text: dict[str, Any], **changes: Any) -> PretrainedConfig:
    config: PretrainedConfig = getattr(transformers, name)(
        text_config={**_SIZES, **text}, **changes
    )
    return config


def architectures() -> Iterator[Checked]:
    """All of them, in the order of the table."""
    yield Checked("llama", "Llama 2, 3, SmolLM2", "", _config("LlamaConfig"))
    yield Checked(
        "mistral", "Mistral 7B", "a window in all layers", _config("MistralConfig", **_WINDOW)
    )
    yield Checked(
        "qwen2",
        "Qwen2.5",
        "biases of q, k, v; windows in some layers",
        _config("Qwen2Config", **_WINDOW, use_sliding_window=True, max_window_layers=2),
    )
    yield Checked("qwen3", "Qwen3", "norms of queries and keys", _config("Qwen3Config"))
    yield Checked(
        "mixtral",
        "Mixtral 8x7B",
        "mixture of experts",
        _config("MixtralConfig", num_local_experts=4),
    )
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    yield Checked(
        "qwen2_moe",
        "Qwen1.5-MoE-A2.7B",
        "mixture of experts, one of them for all tokens",
        _config("Qwen2MoeConfig", **experts, shared_expert_intermediate_size=96),
    )
    yield Checked(
        "qwen3_moe",
        "Qwen3-30B-A3B",
        "mixture of experts, in some layers",
        _config("Qwen3MoeConfig", **experts, norm_topk_prob=True, mlp_only_layers=[1]),
    )
    yield Checked(
        "smollm3",
        "SmolLM3",
        "every fourth layer without positions",
        _config("SmolLM3Config", no_rope_layer_interval=4),
    )
    yield Checked(
        "granite",
        "Granite 3",
        "multipliers of embeddings, scores, residuals and logits",
        _config(
            "GraniteConfig",
            embedding_multiplier=12.0,
            attention_multiplier=0.1,
            residual_multiplier=0.22,
            logits_scaling=8.0,
        ),
    )
    yield Checked(
        "olmo2", "OLMo 2", "norms behind the blocks; norms of all q, k", _config("Olmo2Config")
    )
    yield Checked(
        "seed_oss",
        "Seed-OSS",
        "biases of q, k, v, or of the output",
        _config("SeedOssConfig", head_dim=32, attention_out_bias=True),
    )
    yield Checked(
        "ernie4_5",
        "ERNIE 4.5",
        "rotates neighbours",
        _config("Ernie4_5Config", head_dim=32, use_bias=True),
    )
    yield Checked("arcee", "AFM 4.5B", "squared ReLU, no gate", _config("ArceeConfig"))
    yield Checked(
        "phi3",
        "Phi-3, Phi-4-mini",
        "fused projections; rotates a part of a head; longrope",
        _config(
            "Phi3Config",
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + i / 16 for i in range(12)],
                "long_factor": [2.0 + i / 8 for i in range(12)],
            },
            original_max_position_embeddings=128,
        ),
    )
    yield Checked(
        "gemma", "Gemma 1.1", "GELU; scaled embeddings", _config("GemmaConfig", head_dim=32)
    )
    yield Checked(
        "gemma2",
        "Gemma 2",
        "four norms; soft caps; a window in every other layer",
        _config("Gemma2Config", **_WINDOW, head_dim=32, query_pre_attn_scalar=40),
    )
    yield Checked(
        "gemma3_text",
        "Gemma 3 1B",
        "as Gemma 2, with norms of q and k, two kinds of rotation, no soft cap",
        _config(
            "Gemma3TextConfig",
            **_WINDOW,
            head_dim=32,
            query_pre_attn_scalar=40,
            sliding_window_pattern=2,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    )
    yield from _text_of_vision()


def _text_of_vision() -> Iterator[Checked]:
    siglip = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    siglip |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    yield Checked(
        "gemma3",
        "Gemma 3 4B",
        "text only",
        _vision_config(
            "Gemma3Config",
            {**_WINDOW, "head_dim": 32, "sliding_window_pattern": 2},
            vision_config=siglip,
            mm_tokens_per_image=4,
        ),
    )
    yield Checked(
        "mistral3",
        "Mistral Small 3.1",
        "text only",
        _vision_config(
            "Mistral3Config",
            {"model_type": "mistral", "head_dim": 32},
            vision_config={"model_type": "pixtral", **siglip, "head_dim": 16},
        ),
    )
    sections = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    yield Checked(
        "qwen2_vl",
        "Qwen2-VL",
        "text only",
        _vision_config(
            "Qwen2VLConfig",
            {"rope_parameters": dict(sections)},
            vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 128, "num_heads": 2},
        ),
    )
    yield Checked(
        "qwen2_5_vl",
        "Qwen2.5-VL",
        "text only",
        _vision_config(
            "Qwen2_5_VLConfig", {"rope_parameters": dict(sections)}, vision_config=dict(_VISION)
        ),
    )
    yield Checked(
        "qwen3_vl",
        "Qwen3-VL",
        "text only",
        _vision_config(
            "Qwen3VLConfig",
            {"rope_parameters": {**sections, "mrope_interleaved": True}, "head_dim": 32},
            vision_config={**_VISION, "deepstack_visual_indexes": [0]},
        ),
    )


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """transformers' model with this config, with random weights, in float32."""
    torch.manual_seed(0)
    kind = (
        transformers.AutoModelForImageTextToText
        if hasattr(config, "vision_config")
        else transformers.AutoModelForCausalLM
    )
    model: PreTrainedModel = kind.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.2).add_(1.0 if "norm" in name else 0.0)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    sizes = [(length,) for length in PROMPT_LENS]
    return [torch.randint(_VOCAB_SIZE, size, generator=generator).tolist() for size in sizes]


def check(checked: Checked, form: Format | None = None) -> Result:
    """Generate with the engine from the saved model, and compare with transformers' model.

    Args:
        form: The format of the saved weights, to which both models' are rounded; None: float32.
    """
    model = random_model(checked.config)
    work = [Work(prompt, NUM_TOKENS) for prompt in prompts()]
    with tempfile.TemporaryDirectory() as folder:
        if form:
            save(model, folder, form)
        else:
            model.save_pretrained(folder)
        settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4}
        config = EngineConfig(model=folder, kv_cache_memory=2**24, **settings)
        ours = generate(make_engine(config, ModelRunner(config)), work)
        ours_rounded = load_model(folder, torch.bfloat16, torch.device("cpu"))
    theirs = [_greedy(model, w.prompt) for w in work]
    equal = [a == b for pair in zip(ours, theirs, strict=True) for a, b in zip(*pair, strict=True)]
    rounded = copy.deepcopy(model)
    rounded.bfloat16()
    errors = [
        max(_difference(logits(w.prompt), _logits(model, w.prompt)) for w in work)
        for logits in (partial(_our_logits, ours_rounded), partial(_logits, rounded))
    ]
    return Result(sum(equal), len(equal), *errors)


@torch.inference_mode()
def _greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """The most likely next token, NUM_TOKENS times."""
    token_ids = list(prompt)
    for _ in range(NUM_TOKENS):
        token_ids.append(int(_logits(model, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


@torch.inference_mode()
def _logits(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    """[num_tokens, vocab_size] of a prompt."""
    logits: Tensor = model(torch.tensor([prompt])).logits[0]
    return logits


def _difference(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())


@torch.inference_mode()
def _our_logits(model: DecoderModel, prompt: list[int]) -> Tensor:
    """[num_tokens, vocab_size] float32 of a prompt."""
    config, num_tokens = model.config, len(prompt)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    caches = [
        KVCache.empty(num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim, model.dtype)
        for _ in range(config.num_layers)
    ]
    blocks = torch.arange(num_blocks)[None]
    metadata = metadata_of([(num_tokens, num_tokens)], blocks, model.device)
    token_ids = torch.tensor(prompt)
    hidden = model.forward(token_ids, torch.arange(num_tokens), caches, metadata)
    return model.compute_logits(hidden)


def quantization_table() -> str:
    """The table of quantised formats in docs/models.md."""
    llama = next(architectures())
    rows = [
        "| format | tokens equal | error in bfloat16 | transformers' error |",
        "|---|---|---|---|",
    ]
    rows += [f"| {form.name} | {_shown(check(llama, form))} |" for form in formats()]
    return "\n".join(rows)


def _shown(result: Result) -> str:
    equal = f"{result.num_equal} of {result.num_tokens}"
    return f"{equal} | {result.error:.3f} | {result.their_error:.3f}"


def table() -> str:
    """The table of architectures in docs/models.md."""
    rows = [
        "| `model_type` | such as | what it needs | tokens equal | error in bfloat16 | "
        "transformers' error |",
        "|---|---|---|---|---|---|",
    ]
    rows += [
        f"| `{c.model_type}` | {c.example} | {c.shape} | {_shown(check(c))} |"
        for c in architectures()
    ]
    return "\n".join(rows)
