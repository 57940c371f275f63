"""Runs a step: scheduled sequences -> tensors -> model -> sampled token ids. Owns the KV cache."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritium.backend.config import ConfigError, EngineConfig
from tritium.backend.engine.request import EngineRequest, SampledToken
from tritium.backend.engine.sequence import ScheduledSequence, Sequence
from tritium.backend.errors import OutOfMemory
from tritium.backend.runner.cuda_graphs import DecodeGraphs
from tritium.backend.runner.models import DecoderModel, load_model
from tritium.backend.runner.models.loader import load_weights, resolve
from tritium.backend.runner.sampler import Sampled, Sampler, grammar_masks, score
from tritium.kernels import AttentionMetadata, KVCache, StoredWeight, bind_threads, cpu

# Shares of the free memory. On a CPU other processes need memory, too.
_SHARES = {"cuda": 0.9, "cpu": 0.5}
_WARM_UP_POSITIONS = 1024  # as long as the sequences of the warm-up, whatever max_model_len
_LOGIT_ROWS = 128  # prompt tokens whose logits, which are large, are computed at once
_WEIGHT_BITS = {"none": 16, "int8": 8, "int4": 4}
_KV_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


class _LastStep(NamedTuple):
    """The sampled tokens of the step that was launched last."""

    token_ids: Tensor  # [n] int64, on the device
    rows: dict[Sequence, int]  # each sequence's row


class ModelRunner:
    """Runs a model's steps.

    On a GPU a step may be launched before the previous step is read: it takes the tokens that the
    host does not know yet from the device. Steps that only decode, without an adapter, replay CUDA
    graphs.

    Args:
        config: Model, adapters, device, dtypes, KV memory.
        device_id: Which GPU; unused on a CPU.
        model: Replaces the model that `config` names.
    """

    def __init__(
        self, config: EngineConfig, device_id: int = 0, model: DecoderModel | None = None
    ) -> None:
        self.device = model.device if model else _choose_device(config, device_id)
        self.overlaps = self.device.type == "cuda"
        if config.cpu_threads:
            torch.set_num_threads(config.cpu_threads)
        with self._on_device():
            self.model = model or _load_model(config, self.device)
            _load_adapters(self.model, config)
            self.block_size = config.block_size
            self._kv_dtype = _KV_DTYPES.get(config.kv_cache_dtype, self.model.dtype)
            if config.batch_invariant:
                _check_batch_invariance(self.model, self._allocate(1)[0])
            self._last = _LastStep(torch.empty(0), {})
            self._sampler = Sampler()
            self._graphs: DecodeGraphs | None = None
            working_memory = self._warm_up(config)
            self.num_blocks = self._count_blocks(config, working_memory)
            self.kv_caches = self._allocate(self.num_blocks)
            most = self.model.config.max_position_embeddings
            cached = self.num_blocks * self.block_size
            longest = min(config.max_model_len or most, cached)
            self.num_positions = min(max(longest, _WARM_UP_POSITIONS), most, cached)
            self.model.set_num_positions(self.num_positions)
            if self.overlaps and config.cuda_graphs:
                limits = config.max_num_seqs, longest
                self._graphs = DecodeGraphs(self.model, self.kv_caches, self.block_size, *limits)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        model = self.model.config
        return model.num_layers * KVCache.block_bytes(
            self.block_size, model.num_kv_heads, model.head_dim, self._kv_dtype
        )

    def start(self) -> None:
        """Prepare the thread that will call `launch`; call this on that thread."""
        if self.device.type == "cpu":
            bind_threads()

    def launch(self, batch: list[ScheduledSequence]) -> Callable[[], list[SampledToken]]:
        """Start computing the batch's new tokens.

        Args:
            batch: Sequences with one new token come first.

        Returns:
            A function that waits for the step and returns `num_samples` tokens per sequence, in the
            batch's order.

        Raises:
            OutOfMemory: nothing was sampled; the same tokens may be computed again.
        """
        try:
            return self._launch(batch)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            reason = str(error)
        # At this point nothing refers to the step's tensors any more.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        raise OutOfMemory(reason)

    @torch.inference_mode()
    def _launch(self, batch: list[ScheduledSequence]) -> Callable[[], list[SampledToken]]:
        with self._on_device():
            input_ids, positions, metadata = self._tensors(batch)
            lora = self._lora_rows(batch)
            # A graph holds only the base model's launches: an adapter's rows and their number
            # differ from step to step.
            if self._graphs and metadata.max_query_len == 1 and not lora:
                hidden = self._graphs.run(input_ids, positions, metadata)
            else:
                hidden = self.model.forward(input_ids, positions, self.kv_caches, metadata, lora)
            prompt_logprobs = self._prompt_logprobs(batch, hidden)
            sampled = self._sample(batch, hidden)

        def read() -> list[SampledToken]:
            for sequence, begin, scored in prompt_logprobs:
                sequence.prompt_logprobs[begin:] = scored.read()
            return sampled.read() if sampled else []

        return read

    def _sample(self, batch: list[ScheduledSequence], hidden: Tensor) -> Sampled | None:
        """Sample the batch's next tokens; None if no sequence reaches its last token.

        Args:
            hidden: [num_tokens, hidden] of all the step's tokens.
        """
        rows = _sampled_rows(batch)
        if not len(rows):
            return None
        if len(rows) < len(hidden):
            hidden = hidden[self._to_device(rows)]
        sequences = [s.sequence for s in batch for _ in range(s.num_samples)]
        positions = [p for s in batch for p in range(s.end - s.num_samples + 1, s.end + 1)]
        logits = self.model.compute_logits(hidden)
        # Filled while a GPU still computes the logits.
        masks = grammar_masks(sequences, logits.shape[1])
        on_device = None if masks is None else self._to_device(masks)
        sampled = self._sampler.sample(logits, sequences, positions, on_device)
        rows_of = {sequence: row for row, sequence in enumerate(sequences)}
        self._last = _LastStep(sampled.token_ids, rows_of)
        return sampled

    def _prompt_logprobs(
        self, batch: list[ScheduledSequence], hidden: Tensor
    ) -> list[tuple[Sequence, int, Sampled]]:
        """(sequence, first position, log probabilities of the prompt tokens that follow).

        For the sequences that ask for them; `hidden` as for `_sample`.
        """
        pieces: list[tuple[Sequence, int, Sampled]] = []
        first = 0
        for sequence, start, end, _, _ in batch:
            k = sequence.request.num_prompt_logprobs
            if sequence.num_output_tokens:
                k = None  # computed before the sequence was preempted
            stop = min(end, sequence.num_prompt_tokens - 1)  # the last prompt token has no next one
            for begin in range(start, stop, _LOGIT_ROWS) if k is not None else ():
                following = sequence.token_ids[begin + 1 : min(begin + _LOGIT_ROWS, stop) + 1]
                row = first + begin - start
                logits = self.model.compute_logits(hidden[row : row + len(following)])
                token_ids = self._to_device(np.array(following, dtype=np.int64))
                pieces.append((sequence, begin, score(logits, token_ids, k or 0)))
            first += end - start
        return pieces

    def _tensors(self, batch: list[ScheduledSequence]) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """input_ids [num_tokens], positions [num_tokens], metadata."""
        computed = np.array([scheduled.start for scheduled in batch])
        seq_lens = np.array([scheduled.end for scheduled in batch])
        query_lens = seq_lens - computed
        query_start_loc = np.concatenate(([0], query_lens.cumsum()))
        num_tokens = int(query_start_loc[-1])

        input_ids = np.empty(num_tokens, dtype=np.int64)
        block_tables = np.zeros((len(batch), -(-int(seq_lens.max()) // self.block_size)), np.int32)
        pending: list[tuple[int, int]] = []  # (token of this step, its row in the last step)
        for i, (sequence, start, end, _, draft_token_ids) in enumerate(batch):
            first = query_start_loc[i]
            token_ids = sequence.token_ids[start:end]
            token_ids += draft_token_ids
            if len(token_ids) < end - start:
                token_ids.append(0)
                pending.append((first + end - start - 1, self._last.rows[sequence]))
            input_ids[first : first + end - start] = token_ids
            block_tables[i, : len(sequence.block_table)] = sequence.block_table

        # Token t of sequence i is at position computed[i] + (t - query_start_loc[i]).
        offsets = np.repeat(computed - query_start_loc[:-1], query_lens)
        positions = np.arange(num_tokens) + offsets
        owners = np.repeat(np.arange(len(batch)), query_lens)
        blocks = block_tables[owners, positions // self.block_size].astype(np.int64)
        slot_mapping = blocks * self.block_size + positions % self.block_size

        metadata = AttentionMetadata(
            query_start_loc=self._to_device(query_start_loc.astype(np.int32)),
            seq_lens=self._to_device(seq_lens.astype(np.int32)),
            block_tables=self._to_device(block_tables),
            slot_mapping=self._to_device(slot_mapping),
            block_size=self.block_size,
            num_decodes=int((query_lens == 1).sum()),
            max_query_len=int(query_lens.max()),
        )
        ids = self._to_device(input_ids)
        if pending:
            here, there = self._to_device(np.array(pending, dtype=np.int64).T.copy())
            ids.index_copy_(0, here, self._last.token_ids[there])
        return ids, self._to_device(positions), metadata

    def _lora_rows(self, batch: list[ScheduledSequence]) -> dict[str, Tensor]:
        """Adapter -> its tokens of this step, [n] int64, for each adapter that the step uses."""
        names = [scheduled.sequence.request.lora for scheduled in batch]
        if not any(names):
            return {}
        query_lens = [scheduled.num_new_tokens for scheduled in batch]
        owners = np.repeat(np.array(names, dtype=np.object_), query_lens)
        used = sorted(set(names) - {""})
        return {name: self._to_device(np.flatnonzero(owners == name)) for name in used}

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        """Start an asynchronous copy; the pinned buffer is not reused until it has finished."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """Makes this runner's GPU the thread's current one, on which kernels are launched."""
        if self.device.type == "cuda":
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()

    def _allocate(self, num_blocks: int) -> list[KVCache]:
        model = self.model.config
        shape = (num_blocks, self.block_size, model.num_kv_heads, model.head_dim)
        layers = range(model.num_layers)
        return [KVCache.empty(*shape, self._kv_dtype, self.device) for _ in layers]

    def _warm_up(self, config: EngineConfig) -> int:
        """Run the largest and the smallest steps, so that the first requests are not slower.

        Returns:
            The most bytes that a step needs besides weights and KV cache; 0 on a CPU.
        """
        max_tokens = min(config.max_num_batched_tokens, self.model.config.max_position_embeddings)
        self.model.set_num_positions(max_tokens)
        self.kv_caches = self._allocate(-(-max_tokens // self.block_size))
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        lora = next(iter(config.lora_modules), "")  # with an adapter a step needs more memory
        for num_tokens in {max_tokens, min(16, max_tokens), 1}:  # one per kind of kernel
            sequence = Sequence(EngineRequest(-1, [0] * num_tokens, max_tokens=1, lora=lora))
            sequence.block_table = list(range(-(-num_tokens // self.block_size)))
            self.launch([ScheduledSequence.of(sequence, num_tokens)])()
        self.kv_caches = []
        if self.device.type != "cuda":
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.max_memory_allocated(self.device) - before

    def _count_blocks(self, config: EngineConfig, working_memory: int) -> int:
        memory = config.kv_cache_memory
        if memory is None:
            free = max(_free_memory(self.device) - working_memory, 0)
            share = config.kv_cache_memory_fraction or _SHARES[self.device.type]
            memory = int(free * share)
        num_blocks = memory // self.block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"config.pbtxt: parameter 'kv_cache_memory': {memory} bytes hold no block; "
                f"one block of {self.block_size} tokens takes {self.block_bytes} bytes"
            )
        return num_blocks


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """PyTorch's allocator on CPU raises a plain RuntimeError."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def _sampled_rows(batch: list[ScheduledSequence]) -> NDArray[Any]:
    """The step's tokens after which a token is sampled, [n] int64: the last ones per sequence."""
    ends = np.cumsum([s.num_new_tokens for s in batch])
    counts = np.array([s.num_samples for s in batch])
    rows: NDArray[Any] = np.arange(counts.sum()) + np.repeat(ends - counts.cumsum(), counts)
    return rows


