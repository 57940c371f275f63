"""Logits to token ids and their log probabilities. Only `Sampled.read()` waits for a GPU.

Knows what requests ask for. `kernels` knows how it is computed.
"""

from collections.abc import Callable, Iterable, Sized
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritium import kernels
from tritium.backend.engine.request import EngineRequest, SampledToken, TokenLogprobs
from tritium.backend.engine.sequence import Sequence

Array = NDArray[Any]

# As in vLLM: division by a smaller temperature gives infinities.
_GREEDY_BELOW = 1e-5
# A larger bias would round away the differences between logits in float32, and end in infinities.
_LARGEST_BIAS = 1e4


class Sampled(NamedTuple):
    """A step's tokens: on the device at once, on the host after the copy has finished."""

    token_ids: Tensor  # [num_seqs] int64, on the device
    on_host: list[Tensor]  # token_ids, then _logprobs() of the tokens that need them
    num_logprobs: Seq[int | None]  # per token
    copied: torch.cuda.Event | None  # None: the copy has finished

    def read(self) -> list[SampledToken]:
        """The next token of each sequence."""
        if self.copied is not None:
            self.copied.synchronize()
        token_ids, *logprobs = (tensor.tolist() for tensor in self.on_host)
        wanted = zip(*logprobs, strict=True)
        return [
            SampledToken(token_id, None if k is None else _token_logprobs(k, *next(wanted)))
            for token_id, k in zip(token_ids, self.num_logprobs, strict=True)
        ]


class Sampler:
    """Chooses the next tokens of a step's sequences."""

    def __init__(self) -> None:
        # Of the last step's sequences. A sequence that was not in it gets a new state.
        self._states: dict[Sequence, _State] = {}

    def sample(
        self,
        logits: Tensor,  # [num_seqs, vocab_size] float32; may be overwritten
        sequences: list[Sequence],  # a sequence with drafts once per row
        positions: Seq[int],  # of the tokens to choose
        masks: Tensor | None = None,  # [num_seqs, ceil(vocab_size / 32)] int32: kernels.apply_mask
    ) -> Sampled:
        """Choose the next token of each sequence.

        In vLLM's order: the log probabilities are the model's own; then masks and `_ADJUSTMENTS`
        change the logits; last come temperature and filters.
        """
        self._states = {s: self._states.get(s) or _State(s) for s in sequences}
        num_logprobs = [sequence.request.num_logprobs for sequence in sequences]
        wanting = [i for i, k in enumerate(num_logprobs) if k is not None]
        if wanting:
            [rows] = _upload(logits, np.array(wanting))
            raw = logits[rows].log_softmax(dim=-1)
        if masks is not None:
            kernels.apply_mask(logits, masks)
        for is_needed, adjust in _ADJUSTMENTS.values():
            if any(is_needed(sequence.request) for sequence in sequences):
                adjust(logits, [self._states[sequence] for sequence in sequences])
        token_ids = kernels.sample(logits, _sampling_tensors(logits, sequences, positions))
        tensors = [token_ids]
        if wanting:
            tensors += _logprobs(raw, token_ids[rows], max(k or 0 for k in num_logprobs))
        return _start_copy(tensors, num_logprobs)


