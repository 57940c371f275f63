"""The sampling parameters of a step's batch, one element per row."""

from typing import NamedTuple

from torch import Tensor


class SamplingTensors(NamedTuple):
    """How each row's token is chosen. The sampler fills it once per step."""

    temperature: Tensor  # [num_rows] float32; 0: the most likely token, without any filter
    top_k: Tensor  # [num_rows] int32, at least 1; vocab_size: all
    top_p: Tensor  # [num_rows] float32; 1: all
    min_p: Tensor  # [num_rows] float32; 0: all
    keys: Tensor  # [num_rows] int64: a row's noise depends only on its key
    any_filtered: bool  # known on the host: whether any row has top_k, top_p or min_p
