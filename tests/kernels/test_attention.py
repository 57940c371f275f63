"""The kernels, through Triton-lang's interpreter, and their PyTorch twins, against float64.

An error is relative, ||out - expected|| / ||expected||, of the token's head with the largest one.
Inputs are random in every run. Memory that a kernel must not read, or must write, is NaN
beforehand. With a quantised cache, attention is compared with the dequantised cache.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from tests.interpreter import dot_of_rows_alone  # noqa: F401
from tritium.kernels import reference
from tritium.kernels.cuda.decode_attention import decode_attention, num_splits
from tritium.kernels.cuda.paged_attention import paged_attention
from tritium.kernels.cuda.rope_cache import rope_and_cache
from tritium.kernels.metadata import QUANTISED_MAX, AttentionMetadata, KVCache

del os.environ["TRITON_INTERPRET"]  # not for the processes that other tests start
assert isinstance(tl.max, interpreter.InterpretedFunction), (
    "triton was imported without TRITON_INTERPRET"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),  # empty splits
]

NAN = float("nan")

Batch = Sequence[tuple[int, int]]  # (query_len, seq_len) of each sequence

DECODE = [(1, 1328)]
SHORT = [(5, 18)]
LONG = [(129, 463)]
MIXED = [(1, 300), (1, 1), (1, 64), (5, 18), (70, 70), (129, 463)]
DECODES = [(1, 300), (1, 1), (1, 0), (1, 64), (1, 129), (1, 18)]
BATCHES = pytest.mark.parametrize(
    "batch", [DECODE, SHORT, LONG, MIXED], ids=["decode", "short", "long", "mixed"]
)
HEADS = pytest.mark.parametrize("heads", [(4, 4), (8, 2), (9, 3), (5, 1)], ids=str)
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
# (dtype, bound on the error)
FP32, FP16, BF16 = (torch.float32, 5e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)
KERNEL_DTYPES = pytest.mark.parametrize(("dtype", "bound"), [FP32, FP16], ids=["fp32", "fp16"])
TWIN_DTYPES = pytest.mark.parametrize(("dtype", "bound"), [FP32, BF16], ids=["fp32", "bf16"])
ALL_DTYPES = pytest.mark.parametrize(
    ("dtype", "bound"), [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"]
)
# bfloat16 queries and float8 keys are multiplied in float16, which the interpreter supports.
QUANTISED_AND_DTYPES = pytest.mark.parametrize(
    ("cache_dtype", "dtype", "bound"),
    [
        pytest.param(torch.int8, *FP32, id="int8-fp32"),
        pytest.param(torch.int8, *FP16, id="int8-fp16"),
        pytest.param(torch.float8_e4m3fn, *FP32, id="fp8-fp32"),
        pytest.param(torch.float8_e4m3fn, *FP16, id="fp8-fp16"),
        pytest.param(torch.float8_e4m3fn, *BF16, id="fp8-bf16"),
    ],
)
QUANTISED = pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)

ROPES = pytest.mark.parametrize(
    "function", [rope_and_cache, reference.rope_and_cache], ids=["kernel", "twin"]
)


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """On one thread: on a busy machine, small tensors take up to 20 times as long on more."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # the first launch imports more of triton
        patch.setattr(interpreter, "_convert_float", convert_float)
        yield
    torch.set_num_threads(num_threads)


INTERPRETERS_CONVERSION = interpreter._convert_float
TORCH_DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}


def convert_float(x: np.ndarray, dtype: tl.dtype, to: tl.dtype, rounding: Any) -> np.ndarray:
    """The interpreter's own loses the carry when it rounds to float8, and loses float8's NaN."""
    if tl.float8e4nv not in (dtype, to):
        return INTERPRETERS_CONVERSION(x, dtype, to, rounding)
    converted = torch.from_numpy(x).view(TORCH_DTYPES[dtype]).to(TORCH_DTYPES[to])
    return (converted.view(torch.uint8) if to == tl.float8e4nv else converted).numpy()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Makes torch fill uninitialised memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# -- paged_attention --