def grammar_masks(sequences: list[Sequence], vocab_size: int) -> Array | None:
    """The tokens that grammars allow, for `Sampler.sample()`; None if no sequence has a grammar.

    [num_seqs, ceil(vocab_size / 32)] int32
    """
    guided = [(row, s, s.grammar) for row, s in enumerate(sequences) if s.grammar]
    if not guided:
        return None
    masks = np.full((len(sequences), -(-vocab_size // 32)), -1, dtype=np.int32)
    rows, _, states = zip(*guided, strict=True)
    states[0].fill_masks(states, masks, rows)
    for row, sequence, _ in guided:
        if sequence.num_output_tokens < sequence.request.min_tokens:
            _forbid_unless_last(masks[row], sequence.request.stop_token_ids)
    return masks


def score(logits: Tensor, token_ids: Tensor, k: int) -> Sampled:
    """Given tokens, with their log probabilities and those of the k most likely tokens.

    Args:
        logits: [n, vocab_size] float32.
        token_ids: [n] int64.
    """
    logprobs = _logprobs(logits.log_softmax(dim=-1), token_ids, k)
    return _start_copy([token_ids, *logprobs], [k] * len(token_ids))


def _start_copy(tensors: list[Tensor], num_logprobs: Seq[int | None]) -> Sampled:
    """Start the copy to the host."""
    on_host = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    copied = None
    if tensors[0].is_cuda:
        copied = torch.cuda.current_stream(tensors[0].device).record_event()
    return Sampled(tensors[0], on_host, num_logprobs, copied)


class _State:
    """A sequence's adjustments as arrays, and how often each token is in its output.

    A token that is only in the prompt counts 0; such tokens are listed if repetition is penalised.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        request = sequence.request
        self.allowed = np.array(request.allowed_token_ids, dtype=np.int64)
        self.biased = np.array([token_id for token_id, _ in request.logit_bias], dtype=np.int32)
        biases = np.array([bias for _, bias in request.logit_bias])
        self.biases = biases.clip(-_LARGEST_BIAS, _LARGEST_BIAS).astype(np.float32)

        prompt = sorted(set(request.prompt_token_ids)) if request.repetition_penalty != 1 else []
        self._index = {token_id: i for i, token_id in enumerate(prompt)}
        capacity = len(prompt) + request.max_tokens if _is_penalised(request) else 0
        self._token_ids = np.zeros(capacity, dtype=np.int32)
        self._token_ids[: len(prompt)] = prompt
        self._counts = np.zeros(capacity, dtype=np.int32)
        self._num_counted = len(request.prompt_token_ids)

    def count(self) -> tuple[Array, Array]:
        """(token ids, counts), both int32; counts the tokens that are new since the last call."""
        if _is_penalised(self.sequence.request):
            for token_id in self.sequence.token_ids[self._num_counted :]:
                i = self._index.setdefault(token_id, len(self._index))
                self._token_ids[i] = token_id
                self._counts[i] += 1
            self._num_counted = len(self.sequence.token_ids)
        return self._token_ids[: len(self._index)], self._counts[: len(self._index)]


# -- adjustments of the logits --


def _allow_only(logits: Tensor, states: list[_State]) -> None:
    """Forbid all tokens but those of each row's list; a row without a list allows all."""
    lengths = [len(state.allowed) for state in states]
    rows = np.repeat(np.arange(len(states)), lengths)
    columns = np.concatenate([state.allowed for state in states])
    at_rows, at_columns, restricted = _upload(logits, rows, columns, np.flatnonzero(lengths))
    kept = logits[at_rows, at_columns]
    logits.index_fill_(0, restricted, float("-inf"))
    logits[at_rows, at_columns] = kept


def _forbid(logits: Tensor, states: list[_State]) -> None:
    """Forbid stop tokens before min_tokens, and the tokens that would complete bad words."""
    forbidden = [np.array(_forbidden(state.sequence), dtype=np.int32) for state in states]
    if any(map(len, forbidden)):
        minus_inf = [np.full(len(token_ids), -np.inf, dtype=np.float32) for token_ids in forbidden]
        _add_bias(logits, forbidden, minus_inf)


def _add_biases(logits: Tensor, states: list[_State]) -> None:
    """Add each request's logit_bias."""
    _add_bias(logits, [state.biased for state in states], [state.biases for state in states])


def _penalise(logits: Tensor, states: list[_State]) -> None:
    """Apply the repetition, presence and frequency penalties."""
    token_ids, counts = zip(*(state.count() for state in states), strict=True)
    requests = [state.sequence.request for state in states]
    penalties = _columns(requests, "repetition_penalty", "presence_penalty", "frequency_penalty")
    ragged = np.concatenate(token_ids), np.concatenate(counts), _starts(token_ids)
    kernels.apply_penalties(logits, *_upload(logits, *ragged, *penalties))


def _is_penalised(request: EngineRequest) -> bool:
    penalties = request.presence_penalty, request.frequency_penalty
    return request.repetition_penalty != 1 or any(penalties)


class _Adjustment(NamedTuple):
    is_needed: Callable[[EngineRequest], bool]
    adjust: Callable[[Tensor, list[_State]], None]  # of all rows' logits, if any request needs it


# In vLLM's order.
_ADJUSTMENTS = {
    "allowed_token_ids": _Adjustment(lambda r: bool(r.allowed_token_ids), _allow_only),
    "min_tokens, bad_words": _Adjustment(lambda r: bool(r.min_tokens or r.bad_words), _forbid),
    "logit_bias": _Adjustment(lambda r: bool(r.logit_bias), _add_biases),
    "penalties": _Adjustment(_is_penalised, _penalise),
}


def _add_bias(logits: Tensor, token_ids: Seq[Array], values: Seq[Array]) -> None:
    """Add values float32 to the logits of each row's token ids int32."""
    ragged = np.concatenate(token_ids), np.concatenate(values), _starts(token_ids)
    kernels.add_bias(logits, *_upload(logits, *ragged))


def _forbidden(sequence: Sequence) -> list[int]:
    """Stop tokens before min_tokens, and the last tokens of bad words that would be complete."""
    request = sequence.request
    forbidden: list[int] = []
    # With a grammar, its mask says when the answer may end.
    if sequence.num_output_tokens < request.min_tokens and not sequence.grammar:
        forbidden += request.stop_token_ids
    for *before, last in request.bad_words:
        start = len(sequence.token_ids) - len(before)
        if start >= sequence.num_prompt_tokens and sequence.token_ids[start:] == before:
            forbidden.append(last)
    return forbidden


def _forbid_unless_last(mask: Array, token_ids: Iterable[int]) -> None:
    """Clear the bits of tokens, unless no other token is allowed: a complete answer must end.

    Args:
        mask: [num_words] int32, changed in place.
    """
    others = mask.view(np.uint32).copy()
    for token_id in token_ids:
        others[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if others.any():
        mask[:] = others.view(np.int32)


# -- temperature, filters and the draw --


def _sampling_tensors(
    logits: Tensor, sequences: list[Sequence], positions: Seq[int]
) -> kernels.SamplingTensors | None:
    """What `kernels.sample` needs; None if all requests are greedy."""
    requests = [sequence.request for sequence in sequences]
    vocab_size = logits.shape[-1]
    temperature, top_p, min_p = _columns(requests, "temperature", "top_p", "min_p")
    temperature[temperature < _GREEDY_BELOW] = 0
    if not temperature.any():
        return None
    limits = [min(r.top_k, vocab_size) if r.top_k > 0 else vocab_size for r in requests]
    top_k = np.array(limits, dtype=np.int32)
    keys = make_keys([r.seed for r in requests], positions)
    filtered = (temperature > 0) & ((top_k < vocab_size) | (top_p < 1) | (min_p > 0))
    columns = _upload(logits, temperature, top_k, top_p, min_p, keys)
    return kernels.SamplingTensors._make((*columns, bool(filtered.any())))


def _columns(requests: list[EngineRequest], *names: str) -> list[Array]:
    """The values of each parameter, [num_rows] float32."""
    return [np.array([getattr(r, name) for r in requests], dtype=np.float32) for name in names]


def make_keys(seeds: Seq[int], positions: Seq[int]) -> Array:
    """[n] int64: a random number per (seed, position): SplitMix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        x = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
        x = _mix(_mix(x) + np.array(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return x.view(np.int64)


def _mix(x: Array) -> Array:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _logprobs(
    raw: Tensor,  # [n, vocab_size]: log probabilities
    token_ids: Tensor,  # [n] int64: the chosen tokens
    k: int,
) -> list[Tensor]:
    """Values [n] and ranks [n] of the chosen tokens; ids and values [n, k] of the k most likely."""
    chosen = raw.gather(-1, token_ids[:, None])  # [n, 1]
    rank = (raw > chosen).sum(dim=-1) + 1
    top = raw.topk(k, dim=-1)
    return [chosen.flatten(), rank, top.indices, top.values]


def _token_logprobs(
    k: int, logprob: float, rank: int, token_ids: list[int], values: list[float]
) -> TokenLogprobs:
    return TokenLogprobs(logprob, rank, list(zip(token_ids[:k], values[:k], strict=True)))


def _starts(rows: Seq[Sized]) -> Array:
    """[num_rows + 1] int32: where each row starts in the concatenation of all rows."""
    return np.cumsum([0, *map(len, rows)], dtype=np.int32)


def _upload(like: Tensor, *arrays: Array) -> list[Tensor]:
    """The arrays on the device of `like`, by one asynchronous copy from pinned memory."""
    tensors = [torch.from_numpy(array) for array in arrays]
    if not like.is_cuda:
        return tensors
    # Aligned to 16 bytes, the alignment that the kernels are compiled for.
    sizes = [-(-tensor.nbytes // 16) * 16 for tensor in tensors]

    def parts(packed: Tensor) -> list[Tensor]:
        pairs = zip(packed.split(sizes), tensors, strict=True)
        return [part[: tensor.nbytes].view(tensor.dtype) for part, tensor in pairs]

    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, tensor in zip(parts(packed), tensors, strict=True):
        part.copy_(tensor)
    return parts(packed.to(like.device, non_blocking=True))
