"""Penalties on the tokens that a row's text already has."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.cuda.launch import check


@triton.jit(do_not_specialize=range(1, 7))  # all pointers but the logits
def _apply_penalties(
    logits_ptr,  # [num_rows, vocab_size] float32
    token_ids_ptr,  # [total] int32
    counts_ptr,  # [total] int32
    starts_ptr,  # [num_rows + 1] int32
    repetition_ptr,  # [num_rows] float32
    presence_ptr,  # [num_rows] float32
    frequency_ptr,  # [num_rows] float32
    vocab_size,
    BLOCK: tl.constexpr,
):
    """x' = (x / r if x > 0 else x r) - f count - p [count > 0], for a row's tokens so far.

    Repetition r as in CTRL (Keskar et al., 2019), frequency f and presence p as in OpenAI's API.
    One program computes one row. A row's tokens differ from each other, so no two threads write to
    the same logit.
    """
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    end = tl.load(starts_ptr + row + 1)
    for start in range(tl.load(starts_ptr + row), end, BLOCK):
        i = start + tl.arange(0, BLOCK)  # [BLOCK]
        in_row = i < end
        token = tl.load(token_ids_ptr + i, mask=in_row, other=0)  # [BLOCK]
        count = tl.load(counts_ptr + i, mask=in_row, other=0)  # [BLOCK]
        ptrs = logits_ptr + row * vocab_size + token  # [BLOCK]
        x = tl.load(ptrs, mask=in_row, other=0.0)  # [BLOCK]
        x = tl.where(x > 0, x / repetition, x * repetition)
        x -= frequency * count + tl.where(count > 0, presence, 0.0)
        tl.store(ptrs, x, mask=in_row)


def apply_penalties(
    logits: Tensor,  # [num_rows, vocab_size] float32, changed in place
    token_ids: Tensor,  # [total] int32
    counts: Tensor,  # [total] int32
    starts: Tensor,  # [num_rows + 1] int32
    *penalties: Tensor,  # repetition, presence, frequency: each [num_rows] float32
) -> None:
    """See `kernels.apply_penalties`."""
    num_rows, vocab_size = logits.shape
    check(logits, logits.shape, torch.float32, logits)
    check(logits, token_ids.shape, torch.int32, token_ids, counts)
    check(logits, (num_rows + 1,), torch.int32, starts)
    check(logits, (num_rows,), torch.float32, *penalties)
    _apply_penalties[(num_rows,)](
        logits, token_ids, counts, starts, *penalties, vocab_size, BLOCK=1024
    )