@BATCHES
@HEADS
def test_paged_attention(batch: Batch, heads: tuple[int, int]) -> None:
    check_attention(paged_attention, batch, heads, 64, *FP16)


@KERNEL_DTYPES
@HEAD_DIMS
def test_paged_attention_head_dims(head_dim: int, dtype: torch.dtype, bound: float) -> None:
    check_attention(paged_attention, DECODE, (3, 1), head_dim, dtype, bound)
    batch = [(1, 40), (5, 18), (70, 150)]
    check_attention(paged_attention, batch, (3, 1), head_dim, dtype, bound)


@pytest.mark.parametrize("sliding_window", [1, 16, 64, 100, 1000])
def test_paged_attention_sliding_window(sliding_window: int) -> None:
    for batch in (DECODE, MIXED):
        check_attention(paged_attention, batch, (3, 1), 64, *FP16, sliding_window=sliding_window)


@KERNEL_DTYPES
@pytest.mark.parametrize("sliding_window", [None, 20])
def test_paged_attention_soft_cap(
    dtype: torch.dtype, bound: float, sliding_window: int | None
) -> None:
    check_attention(
        paged_attention,
        MIXED,
        (3, 1),
        64,
        dtype,
        bound,
        sliding_window=sliding_window,
        soft_cap=0.8,
    )


@QUANTISED_AND_DTYPES
@pytest.mark.parametrize("soft_cap", [None, 0.8])
def test_paged_attention_of_a_quantised_cache(
    cache_dtype: torch.dtype, dtype: torch.dtype, bound: float, soft_cap: float | None
) -> None:
    for head_dim, window in ((64, None), (80, 100)):
        check_attention(
            paged_attention,
            [*MIXED[1:5], (30, 200)],
            (4, 2),
            head_dim,
            dtype,
            bound,
            cache_dtype,
            sliding_window=window,
            soft_cap=soft_cap,
        )


@pytest.mark.parametrize("block_size", [32, 128])
def test_paged_attention_block_sizes(block_size: int) -> None:
    check_attention(paged_attention, MIXED, (4, 2), 64, *FP16, block_size=block_size)


def test_paged_attention_of_many_sequences() -> None:
    """Each program finds its sequence: each one is computed exactly once."""
    batch = [(1, length) for length in range(1, 20)]
    check_attention(paged_attention, batch, (3, 1), 64, *FP32)
    batch = [(length, length + 3) for length in range(1, 14)]
    check_attention(paged_attention, batch, (9, 1), 64, *FP32)


@pytest.mark.parametrize("sliding_window", [None, 3])
def test_paged_attention_around_the_edge_of_a_tile(sliding_window: int | None) -> None:
    batch = [(2, seq_len) for seq_len in range(60, 70)]
    check_attention(paged_attention, batch, (2, 1), 64, *FP16, sliding_window=sliding_window)


def test_paged_attention_of_a_padded_batch() -> None:
    """Sequences without queries or without keys, and tokens of no sequence."""
    q, kv_cache, metadata = random_batch([*MIXED, (1, 0), (0, 0)], (4, 2), 64, torch.float16)
    num_tokens = q.shape[0]
    padded = torch.cat((q, q.new_full((7, 4, 64), NAN)))
    out = paged_attention(padded, kv_cache, metadata, 0.125)
    assert error(out[:num_tokens], dense_attention(q, kv_cache, metadata, 0.125)) < FP16[1]


@pytest.mark.usefixtures("dot_of_rows_alone")
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize(("sliding_window", "soft_cap"), [(None, None), (1, None), (100, 0.8)])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.float16, 80)], ids=str)
def test_paged_attention_of_a_token_does_not_depend_on_its_batch(
    dtype: torch.dtype,
    head_dim: int,
    sliding_window: int | None,
    soft_cap: float | None,
    cache_dtype: torch.dtype | None,
) -> None:
    """To the bit: with other sequences and within its prompt as if it were decoded alone."""
    batch = [(1, 300), (1, 64), (5, 18), (40, 150)]
    q, kv_cache, metadata = random_batch(batch, (6, 2), head_dim, dtype, cache_dtype)
    options = (0.125, sliding_window, soft_cap, True)
    out = paged_attention(q, kv_cache, metadata, *options)
    starts = metadata.query_start_loc.tolist()
    for i, (query_len, seq_len) in enumerate(batch):
        block_table = metadata.block_tables[i : i + 1]
        for j in range(query_len):
            decode = make_metadata([(1, seq_len - query_len + 1 + j)], block_table)
            rows = slice(starts[i] + j, starts[i] + j + 1)
            assert torch.equal(paged_attention(q[rows], kv_cache, decode, *options), out[rows])


