"""LoRA adapters with random weights, stored as PEFT stores them."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tritium.backend.runner.models import ModelConfig

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Projection -> (out_features, in_features)."""
    hidden, intermediate = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def write_adapter(
    directory: Path,
    model: ModelConfig,
    targets: tuple[str, ...] = ALL,
    rank: int = 4,
    layers: range | None = None,
    std: float = 0.3,
    seed: int = 0,
    **options: Any,
) -> Path:
    """Write an adapter for some projections of some layers; `layers` None: all layers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(model.num_layers) if layers is None else layers:
        for module, (out_features, in_features) in shapes(model).items():
            if module.rpartition(".")[2] in targets:
                name = f"base_model.model.model.layers.{layer}.{module}"
                for kind, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
                    weight = torch.randn(shape, generator=generator) * std
                    tensors[f"{name}.lora_{kind}.weight"] = weight
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "some/base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "target_modules": list(targets),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None if layers is None else list(layers),
        "qalora_group_size": 16,
        "task_type": "CAUSAL_LM",
        **options,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merged(weights: dict[str, Tensor], directory: Path, scaling: float) -> dict[str, Tensor]:
    """The model's weights merged with an adapter: W + scaling * B @ A."""
    weights = dict(weights)
    adapter = load_file(directory / "adapter_model.safetensors")
    for name, a in adapter.items():
        if found := re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name):
            b = adapter[name.replace("lora_A", "lora_B")]
            module = f"{found[1]}.weight"
            weights[module] = weights[module] + scaling * b @ a
    return weights
