"""From logits to token ids: temperature, filters and the draw."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.cuda.launch import check
from tritium.kernels.sampling_tensors import SamplingTensors

_BLOCK = 1024  # logits per tile; with four warps eight per thread: 16-byte loads
_NUM_PROGRAMS = 1024  # programs that a small batch is split into: several per multiprocessor


# -- filters --


@triton.jit
def _load_tile(logits_ptr, start, vocab_size, BLOCK: tl.constexpr):
    """The logits of one row from `start` on, -inf past its end: [BLOCK] float32."""
    token = start + tl.arange(0, BLOCK)  # [BLOCK]
    return tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf"))


@triton.jit
def _to_ordered(x):
    """A float32 as an int64; the integers are in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _from_ordered(x):
    """The inverse of `_to_ordered`."""
    bits = x.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weigh(x, best, temperature, BY_MASS: tl.constexpr):
    """The weight of each of x [BLOCK]: its probability relative to the best token's, or 1."""
    return tl.exp((x - best) / temperature) if BY_MASS else tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _search_threshold(
    logits_ptr,  # [vocab_size] float32: one row
    vocab_size,
    low,  # float32: the threshold lies in [low, best]
    best,  # float32: the largest logit
    target,  # float32, above 0
    temperature,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest t for which the tokens with logits >= t weigh at least `target`; else `low`.

    A search over the floats as integers, so that it ends at the exact logit, after at most 16
    passes. As in FlashInfer (Ye et al., 2025) nothing is sorted. Three pivots per pass balance
    the arithmetic and the time to load::

        [low, a)  [a, b)  [b, c)  [c, high)
    """
    begin = _to_ordered(low)  # the largest pivot known to be low enough
    end = _to_ordered(best) + 1
    found = -1.0  # the weight at `begin`: an exact match ends a search by count early
    while (end - begin > 1) & (found != target):
        step = (end - begin + 3) // 4
        a = _from_ordered(begin + step)
        b = _from_ordered(begin + 2 * step)
        c = _from_ordered(begin + 3 * step)
        from_a = tl.zeros([BLOCK], tl.float32)
        from_b = tl.zeros([BLOCK], tl.float32)
        from_c = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            x = _load_tile(logits_ptr, start, vocab_size, BLOCK)  # [BLOCK]
            weight = _weigh(x, best, temperature, BY_MASS)  # [BLOCK]
            from_a += tl.where(x >= a, weight, 0.0)
            from_b += tl.where(x >= b, weight, 0.0)
            from_c += tl.where(x >= c, weight, 0.0)
        total_a, total_b, total_c = tl.sum(from_a, 0), tl.sum(from_b, 0), tl.sum(from_c, 0)
        base = begin
        if total_a >= target:
            begin, found = base + step, total_a
        if total_b >= target:
            begin, found = base + 2 * step, total_b
        if total_c >= target:
            begin, found = base + 3 * step, total_c
        end = tl.minimum(begin + step, end)
    return _from_ordered(begin)


@triton.jit(
    do_not_specialize=["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "thresholds_ptr"]
)
def _find_thresholds(
    logits_ptr,  # [num_rows, vocab_size] float32
    temperature_ptr,  # [num_rows] float32
    top_k_ptr,  # [num_rows] int32
    top_p_ptr,  # [num_rows] float32
    min_p_ptr,  # [num_rows] float32
    thresholds_ptr,  # [num_rows] float32
    vocab_size,
    BLOCK: tl.constexpr,
):
    """thresholds[row] = the smallest logit that the row's filters keep; equal logits are all kept.

    After temperature, in vLLM's order: min-p (Nguyen et al., 2024), top-k (Fan et al., 2018),
    top-p (Holtzman et al., 2020) of what the other two keep. One program computes one row.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if (temperature == 0) | ((top_k >= vocab_size) & (top_p >= 1) & (min_p <= 0)):
        tl.store(thresholds_ptr + row, float("-inf"))
        return
    logits_ptr += row * vocab_size

    # -- min-p --
    best_of_lane = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = _load_tile(logits_ptr, start, vocab_size, BLOCK)  # [BLOCK]
        best_of_lane = tl.maximum(best_of_lane, x)
    best = tl.max(best_of_lane, 0)
    threshold = best + temperature * tl.log(min_p)

    # -- top-k --
    if top_k < vocab_size:
        count = top_k.to(tl.float32)
        threshold = _search_threshold(
            logits_ptr, vocab_size, threshold, best, count, temperature, False, BLOCK
        )

    # -- top-p --
    if top_p < 1:
        kept = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            x = _load_tile(logits_ptr, start, vocab_size, BLOCK)  # [BLOCK]
            kept += tl.where(x >= threshold, _weigh(x, best, temperature, True), 0.0)
        mass = tl.maximum(top_p * tl.sum(kept, 0), 1e-30)  # a tiny top_p keeps the best token
        threshold = _search_threshold(
            logits_ptr, vocab_size, threshold, best, mass, temperature, True, BLOCK
        )
    # However a logarithm was rounded, the best token is kept.
    tl.store(thresholds_ptr + row, tl.minimum(threshold, best))


# -- drawing --


@triton.jit
def _gumbel(token, key):
    """-log(-log(1 - v)): see `reference.gumbel`. The same bits, and nearly the same logarithms."""
    x = token.to(tl.uint32) * 0x9E3779B9 + key.to(tl.uint32)  # [BLOCK]
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= (key >> 32).to(tl.uint32)
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    v = ((x & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612595521636e-10  # (1 - 2^-24) / 2^31
    # -log(1 - v), by its series near 0, where 1 - v would be rounded too much.
    exponential = tl.where(v < 0.01, v * (1 + v * (0.5 + v * 0.33333333)), -tl.log(1 - v))
    return -tl.log(exponential)


@triton.jit(do_not_specialize=["temperature_ptr", "keys_ptr", "thresholds_ptr", "num_tiles"])
def _sample(
    logits_ptr,  # [num_rows, vocab_size] float32
    temperature_ptr,  # [num_rows] float32
    keys_ptr,  # [num_rows] int64
    thresholds_ptr,  # [num_rows] float32; None: no row has filters
    scores_ptr,  # [num_rows, num_splits] float32
    token_ids_ptr,  # [num_rows, num_splits] int64
    vocab_size,
    num_tiles,  # per split
    BLOCK: tl.constexpr,
):
    """argmax of logit + temperature * noise over the tokens at or above the row's threshold.

    With Gumbel noise this is a draw from softmax(logits / temperature) (Gumbel, 1954; Maddison et
    al., 2014). One program computes one split of one row: num_tiles * BLOCK tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    key = tl.load(keys_ptr + row)
    threshold = float("-inf")
    if thresholds_ptr is not None:
        threshold = tl.load(thresholds_ptr + row)
    first = split * num_tiles * BLOCK
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = first + tl.arange(0, BLOCK)  # [BLOCK]
    for start in range(first, tl.minimum(first + num_tiles * BLOCK, vocab_size), BLOCK):
        token = start + tl.arange(0, BLOCK)  # [BLOCK]
        in_row = token < vocab_size
        x = tl.load(logits_ptr + row * vocab_size + token, mask=in_row, other=float("-inf"))
        score = x + temperature * _gumbel(token, key)  # [BLOCK]
        better = (x >= threshold) & (score > best)
        best = tl.where(better, score, best)
        best_token = tl.where(better, token, best_token)
    # Of equal scores the first token's, as torch.argmax does.
    score = tl.max(best, 0)
    token = tl.min(tl.where(best == score, best_token, vocab_size - 1), 0)
    tl.store(scores_ptr + row * tl.num_programs(1) + split, score)
    tl.store(token_ids_ptr + row * tl.num_programs(1) + split, token.to(tl.int64))


def sample(
    logits: Tensor,  # [num_rows, vocab_size] float32
    sampling: SamplingTensors | None,
) -> Tensor:
    """See `kernels.sample`."""
    num_rows, vocab_size = logits.shape
    check(logits, logits.shape, torch.float32, logits)
    if sampling is None:
        return logits.argmax(dim=-1)
    temperature, top_k, top_p, min_p, keys, any_filtered = sampling
    check(logits, (num_rows,), torch.float32, temperature, top_p, min_p)
    check(logits, (num_rows,), torch.int32, top_k)
    check(logits, (num_rows,), torch.int64, keys)

    thresholds = None
    if any_filtered:
        thresholds = torch.empty_like(temperature)
        filters = (temperature, top_k, top_p, min_p)
        # Large tiles: one program computes a whole row, and there are few rows per multiprocessor.
        _find_thresholds[(num_rows,)](
            logits, *filters, thresholds, vocab_size, BLOCK=4 * _BLOCK, num_warps=16
        )

    tiles = triton.cdiv(vocab_size, _BLOCK)
    num_tiles = triton.cdiv(tiles, max(1, _NUM_PROGRAMS // num_rows))
    num_splits = triton.cdiv(tiles, num_tiles)
    scores = logits.new_empty(num_rows, num_splits)
    token_ids = keys.new_empty(num_rows, num_splits)
    inputs = (logits, temperature, keys, thresholds)
    _sample[(num_rows, num_splits)](*inputs, scores, token_ids, vocab_size, num_tiles, BLOCK=_BLOCK)
    if num_splits > 1:
        token_ids = token_ids.gather(-1, scores.argmax(dim=-1, keepdim=True))
    return token_ids.flatten()
