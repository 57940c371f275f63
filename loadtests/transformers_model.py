"""transformers' model of a GGUF file: a baseline for speed, and the reference of tests."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tritium.backend.runner.models.gguf_file import GGUFFile
from tritium.backend.runner.models.loader import load_weights


def transformers_model(path: Path, dtype: torch.dtype) -> Any:
    """The model, ready to generate answers of forced lengths.

    transformers' own loader of GGUF files needs another package and takes ten times as long.
    """
    model = AutoModelForCausalLM.from_config(GGUFFile(path).hf_config(), dtype=dtype)
    loaded = model.load_state_dict(dict(load_weights(path)), strict=False)
    assert loaded.missing_keys in ([], ["lm_head.weight"]), loaded  # if the output weights are tied
    assert not loaded.unexpected_keys, loaded
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model.eval()
