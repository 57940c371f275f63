"""From logits to token ids: what a request changes in its logits, filters, and the draw itself."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritium.kernels.sampling_tensors import SamplingTensors

_BLOCK = 1024  # logits a tile; with four warps eight a thread: 16-byte loads
_NUM_PROGRAMS = 1024  # that a small batch is split into: several for each multiprocessor


# -- adjusting logits --


@triton.jit(do_not_specialize=["token_ids_ptr", "values_ptr", "starts_ptr"])
def _add_bias(
    logits_ptr,  # [num_rows, vocab_size] float32
    token_ids_ptr,  # [total] int32
    values_ptr,  # [total] float32
    starts_ptr,  # [num_rows + 1] int32
    vocab_size,
    BLOCK: tl.constexpr,
):
    """logits[row, token_ids[i]] += values[i] for each i in [starts[row], starts[row + 1])."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(starts_ptr + row + 1)
    for start in range(tl.load(starts_ptr + row), end, BLOCK):
        i = start + tl.arange(0, BLOCK)  # [BLOCK]
        in_row = i < end
        token = tl.load(token_ids_ptr + i, mask=in_row, other=0)  # [BLOCK]
        value = tl.load(values_ptr + i, mask=in_row, other=0.0)  # [BLOCK]
        ptrs = logits_ptr + row * vocab_size + token  # [BLOCK]
        tl.store(ptrs, tl.load(ptrs, mask=in_row) + value, mask=in_row)


@triton.jit(
    do_not_specialize=[
        "token_ids_ptr",
        "counts_ptr",
        "starts_ptr",
        "repetition_ptr",
        "presence_ptr",
        "frequency_ptr",
    ]
)
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
    A row's tokens differ from each other, so no two lanes write to the same logit.
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


@triton.jit
def _apply_mask(
    logits_ptr,  # [num_rows, vocab_size] float32
    mask_ptr,  # [num_rows, cdiv(vocab_size, 32)] int32
    vocab_size,
    BLOCK: tl.constexpr,
):
    """logits[row, token] = -inf where bit token % 32 of mask[row, token / 32] is 0."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    in_row = token < vocab_size
    word_ptrs = mask_ptr + row * tl.cdiv(vocab_size, 32) + token // 32  # [BLOCK]
    bit = (tl.load(word_ptrs, mask=in_row, other=0) >> token % 32) & 1  # [BLOCK]
    forbidden = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * vocab_size + token, forbidden, mask=in_row & (bit == 0))


# -- filters --


@triton.jit
def _to_ordered(x):
    """A float32 as an integer, in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _from_ordered(x):
    bits = x.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weigh(x, best, temperature, BY_MASS: tl.constexpr):
    """What each of x [BLOCK] counts: its probability as a share of the best token's, or 1."""
    return tl.exp((x - best) / temperature) if BY_MASS else tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _search_threshold(
    logits_ptr,  # [vocab_size] float32: one row
    vocab_size,
    low,  # float32, as best: the threshold lies in [low, best]
    best,  # the largest logit
    target,  # float32, above 0
    temperature,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest t where the tokens with logits >= t weigh `target` together; `low` if none.

    A search over the floats as integers, so that it ends at the very logit, after at most 16
    passes. As in FlashInfer (Ye et al., 2025) nothing is sorted. With three pivots a pass, as

        [low, a)  [a, b)  [b, c)  [c, high)

    waiting for memory and the arithmetic balance.
    """
    begin = _to_ordered(low)  # always the last pivot known to be low enough
    end = _to_ordered(best) + 1
    found = -1.0  # the weight at `begin`: a match ends a search by count early
    while (end - begin > 1) & (found != target):
        step = (end - begin + 3) // 4
        a = _from_ordered(begin + step)
        b = _from_ordered(begin + 2 * step)
        c = _from_ordered(begin + 3 * step)
        from_a = tl.zeros([BLOCK], tl.float32)
        from_b = tl.zeros([BLOCK], tl.float32)
        from_c = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)  # [BLOCK]
            x = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf"))  # [BLOCK]
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
    """The least logit that each row's filters leave; ties are left together.

    After temperature, in vLLM's order: min-p (Nguyen et al., 2024), top-k (Fan et al., 2018),
    top-p (Holtzman et al., 2020) of what the others left.
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
        token = start + tl.arange(0, BLOCK)  # [BLOCK]
        x = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf"))  # [BLOCK]
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
        left = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)  # [BLOCK]
            x = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf"))  # [BLOCK]
            left += tl.where(x >= threshold, _weigh(x, best, temperature, True), 0.0)
        mass = tl.maximum(top_p * tl.sum(left, 0), 1e-30)  # a tiny top_p leaves the best token
        threshold = _search_threshold(
            logits_ptr, vocab_size, threshold, best, mass, temperature, True, BLOCK
        )
    # However a logarithm was rounded, the best token is left.
    tl.store(thresholds_ptr + row, tl.minimum(threshold, best))


