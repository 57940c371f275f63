"""The kernels, through Triton-lang's interpreter, and their PyTorch twins, against float64.

An error is the relative one, ||out - expected|| / ||expected||, of the head of a token where it
is largest. Inputs are fresh in every run.
What a kernel must not read is NaN beforehand, and so is what it must write.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from kernels import reference
from kernels.metadata import AttentionMetadata
from kernels.paged_attention import paged_attention
from kernels.rope_cache import rope_and_cache

del os.environ["TRITON_INTERPRET"]  # not for the processes that other tests start
assert isinstance(tl.max, InterpretedFunction), "triton was imported without TRITON_INTERPRET"

NAN = float("nan")

DECODE = [(1, 1328)]
SHORT = [(5, 18)]
LONG = [(129, 463)]
MIXED = [(1, 300), (1, 1), (1, 64), (5, 18), (70, 70), (129, 463)]  # (query_len, seq_len)
BATCHES = pytest.mark.parametrize(
    "batch", [DECODE, SHORT, LONG, MIXED], ids=["decode", "short", "long", "mixed"]
)
HEADS = pytest.mark.parametrize("heads", [(4, 4), (8, 2), (9, 3), (5, 1)], ids=str)
# Each dtype with the bound on its error.
FP32, FP16, BF16 = (torch.float32, 5e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)
KERNEL_DTYPES = pytest.mark.parametrize(("dtype", "bound"), [FP32, FP16], ids=["fp32", "fp16"])
TWIN_DTYPES = pytest.mark.parametrize(("dtype", "bound"), [FP32, BF16], ids=["fp32", "bf16"])


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    """On one thread: tensors this small take up to 20 times as long on more of a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # triton imports more of itself at the first launch
        yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Makes torch fill with NaN what it allocates without a value."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# -- attention --


