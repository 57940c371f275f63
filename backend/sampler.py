"""Logits to token ids, and their log probabilities."""

import numpy as np
import torch
from torch import Tensor

from backend.sequence import SampledToken, Sequence, TokenLogprobs

# Where top-p or min-p leave no more tokens than this, a sort of the whole vocabulary is spared.
_CANDIDATES = 1024


def sample(logits: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
    """Choose the next token of each sequence.

    Args:
        logits: [num_seqs, vocab_size] float32; may be overwritten.
        sequences: One a row.
    """
    logprobs = _raw_log_softmax(logits, sequences)
    _forbid_early_stop(logits, sequences)
    token_ids = logits.argmax(dim=-1).tolist()
    drawn = [i for i, sequence in enumerate(sequences) if sequence.request.temperature > 0]
    if drawn:
        rows = logits if len(drawn) == len(sequences) else logits[drawn]
        for i, token_id in zip(drawn, _draw(rows, [sequences[i] for i in drawn]), strict=True):
            token_ids[i] = token_id
    return [
        SampledToken(token_id, _token_logprobs(row, token_id, sequence))
        for token_id, row, sequence in zip(token_ids, logprobs, sequences, strict=True)
    ]


def _draw(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """Sample by inverting the cumulative distribution at one random number a row.

    Filters act in vLLM's order: temperature, min-p, top-k, top-p (of what the others left).
    """
    requests = [sequence.request for sequence in sequences]
    device = logits.device

    def column(values: list[float] | list[int]) -> Tensor:
        return torch.tensor(values, device=device)[:, None]

    scaled = logits / column([request.temperature for request in requests]).float()
    numbers = column(uniform([r.seed for r in requests], [s.num_tokens for s in sequences]))
    if all(r.top_k <= 0 and r.top_p >= 1 and r.min_p <= 0 for r in requests):
        return _invert(scaled.softmax(dim=-1), numbers).tolist()

    vocab_size = logits.shape[-1]
    top_k = column([r.top_k if r.top_k > 0 else vocab_size for r in requests])
    top_p = column([r.top_p for r in requests]).float()
    min_p = column([r.min_p for r in requests]).float()
    log_total = scaled.logsumexp(dim=-1, keepdim=True)
    for width in (min(_CANDIDATES, vocab_size), vocab_size):
        top, token_ids = scaled.topk(width, dim=-1)  # sorted, the largest first
        share = (top - log_total).exp()  # of the whole distribution
        reached = (top_k <= width) | (share.sum(-1, keepdim=True) >= top_p)
        reached |= share[:, -1:] < min_p * share[:, :1]
        if width == vocab_size or bool(reached.all()):
            break
    kept = torch.arange(width, device=device) < top_k
    kept &= share >= min_p * share[:, :1]
    probs = top.masked_fill(~kept, float("-inf")).softmax(dim=-1)
    # Where top-k and min-p cut nothing, what lies past the candidates counts as well.
    uncut = kept.all(dim=-1, keepdim=True) & (top_k > width)
    probs = torch.where(uncut, share, probs)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(before >= top_p, 0.0)
    return token_ids.gather(-1, _invert(probs, numbers)[:, None]).flatten().tolist()


def _invert(probs: Tensor, numbers: Tensor) -> Tensor:
    """The index in each row where the cumulative sum passes `numbers` of its total. [n] int64"""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    targets = numbers.double() * cumulative[:, -1:]
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
        if sequence.num_output_tokens < request.min_tokens and request.stop_token_ids:
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