def _choose_device(config: EngineConfig, device_id: int) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("config.pbtxt: parameter 'device' is 'cuda', but no GPU was found")
    return torch.device("cuda", device_id)


def _choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported()
    else:
        fast = cpu.is_available() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def _load_model(config: EngineConfig, device: torch.device) -> DecoderModel:
    bits = _WEIGHT_BITS[config.quantization]
    dtype = _choose_dtype(config, device)
    if bits < 16 and (device.type != "cpu" or dtype != torch.bfloat16):
        raise ConfigError(
            f"config.pbtxt: parameter 'quantization' can't be '{config.quantization}': it is for "
            f"bfloat16 on CPU, not {str(dtype).removeprefix('torch.')} on {device.type}"
        )
    return load_model(
        config.model, dtype, device, config.batch_invariant, bits, config.max_model_len
    )


def _check_batch_invariance(model: DecoderModel, kv_cache: KVCache) -> None:
    if not model.is_batch_invariant(kv_cache):
        dtype = str(model.dtype).removeprefix("torch.")
        raise ConfigError(
            "config.pbtxt: parameter 'batch_invariant': on CPU it needs bfloat16 (here "
            f"{dtype}), AVX2, a C compiler, block_size 16 or more, kv_cache_dtype auto, and a "
            "model whose sizes are multiples of 32. Otherwise PyTorch computes, and the number of "
            "rows decides how it rounds, in float32 too"
        )


def _load_adapters(model: DecoderModel, config: EngineConfig) -> None:
    def base() -> Iterator[tuple[str, StoredWeight]]:
        return load_weights(resolve(config.model), model.config)

    for name, directory in config.lora_modules.items():
        try:
            model.load_adapter(name, Path(directory), base)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"config.pbtxt: parameter 'lora_modules': adapter '{name}' can't be loaded from "
                f"{directory}: {error}"
            ) from error


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
