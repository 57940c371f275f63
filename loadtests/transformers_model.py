"""transformers' own model on a GGUF file: a baseline of speed, and the oracle of tests."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tritium.backend.runner.models.gguf_file import GGUFFile
from tritium.backend.runner.models.loader import load_weights


def transformers_model(path: Path, dtype: torch.dtype) -> Any:
    """The model, ready to generate answers of forced lengths.

    transformers' own way to load a GGUF file takes a package more and ten times as long.
    """
    model = AutoModelForCausalLM.from_config(GGUFFile(path).hf_config(), dtype=dtype)
    loaded = model.load_state_dict(dict(load_weights(path)), strict=False)
    assert loaded.missing_keys in ([], ["lm_head.weight"]), loaded  # where it is tied
    assert not loaded.unexpected_keys, loaded
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model.eval()
