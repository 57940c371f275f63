"""Logits to token ids, and their log probabilities."""

import numpy as np
import torch
from torch import Tensor

from backend.sequence import SampledToken, Sequence, TokenLogprobs

# Where top-p or min-p leave no more tokens than this, a sort of the whole vocabulary is spared.
_CANDIDATES = 1024
# As in vLLM: dividing by less makes infinities.
_GREEDY_BELOW = 1e-5


def sample(logits: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
    """Choose the next token of each sequence.

    Args:
        logits: [num_seqs, vocab_size] float32; may be overwritten.
        sequences: One a row.
    """
    logprobs = _raw_log_softmax(logits, sequences)
    _forbid_early_stop(logits, sequences)
    token_ids = logits.argmax(dim=-1).tolist()
    # Filtered rows and others apart: what a row draws must not depend on its neighbours.
    plain: list[int] = []
    filtered: list[int] = []
    for i, sequence in enumerate(sequences):
        request = sequence.request
        if request.temperature >= _GREEDY_BELOW:
            cut = request.top_k > 0 or request.top_p < 1 or request.min_p > 0
            (filtered if cut else plain).append(i)
    for rows, draw in ((plain, _draw), (filtered, _draw_filtered)):
        if rows:
            drawn = draw(logits[rows], [sequences[i] for i in rows])
            for i, token_id in zip(rows, drawn.tolist(), strict=True):
                token_ids[i] = token_id
    return [
        SampledToken(token_id, _token_logprobs(row, token_id, sequence))
        for token_id, row, sequence in zip(token_ids, logprobs, sequences, strict=True)
    ]


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """[n] int64: sampled by inverting the cumulative distribution at one number a row."""
    probs = _scaled(logits, sequences).softmax(dim=-1)
    return _invert(probs, _numbers(sequences, logits))


def _draw_filtered(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """The same from what the filters leave, the most likely first.

    They act in vLLM's order: temperature, min-p, top-k, top-p (of what the others left).
    """
    requests = [sequence.request for sequence in sequences]
    vocab_size = logits.shape[-1]
    scaled = _scaled(logits, sequences)
    top_k = _column([r.top_k if 0 < r.top_k < vocab_size else vocab_size for r in requests], logits)
    top_p = _column([r.top_p for r in requests], logits)
    min_p = _column([r.min_p for r in requests], logits)
    only_top_p = (top_k == vocab_size) & (min_p <= 0)
    log_total = scaled.logsumexp(dim=-1, keepdim=True)
    for width in (min(_CANDIDATES, vocab_size), vocab_size):
        top, token_ids = scaled.topk(width, dim=-1)  # sorted, the largest first
        share = (top - log_total).exp()  # of the whole distribution
        # Whether the cut lies within the candidates, in each row.
        reached = (top_k <= width) | (share[:, -1:] < min_p * share[:, :1])
        reached |= only_top_p & (share.sum(dim=-1, keepdim=True) >= top_p)
        if width == vocab_size or bool(reached.all()):
            break
    kept = torch.arange(width, device=logits.device) < top_k
    kept &= share >= min_p * share[:, :1]
    of_kept = top.masked_fill(~kept, float("-inf")).softmax(dim=-1)
    probs = torch.where(only_top_p, share, of_kept)
    past_top_p = probs.cumsum(dim=-1) - probs >= top_p
    past_top_p[:, 0] = False
    index = _invert(probs.masked_fill(past_top_p, 0.0), _numbers(sequences, logits))
    return token_ids.gather(-1, index[:, None]).flatten()


def _scaled(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    return logits / _column([s.request.temperature for s in sequences], logits).float()


def _numbers(sequences: list[Sequence], logits: Tensor) -> Tensor:
    """[n, 1] float64: each row's random number."""
    seeds = [sequence.request.seed for sequence in sequences]
    return _column(uniform(seeds, [sequence.num_tokens for sequence in sequences]), logits)


def _column(values: list[float] | list[int], logits: Tensor) -> Tensor:
    """[n, 1] float64 or int64."""
    dtype = torch.int64 if isinstance(values[0], int) else torch.float64
    return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]


def _invert(probs: Tensor, numbers: Tensor) -> Tensor:
    """The index in each row where the cumulative sum passes `numbers` of its total. [n] int64"""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    targets = numbers * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).flatten()


def uniform(seeds: list[int], positions: list[int]) -> list[float]:
    """A random number in [0, 1) for each (seed, position): SplitMix64 (Steele et al., 2014).

    Of 32 bits, so that in float64 its product with a total stays below the total.
    """
    with np.errstate(over="ignore"):
        x = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
        x = _mix(_mix(x) + np.array(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return ((x >> np.uint64(32)) * 2.0**-32).tolist()


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _forbid_early_stop(logits: Tensor, sequences: list[Sequence]) -> None:
    for row, sequence in zip(logits, sequences, strict=True):
        request = sequence.request
        something_left = len(request.stop_token_ids) < len(row)
        if sequence.num_output_tokens < request.min_tokens and something_left:
            row[list(request.stop_token_ids)] = float("-inf")


def _raw_log_softmax(logits: Tensor, sequences: list[Sequence]) -> list[Tensor | None]:
    """[vocab_size] log probabilities for each sequence that wants some."""
    return [
        row.log_softmax(dim=-1) if sequence.request.num_logprobs is not None else None
        for row, sequence in zip(logits, sequences, strict=True)
    ]


def _token_logprobs(row: Tensor | None, token_id: int, sequence: Sequence) -> TokenLogprobs | None:
    if row is None:
        return None
    chosen = row[token_id]
    top = row.topk(sequence.request.num_logprobs or 0)
    return TokenLogprobs(
        logprob=float(chosen),
        rank=int((row > chosen).sum()) + 1,
        top=list(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
    )
