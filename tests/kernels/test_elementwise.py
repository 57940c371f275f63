"""rms_norm, add_rms_norm and activate: interpreted kernels and twins against float64."""

import pytest
import torch

from tests.interpreter import (  # noqa: F401
    BF16,
    FP16,
    FP32,
    activated,
    error,
    interpreted,
    interpreter,
    poisoned_memory,
)
from tritium.kernels import reference

with interpreted():
    from tritium.kernels.cuda import activation, norm

pytestmark = pytest.mark.slow

DTYPES = pytest.mark.parametrize(
    ("dtype", "bound"), [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"]
)
SIZES = pytest.mark.parametrize("size", [1, 33, 576, 1000, 4096, 16384])
EPS = 1e-5


def add_rms_norm(x, residual, weight, eps):
    return norm.rms_norm(x, weight, eps, residual), residual


def normalised(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return h / (h.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@DTYPES
@SIZES
@pytest.mark.parametrize("function", [norm.rms_norm, reference.rms_norm])
def test_rms_norm(function, size, dtype, bound):
    x, weight = torch.randn(7, size).to(dtype), torch.randn(size)
    out = function(x, weight, EPS)
    assert out.dtype == dtype
    assert error(out, normalised(x.double(), weight)) < bound


@DTYPES
@SIZES
@pytest.mark.parametrize("function", [add_rms_norm, reference.add_rms_norm])
def test_add_rms_norm(function, size, dtype, bound):
    x, residual = torch.randn(2, 7, size).to(dtype)
    weight = torch.randn(size)
    expected = x.double() + residual.double()
    out, overwritten = function(x, residual, weight, EPS)
    assert out.dtype == overwritten.dtype == dtype
    assert overwritten is residual
    assert error(residual, expected) < bound
    # The rounded sum is normalised.
    assert error(out, normalised(residual.double(), weight)) < bound


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_rms_norm_of_rows_of_any_magnitude(scale):
    """The sum of the squares is out of float16's range."""
    x, weight = (torch.randn(3, 576) * scale).half(), torch.ones(576)
    out = norm.rms_norm(x, weight, EPS)
    expected = normalised(x.double(), weight)
    assert torch.allclose(out.double(), expected, rtol=1e-3, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("size", [1, 33, 1024, 1536, 3000])
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("function", [activation.activate, reference.activate])
def test_activate(function, kind, is_gated, size, dtype, bound):
    x = (torch.randn(7, 2 * size) * 3).to(dtype)
    out = function(x, kind, is_gated)
    assert out.dtype == dtype
    expected = activated(x.double(), kind, is_gated)
    assert error(out.flatten(), expected.flatten()) < bound  # a row alone may be 0


@pytest.mark.filterwarnings("ignore:overflow")
def test_silu_of_large_gates():
    gate = torch.tensor([-1e4, -200.0, -90.0, 0.0, 90.0, 1e4])
    out = activation.activate(torch.cat((gate, torch.ones(6)))[None], "silu")
    assert out[0].tolist() == pytest.approx([0, 0, 0, 0, 90, 1e4], abs=1e-30)
