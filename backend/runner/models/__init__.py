"""The models that Tritium runs: built from a checkpoint, without transformers' own modules."""

import torch

from tritium.backend.runner.models.config import ModelConfig
from tritium.backend.runner.models.llama import LlamaModel
from tritium.backend.runner.models.loader import load_config, load_weights, resolve

__all__ = ["LlamaModel", "ModelConfig", "load_model"]


def load_model(
    model: str,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
    weight_bits: int = 16,
) -> LlamaModel:
    """Load a model onto a device.

    Args:
        model: A directory, a .gguf file or `package:NAME/PATH`; see `loader.resolve`.
        batch_invariant: See `LlamaModel`.
        weight_bits: See `LlamaModel`.

    Raises:
        FileNotFoundError: the model, or a part of it, does not exist.
        ValueError: the model is not supported, or its weights do not match its config.
    """
    path = resolve(model)
    config, weights = load_config(path), load_weights(path)
    return LlamaModel(config, weights, dtype, device, batch_invariant, weight_bits)
