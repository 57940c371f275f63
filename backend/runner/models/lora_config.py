"""Reads adapter_config.json, PEFT's description of a LoRA adapter.

Every key is read here, or known not to change what PEFT computes when it loads the adapter, or
refused by name. Facts: peft/tuners/lora/config.py and layer.py of PEFT 0.21.
"""

import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from tritium.backend.files import read_json

# About training, about which modules are changed (the weights' names say it, too), or used only
# with an `init_lora_weights` that is refused.
_HARMLESS = [
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "merge_weights",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
]
_OFF: tuple[object, ...] = (None, False, "", [], {})  # the values of a key that switch nothing on


class PeftConfig(BaseModel):
    """The part of PEFT's LoraConfig that determines the computation."""

    peft_type: Literal["LORA"]
    r: int = Field(ge=1)
    lora_alpha: float = Field(allow_inf_nan=False)
    use_rslora: bool = False
    bias: Literal["none"] = "none"
    target_modules: list[str] | str | None = None  # a string is a pattern, or "all-linear"
    base_model_name_or_path: str | None = None
    # The first two take a part off the base weights (see `lora_start.py`), the others nothing.
    # Refused are those that PEFT itself can't repeat: corda, and pissa_niter_N, which is random;
    # and loftq, which rounds the base weights.
    init_lora_weights: (
        bool | Literal["pissa", "olora", "gaussian", "eva", "orthogonal", "mica", "lora_ga"]
    ) = True

    @property
    def scaling(self) -> float:
        """What B @ A is multiplied with."""
        # The square root: rank-stabilised LoRA (Kalajdzievski, 2023).
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    @property
    def listed_targets(self) -> list[str]:
        """The modules that it changes, as far as they are listed."""
        return self.target_modules if isinstance(self.target_modules, list) else []

    @property
    def made_for(self) -> str:
        """For errors."""
        base = self.base_model_name_or_path
        return f" (it was made for {base})" if base else ""


def read_peft_config(path: Path) -> PeftConfig:
    """Read an adapter_config.json.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or not supported; names the key and its value.
    """
    values = read_json(path)
    try:
        config = PeftConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors()[0]
        name = next(iter(details["loc"]), "it")
        value = values.get(name, values) if isinstance(name, str) else values
        raise ValueError(f"{path.name}: {name} can't be {value!r:.100}. {details['msg']}") from None
    known = {*PeftConfig.model_fields, *_HARMLESS}
    for name, value in values.items():
        if name not in known and value not in _OFF:
            raise ValueError(f"{path.name}: {name} {value!r:.100} is not supported")
    return config