@BATCHES
@HEADS
def test_attention(batch: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    check_kernel(batch, heads, 64, *FP16)


@KERNEL_DTYPES
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attention_head_dims(head_dim: int, dtype: torch.dtype, bound: float) -> None:
    check_kernel(DECODE, (3, 1), head_dim, dtype, bound)
    check_kernel([(1, 40), (5, 18), (70, 150)], (3, 1), head_dim, dtype, bound)


@pytest.mark.parametrize("sliding_window", [1, 16, 64, 100, 1000])
def test_attention_sliding_window(sliding_window: int) -> None:
    check_kernel(DECODE, (3, 1), 64, *FP16, sliding_window=sliding_window)
    check_kernel(MIXED, (3, 1), 64, *FP16, sliding_window=sliding_window)


@pytest.mark.parametrize("block_size", [32, 128])
def test_attention_block_sizes(block_size: int) -> None:
    check_kernel(MIXED, (4, 2), 64, *FP16, block_size=block_size)


def test_attention_of_many_sequences() -> None:
    """Each program finds its own sequence: none is left out, none taken twice."""
    check_kernel([(1, length) for length in range(1, 20)], (3, 1), 64, *FP32)
    check_kernel([(length, length + 3) for length in range(1, 14)], (9, 1), 64, *FP32)


@pytest.mark.parametrize("sliding_window", [None, 3])
def test_attention_around_the_edge_of_a_tile(sliding_window: int | None) -> None:
    batch = [(2, seq_len) for seq_len in range(60, 70)]
    check_kernel(batch, (2, 1), 64, *FP16, sliding_window=sliding_window)


def test_attention_of_a_padded_batch() -> None:
    """A CUDA graph's batch ends in sequences without queries, and in tokens of no sequence."""
    q, kv_cache, metadata = random_batch([*MIXED, (0, 0), (0, 0)], (4, 2), 64, torch.float16)
    num_tokens = q.shape[0]
    padded = torch.cat((q, q.new_full((7, 4, 64), NAN)))
    out = paged_attention(padded, kv_cache, metadata, 0.125)
    assert error(out[:num_tokens], dense_attention(q, kv_cache, metadata, 0.125)) < FP16[1]


def test_attention_refuses_bfloat16_in_the_interpreter() -> None:
    batch = random_batch(SHORT, (4, 2), 64, torch.bfloat16)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        paged_attention(*batch, 0.125)


@BATCHES
@HEADS
@TWIN_DTYPES
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("sliding_window", [None, 1, 100])
def test_attention_twin(
    batch: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    bound: float,
    sliding_window: int | None,
) -> None:
    q, kv_cache, metadata = random_batch(batch, heads, head_dim, dtype, unused=0.0)
    out = reference.attention(q, kv_cache, metadata, head_dim**-0.5, sliding_window)
    expected = dense_attention(q, kv_cache, metadata, head_dim**-0.5, sliding_window)
    assert error(out, expected) < bound


# -- rope_and_cache --


@HEADS
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("dtype", "bound"), [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("function", [rope_and_cache, reference.rope_and_cache])
def test_rope_and_cache(
    function: Callable[..., Tensor],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    bound: float,
) -> None:
    num_heads, num_kv_heads = heads
    qkv = torch.randn(7, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = torch.rand(7, head_dim // 2) * 100
    kv_cache = torch.full((2, 3, 16, num_kv_heads, head_dim), NAN, dtype=dtype)
    slots = torch.tensor([40, 3, -1, 16, 17, -1, 0])
    written = slots >= 0
    expected = rotated(qkv[:, : num_heads + num_kv_heads], angles)
    values = qkv[:, num_heads + num_kv_heads :].clone()

    q = function(qkv, angles.cos(), angles.sin(), kv_cache, slots)

    keys_cached, values_cached = kv_cache.view(2, 48, num_kv_heads, head_dim)
    assert error(q[written], expected[written, :num_heads]) < bound
    assert error(keys_cached[slots[written]], expected[written, num_heads:]) < bound
    assert torch.equal(values_cached[slots[written]], values[written])
    assert kv_cache.isnan().sum() == kv_cache.numel() - 5 * 2 * num_kv_heads * head_dim


def test_offsets_beyond_int32(tmp_path: Path) -> None:
    """Blocks whose first element's number needs more than 31 bits, in a sparse file."""
    num_blocks, block_elements = 2**31 // (16 * 64) + 4, 16 * 64
    kv_cache = torch.from_file(
        str(tmp_path / "kv_cache"),
        shared=True,
        size=2 * num_blocks * block_elements,
        dtype=torch.float16,
    ).view(2, num_blocks, 16, 1, 64)
    metadata = make_metadata([(20, 20)], torch.tensor([[num_blocks - 1, num_blocks - 3]]))
    qkv = torch.randn(20, 3 + 2, 64).half()
    values = qkv[:, 4:].clone()
    angles = torch.rand(20, 32) * 100
    expected_keys = rotated(qkv[:, 3:4], angles)

    q = rope_and_cache(qkv, angles.cos(), angles.sin(), kv_cache, metadata.slot_mapping)
    out = paged_attention(q, kv_cache, metadata, 0.125)

    keys, cached_values = (c[[num_blocks - 1, num_blocks - 3]].view(32, 1, 64) for c in kv_cache)
    assert error(keys[:20], expected_keys) < FP16[1]
    assert torch.equal(cached_values[:20], values)
    assert error(out, dense_attention(q, kv_cache, metadata, 0.125)) < FP16[1]


# -- helpers --


def check_kernel(
    batch: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    bound: float,
    sliding_window: int | None = None,
    block_size: int = 16,
) -> None:
    scale = head_dim**-0.5
    q, kv_cache, metadata = random_batch(batch, heads, head_dim, dtype, block_size)
    out = paged_attention(q, kv_cache, metadata, scale, sliding_window)
    expected = dense_attention(q, kv_cache, metadata, scale, sliding_window)
    assert out.dtype == dtype
    assert error(out, expected) < bound


def random_batch(
    batch: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    block_size: int = 16,
    unused: float = NAN,
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """(q, kv_cache, metadata) with blocks in random places; slots of no sequence hold `unused`."""
    num_heads, num_kv_heads = heads
    max_blocks = max(-(-seq_len // block_size) for _, seq_len in batch)
    num_blocks = len(batch) * max_blocks + 1
    block_tables = torch.randperm(num_blocks)[: len(batch) * max_blocks].view(len(batch), -1)
    num_tokens = sum(query_len for query_len, _ in batch)
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    kv_cache = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), unused, dtype=dtype)
    for (_, seq_len), block_ids in zip(batch, block_tables, strict=True):
        slots = (block_ids[:, None] * block_size + torch.arange(block_size)).flatten()[:seq_len]
        cached = torch.randn(2, seq_len, num_kv_heads, head_dim).to(dtype)
        kv_cache.view(2, -1, num_kv_heads, head_dim)[:, slots] = cached
    return qkv[:, :num_heads], kv_cache, make_metadata(batch, block_tables, block_size)


def make_metadata(
    batch: Sequence[tuple[int, int]], block_tables: Tensor, block_size: int = 16
) -> AttentionMetadata:
    query_lens, seq_lens = zip(*batch, strict=True)
    slots = [
        int(block_ids[position // block_size]) * block_size + position % block_size
        for (query_len, seq_len), block_ids in zip(batch, block_tables, strict=True)
        for position in range(seq_len - query_len, seq_len)
    ]
    num_decodes = next((i for i, n in enumerate(query_lens) if n != 1), len(batch))
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens).int(),
        block_tables=block_tables.int(),
        slot_mapping=torch.tensor(slots),
        block_size=block_size,
        num_decodes=num_decodes,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


def dense_attention(
    q: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """softmax(scale * q k^T + mask) v, in float64, one sequence after the other."""
    group = q.shape[1] // kv_cache.shape[3]
    out = torch.empty(q.shape, dtype=torch.float64)
    starts = metadata.query_start_loc.tolist()
    for i, seq_len in enumerate(metadata.seq_lens.tolist()):
        rows = q[starts[i] : starts[i + 1]].double()
        block_ids = metadata.block_tables[i, : -(-seq_len // metadata.block_size)].long()
        keys, values = (
            cached[block_ids].flatten(0, 1)[:seq_len].double().repeat_interleave(group, dim=1)
            for cached in kv_cache
        )
        position = torch.arange(seq_len - len(rows), seq_len)[:, None]
        distance = position - torch.arange(seq_len)
        seen = (distance >= 0) & (distance < (sliding_window or seq_len))
        scores = torch.einsum("qhd,khd->hqk", rows, keys) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[starts[i] : starts[i + 1]] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """(x1 + i x2) * e^(i angle), in float64; x1 and x2 are the halves of a head."""
    x1, x2 = x.double().chunk(2, dim=-1)
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, None]
    turned = torch.complex(x1, x2) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def error(out: Tensor, expected: Tensor) -> float:
    """Not over all tokens at once, where a single lost key would not show."""
    difference = (out.double() - expected).norm(dim=-1)
    return float((difference / expected.norm(dim=-1)).max())
