"""A value added to the logits of some of each row's tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.cuda.launch import check


@triton.jit(do_not_specialize=["token_ids_ptr", "values_ptr", "starts_ptr"])
def _add_bias(
    logits_ptr,  # [num_rows, vocab_size] float32
    token_ids_ptr,  # [total] int32
    values_ptr,  # [total] float32
    starts_ptr,  # [num_rows + 1] int32
    vocab_size,
    BLOCK: tl.constexpr,
):
    """logits[row, token_ids[i]] += values[i] for each i in [starts[row], starts[row + 1]).

    One program computes one row.
    """
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(starts_ptr + row + 1)
    for start in range(tl.load(starts_ptr + row), end, BLOCK):
        i = start + tl.arange(0, BLOCK)  # [BLOCK]
        in_row = i < end
        token = tl.load(token_ids_ptr + i, mask=in_row, other=0)  # [BLOCK]
        value = tl.load(values_ptr + i, mask=in_row, other=0.0)  # [BLOCK]
        ptrs = logits_ptr + row * vocab_size + token  # [BLOCK]
        tl.store(ptrs, tl.load(ptrs, mask=in_row) + value, mask=in_row)


def add_bias(
    logits: Tensor,  # [num_rows, vocab_size] float32, changed in place
    token_ids: Tensor,  # [total] int32
    values: Tensor,  # [total] float32
    starts: Tensor,  # [num_rows + 1] int32
) -> None:
    """See `kernels.add_bias`."""
    num_rows, vocab_size = logits.shape
    check(logits, logits.shape, torch.float32, logits)
    check(logits, token_ids.shape, torch.int32, token_ids)
    check(logits, token_ids.shape, torch.float32, values)
    check(logits, (num_rows + 1,), torch.int32, starts)
    _add_bias[(num_rows,)](logits, token_ids, values, starts, vocab_size, BLOCK=128)
