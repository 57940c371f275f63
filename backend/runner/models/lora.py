"""LoRA adapters (Hu et al., 2021), several on one model and in one batch, as PEFT stores them.

Extensions of plain LoRA that PEFT supports are refused if they would change an answer.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tritium.backend.runner.models.lora_config import PeftConfig, read_peft_config
from tritium.backend.runner.models.lora_start import subtract_start
from tritium.backend.runner.models.safetensors_file import read_safetensors
from tritium.kernels import PackedLinear, StoredWeight, as_tensor, linear

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<kind>[AB])\.weight")
# Makes (name in transformers, weight) of each weight of the base model.
BaseWeights = Callable[[], Iterable[tuple[str, StoredWeight]]]
# Name of an adapter -> the rows of a step's tokens that it changes, [n] int64.
LoraRows = Mapping[str, Tensor]


class LoraWeights(NamedTuple):
    """What an adapter adds to a projection's output: (x @ a.T) @ b.T."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [out_features, rank], times the adapter's scaling


class PackedLora(NamedTuple):
    """LoraWeights in the layout of `kernels.linear`."""

    a: PackedLinear
    b: PackedLinear


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


def read_adapter(
    directory: Path, shapes: Mapping[str, tuple[int, int]], base: BaseWeights
) -> dict[str, LoraWeights]:
    """Read an adapter for a model.

    Args:
        shapes: Name in transformers -> (out_features, in_features) of the model's projections.
        base: Used only if the adapter began as a part of the base weights.

    Returns:
        The weights, float32 on the CPU, of each projection that the adapter changes.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the adapter is damaged, not supported, or not for this model; the message says
            why.
    """
    config = read_peft_config(directory / _CONFIG)
    modules = sorted({name.rpartition(".")[2] for name in shapes})
    targets = {name.rpartition(".")[2] for name in config.listed_targets}
    if unknown := sorted(targets.difference(modules)):
        raise ValueError(
            f"it targets {', '.join(unknown)}; supported target modules are {', '.join(modules)}"
        )
    tensors: dict[str, dict[str, Tensor]] = {}  # module -> A or B -> weight
    for name, tensor in read_safetensors(directory / _WEIGHTS):
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
    if config.init_lora_weights in ("pissa", "olora"):
        return _without_start(adapter, config, base)
    return adapter


def _without_start(
    adapter: Mapping[str, LoraWeights], config: PeftConfig, base: BaseWeights
) -> dict[str, LoraWeights]:
    """The adapter minus the part of the base weights that it began as."""
    changed = {}
    for name, weight in base():
        module = name.removesuffix(".weight")
        if module in adapter:
            start = str(config.init_lora_weights)
            a, b = subtract_start(start, as_tensor(weight), *adapter[module], config.scaling)
            changed[module] = LoraWeights(a, b)
    if missing := adapter.keys() - changed.keys():
        raise ValueError(f"the base model's checkpoint has no {', '.join(sorted(missing))}")
    return changed