# -- drawing --


@triton.jit
def _gumbel(token, key):
    """See `reference.gumbel`: the same bits, and logarithms nearly the same."""
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
    num_tiles,  # of each split
    BLOCK: tl.constexpr,
):
    """argmax of logit + temperature * noise over the tokens at or above the row's threshold.

    With Gumbel noise that draws from softmax(logits / temperature) (Gumbel, 1954; Maddison et
    al., 2014). One program takes one row's part of the vocabulary.
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
    # Of equal scores the first token's, as torch.argmax has it.
    score = tl.max(best, 0)
    token = tl.min(tl.where(best == score, best_token, vocab_size - 1), 0)
    tl.store(scores_ptr + row * tl.num_programs(1) + split, score)
    tl.store(token_ids_ptr + row * tl.num_programs(1) + split, token.to(tl.int64))


# -- launchers --


def add_bias(
    logits: Tensor,  # [num_rows, vocab_size] float32, changed in place
    token_ids: Tensor,  # [total] int32
    values: Tensor,  # [total] float32
    starts: Tensor,  # [num_rows + 1] int32
) -> None:
    """See `kernels.add_bias`."""
    num_rows, vocab_size = _check_logits(logits)
    _check(logits, token_ids.shape, torch.int32, token_ids)
    _check(logits, token_ids.shape, torch.float32, values)
    _check(logits, (num_rows + 1,), torch.int32, starts)
    _add_bias[(num_rows,)](logits, token_ids, values, starts, vocab_size, BLOCK=128)


def apply_penalties(
    logits: Tensor,  # [num_rows, vocab_size] float32, changed in place
    token_ids: Tensor,  # [total] int32
    counts: Tensor,  # [total] int32
    starts: Tensor,  # [num_rows + 1] int32
    repetition: Tensor,  # [num_rows] float32
    presence: Tensor,  # [num_rows] float32
    frequency: Tensor,  # [num_rows] float32
) -> None:
    """See `kernels.apply_penalties`."""
    num_rows, vocab_size = _check_logits(logits)
    _check(logits, token_ids.shape, torch.int32, token_ids, counts)
    _check(logits, (num_rows + 1,), torch.int32, starts)
    _check(logits, (num_rows,), torch.float32, repetition, presence, frequency)
    _apply_penalties[(num_rows,)](
        logits,
        token_ids,
        counts,
        starts,
        repetition,
        presence,
        frequency,
        vocab_size,
        BLOCK=_BLOCK,
    )


def apply_mask(
    logits: Tensor,  # [num_rows, vocab_size] float32, changed in place
    mask: Tensor,  # [num_rows, cdiv(vocab_size, 32)] int32
) -> None:
    """See `kernels.apply_mask`."""
    num_rows, vocab_size = _check_logits(logits)
    _check(logits, (num_rows, triton.cdiv(vocab_size, 32)), torch.int32, mask)
    grid = (num_rows, triton.cdiv(vocab_size, _BLOCK))
    _apply_mask[grid](logits, mask, vocab_size, BLOCK=_BLOCK)


def sample(
    logits: Tensor,  # [num_rows, vocab_size] float32
    sampling: SamplingTensors | None,
) -> Tensor:
    """See `kernels.sample`."""
    num_rows, vocab_size = _check_logits(logits)
    if sampling is None:
        return logits.argmax(dim=-1)
    temperature, top_k, top_p, min_p, keys, any_filtered = sampling
    _check(logits, (num_rows,), torch.float32, temperature, top_p, min_p)
    _check(logits, (num_rows,), torch.int32, top_k)
    _check(logits, (num_rows,), torch.int64, keys)

    thresholds = None
    if any_filtered:
        thresholds = torch.empty_like(temperature)
        _find_thresholds[(num_rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            thresholds,
            vocab_size,
            BLOCK=4 * _BLOCK,  # one program has a row to itself, and few rows a multiprocessor
            num_warps=16,
        )

    tiles = triton.cdiv(vocab_size, _BLOCK)
    num_tiles = triton.cdiv(tiles, max(1, _NUM_PROGRAMS // num_rows))
    num_splits = triton.cdiv(tiles, num_tiles)
    scores = logits.new_empty(num_rows, num_splits)
    token_ids = keys.new_empty(num_rows, num_splits)
    _sample[(num_rows, num_splits)](
        logits,
        temperature,
        keys,
        thresholds,
        scores,
        token_ids,
        vocab_size,
        num_tiles,
        BLOCK=_BLOCK,
    )
    if num_splits > 1:
        token_ids = token_ids.gather(-1, scores.argmax(dim=-1, keepdim=True))
    return token_ids.flatten()


def _check_logits(logits: Tensor) -> tuple[int, int]:
    """[num_rows, vocab_size]"""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    return num_rows, vocab_size


def _check(logits: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.device == logits.device