# -- decode_attention --


@HEADS
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_decode_attention(heads: tuple[int, int], splits: int) -> None:
    check_attention(decode_attention, DECODE, heads, 64, *FP16, splits=splits)
    check_attention(decode_attention, DECODES[:3], heads, 64, *FP16, splits=splits)


@KERNEL_DTYPES
@HEAD_DIMS
@pytest.mark.parametrize("splits", [1, 4])
def test_decode_attention_head_dims(
    head_dim: int, dtype: torch.dtype, bound: float, splits: int
) -> None:
    check_attention(decode_attention, DECODES, (3, 1), head_dim, dtype, bound, splits=splits)


@pytest.mark.parametrize("group", [1, 2, 7, 16, 20])
def test_decode_attention_groups(group: int) -> None:
    check_attention(decode_attention, DECODES, (2 * group, 2), 64, *FP16, splits=2)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("sliding_window", [1, 16, 64, 100, 1000])
def test_decode_attention_sliding_window(sliding_window: int, splits: int) -> None:
    for batch in (DECODE, DECODES):
        check_attention(
            decode_attention,
            batch,
            (3, 1),
            64,
            *FP16,
            sliding_window=sliding_window,
            splits=splits,
        )


@KERNEL_DTYPES
@pytest.mark.parametrize("splits", [1, 4])
def test_decode_attention_soft_cap(dtype: torch.dtype, bound: float, splits: int) -> None:
    for window in (None, 20):
        check_attention(
            decode_attention,
            DECODES,
            (3, 1),
            64,
            dtype,
            bound,
            sliding_window=window,
            soft_cap=0.8,
            splits=splits,
        )


@QUANTISED_AND_DTYPES
@pytest.mark.parametrize("splits", [1, 4])
def test_decode_attention_of_a_quantised_cache(
    cache_dtype: torch.dtype, dtype: torch.dtype, bound: float, splits: int
) -> None:
    for head_dim, window, soft_cap in ((64, None, None), (80, 100, 0.8)):
        check_attention(
            decode_attention,
            DECODES,
            (4, 2),
            head_dim,
            dtype,
            bound,
            cache_dtype,
            sliding_window=window,
            soft_cap=soft_cap,
            splits=splits,
        )


@pytest.mark.parametrize("splits", [1, 2])
def test_decode_attention_around_the_edges_of_tiles_and_splits(splits: int) -> None:
    """Tiles have 128 keys at this head_dim: a split has none, a part of one, one or several."""
    lengths = [1, 127, 128, 129, 255, 256, 257, 383, 384, 385]
    batch = [(1, length) for length in lengths]
    check_attention(decode_attention, batch, (2, 1), 64, *FP16, splits=splits)


@pytest.mark.parametrize("splits", [1, 16])
def test_decode_attention_without_keys(splits: int) -> None:
    """The padding of a CUDA graph's batch reads nothing, not even its block table."""
    q, kv_cache, metadata = random_batch([(1, 40), (1, 0)], (4, 2), 64, torch.float16)
    q[1] = NAN
    metadata.block_tables[1] = 2**30
    out = decode_attention(q, kv_cache, metadata, 0.125, splits=splits)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert error(out, dense_attention(q, kv_cache, metadata, 0.125)) < FP16[1]


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "expected"),
    [
        (1, 8, 64),
        (1, 1, 64),
        (4, 8, 32),
        (16, 8, 8),
        (40, 3, 8),
        (64, 8, 2),
        (128, 8, 1),
        (512, 8, 1),
    ],
)
def test_num_splits(num_seqs: int, num_kv_heads: int, expected: int) -> None:
    assert num_splits(num_seqs, num_kv_heads, num_multiprocessors=132) == expected


