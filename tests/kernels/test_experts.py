"""A mixture of experts: the interpreted kernel, the CPU's way and the twin against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.interpreter import (  # noqa: F401
    BF16,
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
from tritium.kernels import reference

with interpreted():
    from tritium.kernels.cuda import experts as on_cuda

pytestmark = pytest.mark.slow

HIDDEN, SIZE = 64, 96
# (tokens, experts, experts of a token)
SHAPES = pytest.mark.parametrize("shape", [(1, 4, 2), (7, 4, 1), (40, 3, 3), (70, 8, 2)], ids=str)


def random_mixture(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, expert_ids, weights, gate_up, down; the last expert has no token, the first has most."""
    num_tokens, num_experts, num_per_token = shape
    ids = torch.rand(num_tokens, max(num_experts - 1, num_per_token)).argsort(dim=1)
    ids = ids[:, :num_per_token].contiguous()
    if num_per_token == 1:
        ids[2:] = 0
    weights = torch.rand(num_tokens, num_per_token)
    gate_up = torch.randn(num_experts, 2 * SIZE, HIDDEN) / 8
    down = torch.randn(num_experts, HIDDEN, SIZE) / 8
    x = torch.randn(num_tokens, HIDDEN)
    return x.to(dtype), ids, weights, gate_up.to(dtype), down.to(dtype)


def dense(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every expert for every token, in float64."""
    gate, up = torch.einsum("th,eih->tei", x.double(), gate_up.double()).chunk(2, dim=-1)
    out = torch.einsum("tei,ehi->teh", F.silu(gate) * up, down.double())
    chosen = torch.zeros(out.shape[:2], dtype=torch.float64)
    chosen.scatter_(1, ids, weights.double())
    return (out * chosen[..., None]).sum(1)


@SHAPES
@pytest.mark.parametrize(("dtype", "bound"), [FP32, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("function", [on_cuda.experts, reference.experts])
def test_experts(function, shape, dtype, bound):
    mixture = random_mixture(shape, dtype)
    out = function(*mixture, "silu")
    assert out.dtype == dtype
    assert error(out.flatten(), dense(*mixture).flatten()) < bound


@SHAPES
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_experts(shape, bits):
    x, ids, weights, *_ = random_mixture(shape, torch.float32)
    gate_up = quantized_weight((shape[1], 2 * SIZE, HIDDEN), bits, 64, torch.float32)
    down = quantized_weight((shape[1], HIDDEN, SIZE), bits, 32, torch.float32)
    gate_up, down = (weight._replace(scales=weight.scales / 8) for weight in (gate_up, down))
    out = on_cuda.experts(x, ids, weights, gate_up, down, "silu")
    expected = dense(x, ids, weights, exact_numbers(gate_up), exact_numbers(down))
    assert error(out.flatten(), expected.flatten()) < FP32[1]


@SHAPES
@pytest.mark.parametrize(
    ("dtype", "bound", "bits"),
    [(*FP32, 16), (*BF16, 16), (torch.bfloat16, 0.2, 4)],
    ids=["fp32", "bf16", "int4"],
)
def test_experts_on_cpu(shape, dtype, bound, bits):
    x, ids, weights, gate_up, down = mixture = random_mixture(shape, dtype)
    if bits < 16 and not kernels.cpu.is_available():
        pytest.skip("needs AVX2 and a compiler")
    packed = [kernels.pack_experts(weight, bits) for weight in (gate_up, down)]
    out = kernels.experts(x, ids, weights, *packed, "silu")
    assert out.dtype == dtype
    assert error(out.flatten(), dense(*mixture).flatten()) < bound


@pytest.mark.usefixtures("dot_of_rows_alone")
def test_a_token_does_not_depend_on_the_others():
    x, ids, weights, *experts = random_mixture((70, 8, 2), torch.float16)
    together = on_cuda.experts(x, ids, weights, *experts, "silu", batch_invariant=True)
    for row in (slice(0, 1), slice(10, 13), slice(69, 70)):
        alone = on_cuda.experts(
            x[row], ids[row], weights[row], *experts, "silu", batch_invariant=True
        )
        assert torch.equal(alone, together[row])
