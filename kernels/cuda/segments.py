"""Blocks of rows of a tensor whose rows are in segments of any length, known only on the device."""

import triton
import triton.language as tl


@triton.jit
def find_segment(
    starts_ptr,  # [num_segments + 1] int32: segment i has the rows [starts[i], starts[i + 1])
    block,
    num_segments,
    BLOCK: tl.constexpr,  # rows
):
    """The last segment i with starts[i] // BLOCK + i <= block.

    That sum is where segment i's blocks start: each segment before it has one block more than its
    whole ones, enough for any remainder. So the host need not know the lengths: num_rows // BLOCK +
    num_segments blocks are enough.
    """
    low, high = 0, num_segments
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1