# -- both kernels and the twin --


@pytest.mark.parametrize("function", [paged_attention, decode_attention])
def test_attention_refuses_bfloat16_in_the_interpreter(function: Callable[..., Tensor]) -> None:
    batch = random_batch(DECODE, (4, 2), 64, torch.bfloat16)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        function(*batch, 0.125)


@BATCHES
@HEADS
@TWIN_DTYPES
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("sliding_window", [None, 1, 100])
def test_attention_twin(
    batch: Batch,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    bound: float,
    sliding_window: int | None,
) -> None:
    check_attention(
        reference.attention,
        batch,
        heads,
        head_dim,
        dtype,
        bound,
        sliding_window=sliding_window,
        unused=0.0,
    )


@BATCHES
@TWIN_DTYPES
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 0.8])
@pytest.mark.parametrize("sliding_window", [None, 100])
def test_attention_twin_soft_cap_and_quantised_cache(
    batch: Batch,
    dtype: torch.dtype,
    bound: float,
    cache_dtype: torch.dtype | None,
    soft_cap: float | None,
    sliding_window: int | None,
) -> None:
    check_attention(
        reference.attention,
        batch,
        (6, 2),
        64,
        dtype,
        bound,
        cache_dtype,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        unused=0.0,
    )


# -- rope_and_cache --


@HEADS
@HEAD_DIMS
@ALL_DTYPES
@ROPES
def test_rope_and_cache(
    function: Callable[..., Tensor],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    bound: float,
) -> None:
    num_heads, num_kv_heads = heads
    qkv, angles, slots = random_qkv(heads, head_dim, dtype)
    data = torch.full((2, 3, 16, num_kv_heads, head_dim), NAN, dtype=dtype)
    written = slots >= 0
    expected = rotated(qkv[:, : num_heads + num_kv_heads], angles)
    values = qkv[:, num_heads + num_kv_heads :].clone()

    q = function(qkv, angles.cos(), angles.sin(), KVCache(data), slots)

    keys_cached, values_cached = data.view(2, 48, num_kv_heads, head_dim)
    assert error(q[written], expected[written, :num_heads]) < bound
    assert error(keys_cached[slots[written]], expected[written, num_heads:]) < bound
    assert torch.equal(values_cached[slots[written]], values[written])
    assert data.isnan().sum() == data.numel() - 5 * 2 * num_kv_heads * head_dim


@HEADS
@pytest.mark.parametrize("head_dim", [64, 80])
@ALL_DTYPES
@QUANTISED
@ROPES
def test_rope_and_quantised_cache(
    function: Callable[..., Tensor],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    bound: float,
    cache_dtype: torch.dtype,
) -> None:
    """Each number is rounded to the nearest multiple of its scale; zeros stay zeros."""
    num_heads, num_kv_heads = heads
    qkv, angles, slots = random_qkv(heads, head_dim, dtype)
    qkv[0] = 0
    written = slots >= 0
    rotated_qk = rotated(qkv[:, : num_heads + num_kv_heads], angles)
    expected = torch.cat((rotated_qk, qkv[:, num_heads + num_kv_heads :].double()), dim=1)
    kv_cache = KVCache.empty(3, 16, num_kv_heads, head_dim, cache_dtype)
    kv_cache.scales.fill_(NAN)

    q = function(qkv, angles.cos(), angles.sin(), kv_cache, slots)

    assert error(q[written], expected[written, :num_heads]) < bound
    assert kv_cache.scales.isnan().sum() == kv_cache.scales.numel() - 5 * 2 * num_kv_heads
    # [2, 5, num_kv_heads, head_dim]; includes the twin's rounding to dtype before
    x = expected[written, num_heads:].unflatten(1, (2, num_kv_heads)).transpose(0, 1)
    data, scales = (t.flatten(1, 2)[:, slots[written]].double() for t in kv_cache)
    largest = x.abs().amax(-1, keepdim=True)
    assert torch.allclose(scales[..., None] * QUANTISED_MAX[cache_dtype], largest, rtol=bound)
    step = (
        scales[..., None]
        if cache_dtype == torch.int8
        else torch.maximum(x.abs() / 8, scales[..., None] / 512)
    )
    assert ((data * scales[..., None] - x).abs() <= step / 2 + bound * largest).all()


