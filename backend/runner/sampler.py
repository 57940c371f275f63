"""Logits to token ids and their log probabilities. Nothing here waits for a GPU but `read()`.

Knows what requests ask for; how it is computed is known to `kernels`.
"""

from collections.abc import Iterable, Sized
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tritium import kernels
from tritium.backend.engine.request import EngineRequest, SampledToken, TokenLogprobs
from tritium.backend.engine.sequence import Sequence

# As in vLLM: dividing by less makes infinities.
_GREEDY_BELOW = 1e-5
# Beyond, float32 has no place for differences between logits, and far beyond are infinities.
_LARGEST_BIAS = 1e4


class Sampled(NamedTuple):
    """A step's tokens: on the device at once, on the host when they have got there."""

    token_ids: Tensor  # [num_seqs] int64, on the device
    on_host: list[Tensor]  # the same, then _logprobs() of those who want them
    num_logprobs: Seq[int | None]  # of each token
    copied: torch.cuda.Event | None  # None: there is nothing to wait for

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
        # Of the last step's sequences; one that was not in it has its state made anew.
        self._states: dict[Sequence, _State] = {}

    def sample(
        self,
        logits: Tensor,  # [num_seqs, vocab_size] float32; may be overwritten
        sequences: list[Sequence],  # where one has drafts, it stands there for each of its rows
        positions: Seq[int],  # of the tokens to choose
        masks: Tensor | None = None,  # [num_seqs, ceil(vocab_size / 32)] int32: kernels.apply_mask
    ) -> Sampled:
        """Choose the next token of each sequence.

        In vLLM's order: log probabilities are the model's own; then come allowed tokens, bad
        words, min_tokens, logit_bias, penalties, and at last temperature and filters.
        """
        self._states = {s: self._states.get(s) or _State(s.request) for s in sequences}
        num_logprobs = [sequence.request.num_logprobs for sequence in sequences]
        wanting = [i for i, k in enumerate(num_logprobs) if k is not None]
        if wanting:
            [rows] = _upload(logits, np.array(wanting))
            raw = logits[rows].log_softmax(dim=-1)
        if masks is not None:
            kernels.apply_mask(logits, masks)
        self._adjust(logits, sequences)
        token_ids = kernels.sample(logits, _sampling_tensors(logits, sequences, positions))
        tensors = [token_ids]
        if wanting:
            tensors += _logprobs(raw, token_ids[rows], max(k or 0 for k in num_logprobs))
        return _on_its_way(tensors, num_logprobs)

    def _adjust(self, logits: Tensor, sequences: list[Sequence]) -> None:
        """What requests want changed in the logits, apart from temperature and filters."""
        states = [self._states[sequence] for sequence in sequences]
        if any(len(state.allowed) for state in states):
            _allow_only(logits, [state.allowed for state in states])

        forbidden = [_forbidden(sequence) for sequence in sequences]
        if any(forbidden):
            token_ids = np.array([i for row in forbidden for i in row], dtype=np.int32)
            minus_inf = np.full(len(token_ids), -np.inf, dtype=np.float32)
            kernels.add_bias(logits, *_upload(logits, token_ids, minus_inf, _starts(forbidden)))

        biased = [state.biased for state in states]
        if any(map(len, biased)):
            biases = np.concatenate([state.biases for state in states])
            ragged = np.concatenate(biased), biases, _starts(biased)
            kernels.add_bias(logits, *_upload(logits, *ragged))

        if any(state.is_penalised for state in states):
            counted = [
                state.count(sequence) for state, sequence in zip(states, sequences, strict=True)
            ]
            token_ids, counts = (np.concatenate(arrays) for arrays in zip(*counted, strict=True))
            starts = _starts([token_ids for token_ids, _ in counted])
            requests = [sequence.request for sequence in sequences]
            penalties = (
                np.array([r.repetition_penalty for r in requests], dtype=np.float32),
                np.array([r.presence_penalty for r in requests], dtype=np.float32),
                np.array([r.frequency_penalty for r in requests], dtype=np.float32),
            )
            tensors = _upload(logits, token_ids, counts, starts, *penalties)
            kernels.apply_penalties(logits, *tensors)


