"""LoRA adapters (Hu et al., 2021), several on one model and in one batch, as PEFT stores them.

Extensions of plain LoRA that PEFT supports are refused if they would change an answer.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tritium.kernels import PackedWeight, linear

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<kind>[AB])\.weight")
_NOT_COMPUTED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)

# Name of an adapter -> the rows of a step's tokens that it changes, [n] int64.
LoraRows = Mapping[str, Tensor]


class LoraWeights(NamedTuple):
    """What an adapter adds to a projection's output: (x @ a.T) @ b.T."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [out_features, rank], times the adapter's scaling


class PackedLora(NamedTuple):
    """LoraWeights in the layout of `kernels.linear`."""

    a: Tensor | PackedWeight
    b: Tensor | PackedWeight


def add_lora(
    out: Tensor,  # [num_tokens, out_features], changed in place
    x: Tensor,  # [num_tokens, in_features]
    adapters: Mapping[str, PackedLora],  # that change this projection
    lora: LoraRows,
) -> None:
    """out[rows] += (x[rows] @ a.T) @ b.T for each of the step's adapters."""
    for name, rows in lora.items():
        weights = adapters.get(name)
        if weights is not None:
            low = linear(x.index_select(0, rows), weights.a)  # [n, rank]
            out.index_add_(0, rows, linear(low, weights.b))


def stack(parts: Mapping[str, int], adapter: Mapping[str, LoraWeights]) -> LoraWeights | None:
    """An adapter's weights for stacked projections; None if it changes none of them.

    For an adapter that changes queries and values, but not keys::

        a = [ a_q ]     b = [ b_q   0  ]
            [ a_v ]         [  0    0  ]
                            [  0   b_v ]

    Args:
        parts: Name -> out_features of each projection, in the order of stacking.
        adapter: From `read_adapter`.
    """
    changed = [adapter[part] for part in parts if part in adapter]
    if not changed:
        return None
    diagonal = [
        adapter[part].b if part in adapter else torch.zeros(size, 0) for part, size in parts.items()
    ]
    return LoraWeights(torch.cat([a for a, _ in changed]), torch.block_diag(*diagonal))


def read_adapter(directory: Path, shapes: Mapping[str, tuple[int, int]]) -> dict[str, LoraWeights]:
    """Read an adapter for a model.

    Args:
        shapes: Name in transformers -> (out_features, in_features) of the model's projections.

    Returns:
        The weights, float32 on the CPU, of each projection that the adapter changes.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the adapter is damaged, not supported, or not for this model; the message says
            why.
    """
    config = _read_config(directory / _CONFIG)
    modules = sorted({name.rpartition(".")[2] for name in shapes})
    targets = {name.rpartition(".")[2] for name in config.listed_targets}
    if unknown := sorted(targets.difference(modules)):
        raise ValueError(
            f"it targets {', '.join(unknown)}; supported target modules are {', '.join(modules)}"
        )
    tensors: dict[str, dict[str, Tensor]] = {}  # module -> A or B -> weight
    for name, tensor in _read_tensors(directory / _WEIGHTS).items():
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in shapes:
            raise ValueError(
                f"it holds {name}, which the model has no place for{config.made_for}; it may hold "
                f"lora_A and lora_B of each layer's {', '.join(modules)}"
            )
        tensors.setdefault(match["module"], {})[match["kind"]] = tensor
    if absent := targets.difference(name.rpartition(".")[2] for name in tensors):
        raise ValueError(f"it holds no weights of {', '.join(sorted(absent))}, which it targets")
    if not tensors:
        raise ValueError("it holds no weights")

    adapter = {}
    for module, pair in tensors.items():
        out_features, in_features = shapes[module]
        for kind, shape in (("A", [config.r, in_features]), ("B", [out_features, config.r])):
            name = f"{module}.lora_{kind}.weight"
            if kind not in pair:
                raise ValueError(f"it lacks {name}")
            if list(pair[kind].shape) != shape:
                raise ValueError(
                    f"{name} is {list(pair[kind].shape)}, but {shape} by the model and the "
                    f"adapter's r of {config.r}{config.made_for}"
                )
        adapter[module] = LoraWeights(pair["A"].float(), pair["B"].float() * config.scaling)
    return adapter


class _PeftConfig(BaseModel):
    """The part of PEFT's LoraConfig that determines the computation."""

    peft_type: Literal["LORA"]
    r: int = Field(ge=1)
    lora_alpha: float = Field(allow_inf_nan=False)
    use_rslora: bool = False
    bias: Literal["none"] = "none"
    target_modules: list[str] | str | None = None  # a string is a pattern, or "all-linear"
    base_model_name_or_path: str | None = None

    @property
    def scaling(self) -> float:
        # The square root: rank-stabilised LoRA (Kalajdzievski, 2023).
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    @property
    def listed_targets(self) -> list[str]:
        return self.target_modules if isinstance(self.target_modules, list) else []

    @property
    def made_for(self) -> str:
        base = self.base_model_name_or_path
        return f" (it was made for {base})" if base else ""


def _read_config(path: Path) -> _PeftConfig:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        config = _PeftConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors()[0]
        name = next(iter(details["loc"]), "it")
        raise ValueError(
            f"{_CONFIG}: {name} can't be {details['input']!r:.100}. {details['msg']}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{_CONFIG} is not valid JSON: {error}") from None
    for name in _NOT_COMPUTED:
        if values.get(name):
            raise ValueError(f"{_CONFIG}: {name} {values[name]!r:.100} is not supported")
    return config


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.offset_keys()}
    except SafetensorError as error:
        raise ValueError(f"{_WEIGHTS} is damaged: {error}") from None
