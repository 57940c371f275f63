"""A mask of the tokens that each row allows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.cuda.launch import check


@triton.jit
def _apply_mask(
    logits_ptr,  # [num_rows, vocab_size] float32
    mask_ptr,  # [num_rows, cdiv(vocab_size, 32)] int32
    vocab_size,
    BLOCK: tl.constexpr,
):
    """logits[row, token] = -inf where bit token % 32 of mask[row, token // 32] is 0.

    One program computes BLOCK tokens of one row.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    in_row = token < vocab_size
    word_ptrs = mask_ptr + row * tl.cdiv(vocab_size, 32) + token // 32  # [BLOCK]
    bit = (tl.load(word_ptrs, mask=in_row, other=0) >> token % 32) & 1  # [BLOCK]
    forbidden = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * vocab_size + token, forbidden, mask=in_row & (bit == 0))


def apply_mask(
    logits: Tensor,  # [num_rows, vocab_size] float32, changed in place
    mask: Tensor,  # [num_rows, cdiv(vocab_size, 32)] int32
) -> None:
    """See `kernels.apply_mask`."""
    num_rows, vocab_size = logits.shape
    check(logits, logits.shape, torch.float32, logits)
    check(logits, (num_rows, triton.cdiv(vocab_size, 32)), torch.int32, mask)
    block = 1024
    grid = (num_rows, triton.cdiv(vocab_size, block))
    _apply_mask[grid](logits, mask, vocab_size, BLOCK=block)
