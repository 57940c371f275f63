"""Scheduled sequences to tensors, through the model, to sampled token ids. Owns the KV cache."""

import os

import numpy as np
import torch

from backend.config import ConfigError, EngineConfig
from backend.models import load_model
from backend.sampler import sample
from backend.scheduler import ScheduledSequence
from backend.sequence import EngineRequest, SampledToken, Sequence
from kernels import AttentionMetadata


class ModelRunner:
    """Runs a model's steps.

    Args:
        config: Model, device, dtype, KV memory.
        device_id: Which GPU, where one is used.
    """

    def __init__(self, config: EngineConfig, device_id: int = 0) -> None:
        self.device = _choose_device(config, device_id)
        dtype = _choose_dtype(config, self.device)
        if config.cpu_threads:
            torch.set_num_threads(config.cpu_threads)
        self.model = load_model(config.model, dtype, self.device)
        self.block_size = config.block_size
        self.num_blocks = self._count_blocks(config)
        model = self.model.config
        shape = (2, self.num_blocks, self.block_size, model.num_kv_heads, model.head_dim)
        self.kv_caches = [
            torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(model.num_layers)
        ]
        self._warm_up(config.max_num_batched_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        model = self.model.config
        numbers = 2 * self.block_size * model.num_kv_heads * model.head_dim * model.num_layers
        return numbers * self.model.dtype.itemsize

    @torch.inference_mode()
    def run(self, batch: list[ScheduledSequence]) -> list[SampledToken]:
        """Compute the batch's new tokens.

        Args:
            batch: Those with one new token first.

        Returns:
            The next token of each that `samples`, in the batch's order.
        """
        input_ids, positions, metadata = self._tensors(batch)
        hidden = self.model.forward(input_ids, positions, self.kv_caches, metadata)
        sampling = [i for i, scheduled in enumerate(batch) if scheduled.samples]
        if not sampling:
            return []
        rows = (metadata.query_start_loc[1:] - 1).long()
        if len(sampling) < len(batch):
            rows = rows[sampling]
        logits = self.model.compute_logits(hidden[rows])
        return sample(logits, [batch[i].sequence for i in sampling])

    def _tensors(
        self, batch: list[ScheduledSequence]
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """input_ids [num_tokens], positions [num_tokens], metadata."""
        computed = np.array([s.num_computed_tokens for s, _ in batch])
        query_lens = np.array([num_new for _, num_new in batch])
        seq_lens = computed + query_lens
        query_start_loc = np.concatenate(([0], query_lens.cumsum()))
        num_tokens = int(query_start_loc[-1])

        input_ids = np.empty(num_tokens, dtype=np.int64)
        block_tables = np.zeros((len(batch), -(-int(seq_lens.max()) // self.block_size)), np.int32)
        for i, (sequence, num_new) in enumerate(batch):
            start, first = query_start_loc[i], sequence.num_computed_tokens
            input_ids[start : start + num_new] = sequence.token_ids[first : first + num_new]
            block_tables[i, : len(sequence.block_table)] = sequence.block_table

        # Token t of sequence i stands at position computed[i] + (t - query_start_loc[i]).
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
            max_seq_len=int(seq_lens.max()),
        )
        return self._to_device(input_ids), self._to_device(positions), metadata

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _count_blocks(self, config: EngineConfig) -> int:
        memory = config.kv_cache_memory
        if memory is None:
            memory = int(_free_memory(self.device) * config.kv_cache_memory_fraction)
        num_blocks = memory // self.block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"config.pbtxt: parameter 'kv_cache_memory': {memory} bytes hold no block; "
                f"one block of {self.block_size} tokens takes {self.block_bytes} bytes"
            )
        return num_blocks

    def _warm_up(self, num_tokens: int) -> None:
        """Run the largest step once, so that the first request doesn't pay for it."""
        num_tokens = min(
            num_tokens,
            self.num_blocks * self.block_size,
            self.model.config.max_position_embeddings,
        )
        sequence = Sequence(EngineRequest(-1, [0] * num_tokens, max_tokens=1))
        sequence.block_table = list(range(-(-num_tokens // self.block_size)))
        self.run([ScheduledSequence(sequence, num_tokens)])


def _choose_device(config: EngineConfig, device_id: int) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("config.pbtxt: parameter 'device' is 'cuda', but there is no GPU here")
    return torch.device("cuda", device_id)


def _choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported()
    else:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