@HEADS
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@ALL_DTYPES
@ROPES
def test_rope_and_cache_with_qk_norm(
    function: Callable[..., Tensor],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    bound: float,
) -> None:
    num_heads, num_kv_heads = heads
    qkv, angles, slots = random_qkv(heads, head_dim, dtype)
    q_norm, k_norm = torch.rand(2, head_dim) + 0.5
    kv_cache = KVCache.empty(3, 16, num_kv_heads, head_dim, dtype)
    written = slots >= 0
    values = qkv[:, num_heads + num_kv_heads :].clone()
    qk = qkv[:, : num_heads + num_kv_heads].double()
    weights = torch.cat((q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)))
    normed = qk / (qk.square().mean(-1, keepdim=True) + 0.1).sqrt() * weights
    expected = rotated(normed, angles)

    q = function(qkv, angles.cos(), angles.sin(), kv_cache, slots, (q_norm, k_norm, 0.1))

    keys_cached, values_cached = kv_cache.data.flatten(1, 2)[:, slots[written]]
    assert error(q[written], expected[written, :num_heads]) < bound
    assert error(keys_cached, expected[written, num_heads:]) < bound
    assert torch.equal(values_cached, values[written])


@ROPES
def test_rope_and_cache_with_a_norm_of_all_heads(function: Callable[..., Tensor]) -> None:
    heads = num_heads, num_kv_heads = 8, 2
    qkv, angles, slots = random_qkv(heads, 64, torch.float32)
    norms = torch.rand(num_heads * 64) + 0.5, torch.rand(num_kv_heads * 64) + 0.5
    kv_cache = KVCache.empty(3, 16, num_kv_heads, 64, torch.float32)
    written = slots >= 0
    q, k, _ = qkv.double().split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    expected_q, expected_k = (
        rotated(
            (x / (x.square().mean((1, 2), keepdim=True) + 0.1).sqrt()) * weight.view(-1, 64), angles
        )
        for x, weight in zip((q, k), norms, strict=True)
    )

    out = function(qkv, angles.cos(), angles.sin(), kv_cache, slots, (*norms, 0.1))

    assert error(out[written], expected_q[written]) < 1e-5
    keys_cached = kv_cache.data[0].flatten(0, 1)[slots[written]]
    assert error(keys_cached, expected_k[written]) < 1e-5


def test_offsets_beyond_int32(tmp_path: Path) -> None:
    """Blocks whose first element's offset needs more than 31 bits, in a sparse file."""
    num_blocks, block_elements = 2**31 // (16 * 64) + 4, 16 * 64
    data = torch.from_file(
        str(tmp_path / "kv_cache"),
        shared=True,
        size=2 * num_blocks * block_elements,
        dtype=torch.float16,
    ).view(2, num_blocks, 16, 1, 64)
    kv_cache = KVCache(data)
    metadata = make_metadata([(20, 20)], torch.tensor([[num_blocks - 1, num_blocks - 3]]))
    decode = make_metadata([(1, 20)], metadata.block_tables)
    qkv = torch.randn(20, 3 + 2, 64).half()
    values = qkv[:, 4:].clone()
    angles = torch.rand(20, 32) * 100
    expected_keys = rotated(qkv[:, 3:4], angles)

    q = rope_and_cache(qkv, angles.cos(), angles.sin(), kv_cache, metadata.slot_mapping)
    out = paged_attention(q, kv_cache, metadata, 0.125)
    decoded = decode_attention(q[-1:], kv_cache, decode, 0.125, splits=1)

    keys, cached_values = (c[[num_blocks - 1, num_blocks - 3]].view(32, 1, 64) for c in data)
    expected = dense_attention(q, kv_cache, metadata, 0.125)
    assert error(keys[:20], expected_keys) < FP16[1]
    assert torch.equal(cached_values[:20], values)
    assert error(out, expected) < FP16[1]
    assert error(decoded, expected[-1:]) < FP16[1]


