"""The models that Tritium runs: built from a checkpoint, without transformers' own modules."""

import torch

from tritium.backend.runner.models.architectures import read_model_config
from tritium.backend.runner.models.config import ModelConfig
from tritium.backend.runner.models.decoder import DecoderModel
from tritium.backend.runner.models.loader import load_config, load_weights, resolve

__all__ = ["DecoderModel", "ModelConfig", "load_model", "read_model_config"]


def load_model(
    model: str,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
    weight_bits: int = 16,
    max_model_len: int | None = None,
) -> DecoderModel:
    """Load a model onto a device.

    Args:
        model: A directory, a .gguf file, `package:NAME/PATH` or a name; see `loader.resolve`.
        batch_invariant: See `DecoderModel`.
        weight_bits: See `DecoderModel`.
        max_model_len: See `architectures.read_model_config`.

    Raises:
        FileNotFoundError: the model, or a part of it, does not exist.
        ValueError: the model is not supported, or its weights do not match its config.
    """
    path = resolve(model)
    config = load_config(path, max_model_len)
    weights = load_weights(path, config)
    return DecoderModel(config, weights, dtype, device, batch_invariant, weight_bits)
