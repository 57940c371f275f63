"""Rotary positions (Su et al., 2021): their frequencies by kind of scaling, and their number.

The frequencies are transformers' own (`ROPE_INIT_FUNCTIONS`). What a kind does not know is refused.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tritium.backend.runner.models.unsupported import UnsupportedModel

# What each kind of scaling reads; all of them read `_ALWAYS`.
_KINDS = {
    "default": "",
    "linear": "factor",
    "dynamic": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
    "mscale_all_dim truncate",
    "longrope": "factor original_max_position_embeddings attention_factor short_factor long_factor",
}
# `finetuned` says how a model was made. One position per token, as text has, is plain rotation
# whatever the sections of frequencies that images use.
_ALWAYS = (
    "rope_type type rope_theta partial_rotary_factor finetuned mrope_section mrope_interleaved"
)
_EXTENDING = ("linear", "dynamic", "yarn")  # whose factor multiplies the positions

SUPPORTED_ROPE_TYPES = tuple(_KINDS)


class Rope(NamedTuple):
    """One kind of rotation. A head's numbers i and i + head_dim / 2 are a pair."""

    inv_freq: tuple[float, ...]  # [head_dim // 2]: radians per position of each pair
    scale: tuple[float, ...]  # [head_dim // 2]: of cos and sin

    def tables(self, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos, sin of each position: [num_positions, head_dim // 2] float32."""
        positions = torch.arange(num_positions, dtype=torch.float32, device=device)
        angles = positions[:, None] * torch.tensor(self.inv_freq, device=device)
        scale = torch.tensor(self.scale, device=device)
        return angles.cos() * scale, angles.sin() * scale


def no_rope(head_dim: int) -> Rope:
    """The rotation of a layer without positions: none (NoPE; Kazemnejad et al., 2023)."""
    return Rope((0.0,) * (head_dim // 2), (1.0,) * (head_dim // 2))


def read_rope(
    hf_config: Any,
    parameters: Mapping[str, Any],
    head_dim: int,
    length: int,
    layer_type: str | None,
) -> Rope:
    """The rotation that a transformers config describes.

    Args:
        parameters: `rope_parameters`, or that of one type of layers.
        length: Most positions of a sequence. Where frequencies depend on a sequence's length
            (dynamic, longrope), they are those of this length, for all sequences: cached keys
            keep their rotation.
        layer_type: Whose parameters they are; None: all layers'.

    Raises:
        ValueError: a kind or a parameter is not supported; names it.
    """
    rope_type = check_parameters(parameters)
    partial = parameters.get("partial_rotary_factor") or 1.0
    if rope_type == "default":
        rotary_dim = int(head_dim * partial)
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        inv_freq, scale = 1.0 / parameters["rope_theta"] ** exponents, 1.0
    else:
        compute = ROPE_INIT_FUNCTIONS[rope_type]
        inv_freq, scale = compute(hf_config, None, seq_len=length, layer_type=layer_type)
    rotated, passed = len(inv_freq), head_dim // 2 - len(inv_freq)
    return Rope((*inv_freq.tolist(), *[0.0] * passed), (*[float(scale)] * rotated, *[1.0] * passed))


def check_parameters(parameters: Mapping[str, Any]) -> str:
    """The kind of rotation.

    Raises:
        ValueError: the kind, or one of its parameters, is not supported.
    """
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in _KINDS:
        listed = ", ".join(_KINDS)
        raise UnsupportedModel(
            f"The model has rope_type {rope_type!r}, which is not supported. Supported: {listed}."
        )
    known = f"{_ALWAYS} {_KINDS[rope_type]}".split()
    for name, value in parameters.items():
        if name not in known and value not in (None, False):
            raise UnsupportedModel(
                f"The model has {name} {value!r:.100} in its rope_parameters, which is not "
                f"supported with rope_type {rope_type!r}. Supported: {', '.join(known)}."
            )
    return str(rope_type)


def max_positions(max_position_embeddings: int, parameters: Mapping[str, Any]) -> int:
    """The positions that a model has with its scaling: original x factor where that is more."""
    factor = parameters.get("factor")
    if parameters.get("rope_type") not in _EXTENDING or not factor:
        return max_position_embeddings
    original = parameters.get("original_max_position_embeddings") or max_position_embeddings
    return max(max_position_embeddings, int(original * factor))