# -- helpers --


def check_attention(
    function: Callable[..., Tensor],
    batch: Batch,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    bound: float,
    cache_dtype: torch.dtype | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    block_size: int = 16,
    unused: float = NAN,
    **options: int,
) -> None:
    scale = head_dim**-0.5
    q, kv_cache, metadata = random_batch(
        batch, heads, head_dim, dtype, cache_dtype, block_size, unused
    )
    expected = dense_attention(q, kv_cache, metadata, scale, sliding_window, soft_cap)
    out = function(q, kv_cache, metadata, scale, sliding_window, soft_cap, **options)
    assert out.dtype == dtype
    assert error(out, expected) < bound


def random_batch(
    batch: Batch,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 16,
    unused: float = NAN,
) -> tuple[Tensor, KVCache, AttentionMetadata]:
    """(q, kv_cache, metadata) with blocks in random places; slots of no sequence hold `unused`."""
    num_heads, num_kv_heads = heads
    max_blocks = max(-(-seq_len // block_size) for _, seq_len in batch)
    num_blocks = len(batch) * max_blocks + 1
    block_tables = torch.randperm(num_blocks)[: len(batch) * max_blocks].view(len(batch), -1)
    num_tokens = sum(query_len for query_len, _ in batch)
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    data = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), unused)
    for (_, seq_len), block_ids in zip(batch, block_tables, strict=True):
        slots = (block_ids[:, None] * block_size + torch.arange(block_size)).flatten()[:seq_len]
        cached = torch.randn(2, seq_len, num_kv_heads, head_dim)
        data.view(2, -1, num_kv_heads, head_dim)[:, slots] = cached
    kv_cache = KVCache(data.to(dtype))
    if cache_dtype is not None:
        scales = data.abs().amax(-1).clamp_min(0.1) / QUANTISED_MAX[cache_dtype]
        kv_cache = KVCache((data / scales[..., None]).to(cache_dtype), scales)
    return qkv[:, :num_heads], kv_cache, make_metadata(batch, block_tables, block_size)


def make_metadata(batch: Batch, block_tables: Tensor, block_size: int = 16) -> AttentionMetadata:
    query_lens, seq_lens = zip(*batch, strict=True)
    slots = [
        int(block_ids[position // block_size]) * block_size + position % block_size
        for (query_len, seq_len), block_ids in zip(batch, block_tables, strict=True)
        for position in range(max(seq_len - query_len, 0), seq_len)
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
    )


def random_qkv(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(qkv, angles [7, head_dim // 2], slots of a cache of three blocks: five, and two of -1)."""
    num_heads, num_kv_heads = heads
    qkv = torch.randn(7, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    return qkv, torch.rand(7, head_dim // 2) * 100, torch.tensor([40, 3, -1, 16, 17, -1, 0])


def dense_attention(
    q: Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """softmax(scale * q k^T + mask) v, in float64, one sequence after the other."""
    group = q.shape[1] // kv_cache.data.shape[3]
    out = torch.zeros(q.shape, dtype=torch.float64)
    starts = metadata.query_start_loc.tolist()
    for i, seq_len in enumerate(metadata.seq_lens.tolist()):
        if seq_len == 0:
            continue
        rows = q[starts[i] : starts[i + 1]].double()
        block_ids = metadata.block_tables[i, : -(-seq_len // metadata.block_size)].long()
        cached = kv_cache.data[:, block_ids].double()
        if kv_cache.scales is not None:
            cached *= kv_cache.scales[:, block_ids, ..., None]
        keys, values = cached.flatten(1, 2)[:, :seq_len].repeat_interleave(group, dim=2)
        position = torch.arange(seq_len - len(rows), seq_len)[:, None]
        distance = position - torch.arange(seq_len)
        seen = (distance >= 0) & (distance < (sliding_window or seq_len))
        scores = torch.einsum("qhd,khd->hqk", rows, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
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
    """Per row: over all tokens at once, a single missing key would not show."""
    difference = (out.double() - expected).norm(dim=-1)
    return float((difference / expected.norm(dim=-1).clamp_min(1e-9)).max())
