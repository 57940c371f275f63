"""The batch-invariant matrix product, interpreted: against float64, and rows alone or together."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.interpreter import (  # noqa: F401
    FP16,
    FP32,
    dot_of_rows_alone,
    error,
    exact_numbers,
    interpreted,
    interpreter,
    poisoned_memory,
)
from tritium import kernels
from tritium.benchmarks.quantized_weights import quantized_weight
from tritium.kernels import AttentionMetadata, KVCache

with interpreted():
    from tritium.kernels.cuda import matmul

pytestmark = pytest.mark.slow

DTYPES = pytest.mark.parametrize(("dtype", "bound"), [FP32, FP16], ids=["fp32", "fp16"])
# (out_features, in_features): a part of a tile, one tile, several, several and a part.
SHAPES = pytest.mark.parametrize("shape", [(1, 1), (64, 64), (192, 576), (130, 200)], ids=str)
NUM_ROWS = [1, 2, 31, 64, 65, 130]


def rows_of(num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """[num_rows, size], with NaN after it in memory."""
    x = torch.full((num_rows + 64, size), float("nan"), dtype=dtype)
    x[:num_rows] = torch.randn(num_rows, size)
    return x[:num_rows]


@DTYPES
@SHAPES
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_matmul(num_rows, shape, dtype, bound):
    out_features, in_features = shape
    x, weight = rows_of(num_rows, in_features, dtype), rows_of(out_features, in_features, dtype)
    bias = torch.randn(out_features).to(dtype)
    expected = x.double() @ weight.double().T
    # The error of the whole result: a single row may be a small difference of large numbers.
    out = matmul.matmul(x, weight)
    assert out.dtype == dtype
    assert error(out.flatten(), expected.flatten()) < bound
    out = matmul.matmul(x, weight, bias, torch.float32)
    assert out.dtype == torch.float32
    assert error(out.flatten(), (expected + bias.double()).flatten()) < FP32[1]


def test_tiles_in_groups():
    """More tiles of rows than in one group, and a smaller last group."""
    x, weight = rows_of(32 * 19 + 5, 40, torch.float32), rows_of(100, 40, torch.float32)
    assert error(matmul.matmul(x, weight), x.double() @ weight.double().T) < FP32[1]


@DTYPES
@pytest.mark.usefixtures("dot_of_rows_alone")
def test_a_row_does_not_depend_on_the_other_rows(dtype, bound):
    x, weight = rows_of(max(NUM_ROWS), 200, dtype), rows_of(70, 200, dtype)
    bias = torch.randn(70).to(dtype)
    alone = torch.cat([matmul.matmul(row, weight, bias, torch.float32) for row in x.split(1)])
    for num_rows in NUM_ROWS:
        for rows in (slice(num_rows), slice(len(x) - num_rows, None)):
            out = matmul.matmul(x[rows], weight, bias, torch.float32)
            assert torch.equal(out, alone[rows])


@DTYPES
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("shape", "group_size"),
    [((1, 2), 2), ((70, 96), 32), ((66, 192), 64), ((34, 200), 128), ((130, 200), 200)],
    ids=str,
)
def test_quantised_weights(shape, group_size, bits, dtype, bound):
    """Groups smaller than a block, as large, larger, and a last one that is cut off."""
    weight = quantized_weight(shape, bits, group_size, dtype)
    bias = torch.randn(shape[0]).to(dtype)
    numbers = exact_numbers(weight)
    assert error(weight._replace(dtype=torch.float32).dequantize(), numbers) < FP32[1]
    for num_rows in (1, 3, 65):
        x = rows_of(num_rows, shape[1], dtype)
        expected = x.double() @ numbers.T + bias.double()
        out = matmul.matmul(x, weight, bias)
        assert out.dtype == dtype
        assert error(out.flatten(), expected.flatten()) < bound


@pytest.mark.usefixtures("dot_of_rows_alone")
def test_a_row_does_not_depend_on_the_other_rows_with_quantised_weights():
    x, weight = rows_of(70, 192, torch.float16), quantized_weight((70, 192), 4, 32, torch.float16)
    together = matmul.matmul(x, weight)
    for rows in (slice(1), slice(3, 40), slice(69, None)):
        assert torch.equal(matmul.matmul(x[rows], weight), together[rows])


def test_bfloat16_is_refused_in_the_interpreter():
    with pytest.raises(NotImplementedError, match="bfloat16"):
        matmul.matmul(torch.ones(1, 16).bfloat16(), torch.ones(16, 16).bfloat16())


# -- which kernel is launched on a GPU --


@pytest.mark.parametrize(
    ("batch_invariant", "expected"),
    [
        (False, ["reference.linear", "cuda.decode_attention.decode_attention"]),
        (True, ["cuda.matmul.matmul", "cuda.paged_attention.paged_attention"]),
    ],
)
def test_kernels_of_a_decode_step(monkeypatch, batch_invariant, expected):
    """With fake tensors on CUDA."""
    launched = []

    def record(name: str) -> None:
        def launch(x: Tensor, *args: object) -> Tensor:
            launched.append(name)
            return x

        monkeypatch.setattr(f"tritium.kernels.{name}", launch)

    for name in (
        "reference.linear",
        "cuda.matmul.matmul",
        "cuda.decode_attention.decode_attention",
        "cuda.paged_attention.paged_attention",
    ):
        record(name)
    with FakeTensorMode():
        x, weight = torch.empty(3, 64, device="cuda"), torch.empty(4, 64, device="cuda")
        q = torch.empty(3, 4, 64, device="cuda")
        kv_cache = KVCache(torch.empty(2, 8, 16, 2, 64, device="cuda"))
        metadata = AttentionMetadata(
            query_start_loc=torch.empty(4, device="cuda"),
            seq_lens=torch.empty(3, device="cuda"),
            block_tables=torch.empty(3, 2, device="cuda"),
            slot_mapping=torch.empty(3, device="cuda"),
            block_size=16,
            num_decodes=3,
            max_query_len=1,
        )
        kernels.linear(x, weight, batch_invariant=batch_invariant)
        kernels.attention(q, kv_cache, metadata, 0.125, batch_invariant=batch_invariant)
    assert launched == expected
