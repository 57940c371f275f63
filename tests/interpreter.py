"""For tests of kernels: Triton-lang's interpreter, and memory full of NaN."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter as tl_interpreter
from triton.runtime.interpreter import InterpretedFunction

from tritium.kernels.quantized_weight import QuantizedWeight

# (dtype, bound on error())
FP32, FP16, BF16 = (torch.float32, 5e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)


@contextmanager
def interpreted() -> Iterator[None]:
    """A context to import kernels in. Other tests' processes must not inherit the variable."""
    os.environ["TRITON_INTERPRET"] = "1"
    yield
    del os.environ["TRITON_INTERPRET"]
    assert isinstance(tl.max, InterpretedFunction), "triton was imported without TRITON_INTERPRET"


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    """On one thread: on a busy machine, small tensors take up to 20 times as long on more."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with interpreted():  # the first launch imports more of triton
        yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Makes torch fill uninitialised memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def dot_of_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tl.dot add each row's products in one order, as a GPU's matrix units do.

    NumPy's BLAS may not: on some processors a row's result depends on its index in the tile.
    There is no BLAS for long doubles, so NumPy multiplies them in a plain loop.
    """

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.matmul(a.data, b.data, dtype=np.longdouble)
        return tl_interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(tl_interpreter.InterpreterBuilder, "create_dot", create_dot)


def activated(x: Tensor, activation: str, is_gated: bool) -> Tensor:
    """See `kernels.activate`, by its definition."""
    gate, up = x.chunk(2, dim=-1) if is_gated else (x, torch.ones_like(x))
    if activation == "relu2":
        return gate.clamp(min=0).square() * up
    if activation == "gelu_tanh":
        tanh = torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))
        return gate * (1 + tanh) / 2 * up
    return gate / (1 + (-gate).exp()) * up


def exact_numbers(weight: QuantizedWeight) -> Tensor:
    """A quantised weight's numbers one by one, in float64."""
    numbers = torch.empty(weight.shape, dtype=torch.float64)
    for index in torch.cartesian_prod(*map(torch.arange, weight.shape)).tolist():
        *row, i = index
        group = (*row, i // weight.group_size)
        if weight.zeros is None:
            value = float(weight.values[*row, i])
        else:
            byte = int(weight.values[*row, i // 2])
            value = (byte >> 4 if i % 2 else byte & 15) - int(weight.zeros[group])
        numbers[*row, i] = value * float(weight.scales[group])
    return numbers


def error(out: Tensor, expected: Tensor) -> float:
    """||out - expected|| / ||expected|| of the row with the largest error."""
    difference = (out.double() - expected).norm(dim=-1)
    return float((difference / expected.norm(dim=-1)).max())