def grammar_masks(sequences: list[Sequence], vocab_size: int) -> np.ndarray | None:
    """The tokens that grammars allow, for `Sampler.sample()`; None where there is no grammar.

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
    """Tokens that are given, with their log probabilities and the k likeliest ones'.

    Args:
        logits: [n, vocab_size] float32.
        token_ids: [n] int64.
    """
    logprobs = _logprobs(logits.log_softmax(dim=-1), token_ids, k)
    return _on_its_way([token_ids, *logprobs], [k] * len(token_ids))


def _on_its_way(tensors: list[Tensor], num_logprobs: Seq[int | None]) -> Sampled:
    """Starts the copy to the host."""
    on_host = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    copied = None
    if tensors[0].is_cuda:
        copied = torch.cuda.current_stream(tensors[0].device).record_event()
    return Sampled(tensors[0], on_host, num_logprobs, copied)


class _State:
    """What is kept of a sequence: parts of its request as arrays, and how often each token is
    in its output. Tokens of the prompt count 0; they are there where repetition is penalised."""

    def __init__(self, request: EngineRequest) -> None:
        self.allowed = np.array(request.allowed_token_ids, dtype=np.int64)
        self.biased = np.array([token_id for token_id, _ in request.logit_bias], dtype=np.int32)
        biases = np.array([bias for _, bias in request.logit_bias])
        self.biases = biases.clip(-_LARGEST_BIAS, _LARGEST_BIAS).astype(np.float32)
        repeats = request.repetition_penalty != 1
        self.is_penalised = bool(repeats or request.presence_penalty or request.frequency_penalty)

        prompt = sorted(set(request.prompt_token_ids)) if repeats else []
        self._places = {token_id: i for i, token_id in enumerate(prompt)}
        capacity = len(prompt) + request.max_tokens if self.is_penalised else 0
        self._token_ids = np.zeros(capacity, dtype=np.int32)
        self._token_ids[: len(prompt)] = prompt
        self._counts = np.zeros(capacity, dtype=np.int32)
        self._num_counted = len(request.prompt_token_ids)

    def count(self, sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
        """(token ids, counts), both int32; counts the tokens that are new since the last time."""
        if self.is_penalised:
            for token_id in sequence.token_ids[self._num_counted :]:
                place = self._places.setdefault(token_id, len(self._places))
                self._token_ids[place] = token_id
                self._counts[place] += 1
            self._num_counted = len(sequence.token_ids)
        return self._token_ids[: len(self._places)], self._counts[: len(self._places)]


def _forbidden(sequence: Sequence) -> list[int]:
    """Stop tokens before min_tokens, and the last tokens of bad words that would be complete."""
    request = sequence.request
    forbidden: list[int] = []
    # Where there is a grammar, its mask says when the answer may end.
    if sequence.num_output_tokens < request.min_tokens and not sequence.grammar:
        forbidden += request.stop_token_ids
    for *before, last in request.bad_words:
        start = len(sequence.token_ids) - len(before)
        if start >= sequence.num_prompt_tokens and sequence.token_ids[start:] == before:
            forbidden.append(last)
    return forbidden


def _forbid_unless_last(mask: np.ndarray, token_ids: Iterable[int]) -> None:
    """Clear the bits of tokens, if that leaves others: an answer that is whole has to end.

    Args:
        mask: [num_words] int32, changed in place.
    """
    others = mask.view(np.uint32).copy()
    for token_id in token_ids:
        others[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if others.any():
        mask[:] = others.view(np.int32)


def _allow_only(logits: Tensor, allowed: list[np.ndarray]) -> None:
    """Forbid all tokens but those of each row's list; where it is empty, none."""
    lengths = [len(token_ids) for token_ids in allowed]
    rows = np.repeat(np.arange(len(allowed)), lengths)
    restricted = np.flatnonzero(lengths)
    at_rows, at_tokens, whole = _upload(logits, rows, np.concatenate(allowed), restricted)
    kept = logits[at_rows, at_tokens]
    logits.index_fill_(0, whole, float("-inf"))
    logits[at_rows, at_tokens] = kept


def _sampling_tensors(
    logits: Tensor, sequences: list[Sequence], positions: Seq[int]
) -> kernels.SamplingTensors | None:
    """None: all are greedy."""
    requests = [sequence.request for sequence in sequences]
    vocab_size = logits.shape[-1]
    temperature = np.array([r.temperature for r in requests], dtype=np.float32)
    temperature[temperature < _GREEDY_BELOW] = 0
    if not temperature.any():
        return None
    limits = [min(r.top_k, vocab_size) if r.top_k > 0 else vocab_size for r in requests]
    top_k = np.array(limits, dtype=np.int32)
    top_p = np.array([r.top_p for r in requests], dtype=np.float32)
    min_p = np.array([r.min_p for r in requests], dtype=np.float32)
    keys = make_keys([r.seed for r in requests], positions)
    filtered = (temperature > 0) & ((top_k < vocab_size) | (top_p < 1) | (min_p > 0))
    columns = _upload(logits, temperature, top_k, top_p, min_p, keys)
    return kernels.SamplingTensors._make((*columns, bool(filtered.any())))


def make_keys(seeds: Seq[int], positions: Seq[int]) -> np.ndarray:
    """[n] int64: random numbers for each (seed, position): SplitMix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        x = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
        x = _mix(_mix(x) + np.array(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return x.view(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _logprobs(
    raw: Tensor,  # [n, vocab_size]: log probabilities
    token_ids: Tensor,  # [n] int64: the chosen tokens
    k: int,
) -> list[Tensor]:
    """The chosen tokens' values [n] and ranks [n], the k likeliest tokens [n, k], their values."""
    chosen = raw.gather(-1, token_ids[:, None])  # [n, 1]
    rank = (raw > chosen).sum(dim=-1) + 1
    top = raw.topk(k, dim=-1)
    return [chosen.flatten(), rank, top.indices, top.values]


def _token_logprobs(
    k: int, logprob: float, rank: int, token_ids: list[int], values: list[float]
) -> TokenLogprobs:
    return TokenLogprobs(logprob, rank, list(zip(token_ids[:k], values[:k], strict=True)))


def _starts(rows: Seq[Sized]) -> np.ndarray:
    """[num_rows + 1] int32: where each row begins with all of them in one list."""
    return np.cumsum([0, *map(len, rows)], dtype=np.int32)


def _upload(like: Tensor, *arrays: np.ndarray) -> list[Tensor]:
    """The arrays where `like` is: in one copy, out of pinned memory, that nobody waits for."""
    tensors = [torch.from_numpy(array) for array in arrays]
    if not like.is_cuda:
        return tensors
    # At multiples of 16 bytes, which Triton-lang compiles a kernel for.
    sizes = [-(-tensor.nbytes // 16) * 16 for tensor in tensors]

    def parts(packed: Tensor) -> list[Tensor]:
        of_each = zip(packed.split(sizes), tensors, strict=True)
        return [part[: tensor.nbytes].view(tensor.dtype) for part, tensor in of_each]

    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, tensor in zip(parts(packed), tensors, strict=True):
        part.copy_(tensor)
    return parts(packed.to(like.device, non_blocking=True))
