"""Sampling: the kernels, interpreted, and their twins, against plain formulas in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.interpreter import interpreted, interpreter, poisoned_memory  # noqa: F401
from tritium.kernels import SamplingTensors, cpu, reference

with interpreted():
    from tritium.kernels.cuda import add_bias, apply_mask, apply_penalties
    from tritium.kernels.cuda import sampling as kernel

    @triton.jit
    def _store_gumbel(out_ptr, token_ids_ptr, keys_ptr, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        i = tl.arange(0, BLOCK)
        noise = kernel._gumbel(tl.load(token_ids_ptr + i), tl.load(keys_ptr + row))
        tl.store(out_ptr + row * BLOCK + i, noise)


cuda = SimpleNamespace(
    add_bias=add_bias.add_bias,
    apply_mask=apply_mask.apply_mask,
    apply_penalties=apply_penalties.apply_penalties,
    sample=kernel.sample,
)
BOTH = pytest.mark.parametrize("module", [cuda, reference], ids=["kernel", "twin"])
needs_c = pytest.mark.skipif(not cpu.is_available(), reason="needs AVX2 and a compiler")
ALL = pytest.mark.parametrize(
    "module",
    [
        pytest.param(cuda, id="kernel"),
        pytest.param(reference, id="twin"),
        pytest.param(cpu, id="C", marks=needs_c),
    ],
)
INF = math.inf
VOCAB_SIZE = 2500  # more than two tiles, and no multiple of 16
# The interpreter warns of log(0), the logarithm of min_p 0.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log"),
]
LENGTHS = [7, 0, 1400, 129, 1]  # number of tokens per row


# -- adjusting logits --


def ragged(vocab_size: int = VOCAB_SIZE) -> tuple[Tensor, list[Tensor], Tensor]:
    """(logits, token ids per row, including the vocabulary's first and last one, starts)."""
    token_ids = []
    for n in LENGTHS:
        inner = (torch.randperm(vocab_size - 2) + 1)[:n]
        inner[:2] = torch.tensor([vocab_size - 1, 0])[:n]
        token_ids.append(inner)
    starts = torch.tensor([0, *map(len, token_ids)]).cumsum(0).int()
    return torch.randn(len(LENGTHS), vocab_size) * 5, token_ids, starts


@BOTH
def test_add_bias(module):
    logits, token_ids, starts = ragged()
    values = torch.randn(int(starts[-1])) * 10
    values[::5] = -INF
    expected = logits.double()
    for row, ids, of_row in zip(expected, token_ids, values.split(LENGTHS), strict=True):
        row[ids] += of_row
    module.add_bias(logits, torch.cat(token_ids).int(), values, starts)
    assert torch.allclose(logits.double(), expected, rtol=1e-6, atol=1e-6)


@BOTH
def test_forbidding_a_token_twice(module):
    logits = torch.zeros(2, 5)
    token_ids, starts = torch.tensor([3, 3, 1, 3]).int(), torch.tensor([0, 4, 4]).int()
    module.add_bias(logits, token_ids, torch.full((4,), -INF), starts)
    assert logits.tolist() == [[0, -INF, 0, -INF, 0], [0] * 5]


@BOTH
def test_apply_penalties(module):
    logits, token_ids, starts = ragged()
    logits[:, 7] = -INF
    counts = torch.randint(0, 4, (int(starts[-1]),)).int()
    penalties = torch.stack(
        [
            torch.tensor([1.3, 2.0, 0.7, 1.0, 1.0]),  # repetition
            torch.tensor([0.0, 1.0, 1.5, -2.0, 0.5]),  # presence
            torch.tensor([0.0, 1.0, 0.3, 0.25, -0.5]),  # frequency
        ]
    )
    expected = logits.double()
    for i, of_row in enumerate(counts.split(LENGTHS)):
        r, p, f = penalties[:, i].tolist()
        for token_id, count in zip(token_ids[i].tolist(), of_row.tolist(), strict=True):
            x = expected[i, token_id].item()
            x = x / r if x > 0 else x * r
            expected[i, token_id] = x - f * count - p * (count > 0)
    module.apply_penalties(logits, torch.cat(token_ids).int(), counts, starts, *penalties)
    assert torch.allclose(logits.double(), expected, rtol=1e-6, atol=1e-6)


@BOTH
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 1009, VOCAB_SIZE])
def test_apply_mask(module, vocab_size):
    logits = torch.randn(3, vocab_size)
    allowed = torch.rand(3, vocab_size) < 0.5
    allowed[1] = True
    words = torch.zeros(3, -(-vocab_size // 32) * 32, dtype=torch.int64)
    words[:, :vocab_size] = allowed
    words = (words.view(3, -1, 32) << torch.arange(32)).sum(-1)
    expected = logits.masked_fill(~allowed, -INF)
    module.apply_mask(logits, (words - (words >> 31 << 32)).int())
    assert torch.equal(logits, expected)


# -- noise --

MASK = 2**32 - 1


def hashed(token_ids: Tensor, key: int) -> Tensor:
    """[m] int64: 31 bits per token, computed in 64-bit integers."""
    x = token_ids.long() * 0x9E3779B9 + (key & MASK) & MASK
    x = (x ^ x >> 16) * 0x7FEB352D & MASK
    x ^= key >> 32 & MASK
    x = (x ^ x >> 15) * 0x846CA68B & MASK
    return (x ^ x >> 16) & 2**31 - 1


def key_with(token_id: int, bits: int) -> int:
    """A key under which a token's hash has these bits: the inverse of hashed()."""
    x = (bits ^ bits >> 16) * pow(0x846CA68B, -1, 2**32) & MASK
    x ^= x >> 15 ^ x >> 30
    key = x << 32 | -token_id * 0x9E3779B9 & MASK
    return key - (key >> 63 << 64)


def noise_of(bits: Tensor) -> Tensor:
    return -(-(-(bits.double() + 0.5) / 2**31).log1p()).log()


def kernel_gumbel(token_ids: Tensor, keys: Tensor) -> Tensor:
    out = torch.full((len(keys), len(token_ids)), math.nan)
    _store_gumbel[(len(keys),)](out, token_ids, keys, BLOCK=len(token_ids))
    return out


GUMBEL = pytest.mark.parametrize(
    "gumbel", [kernel_gumbel, reference.gumbel], ids=["kernel", "twin"]
)


@GUMBEL
def test_gumbel(gumbel):
    token_ids = torch.randint(0, 2**18, (4096,)).int()
    keys = torch.tensor([-(2**63), -1, 0, 2**63 - 1, *random_keys(6)])
    bits = torch.stack([hashed(token_ids, key) for key in keys.tolist()])
    noise, expected = gumbel(token_ids, keys), noise_of(bits)
    # The smallest noise, which never decides the maximum, is as coarse as float32 near 1.
    smallest = bits > 0.999 * 2**31
    assert (noise[smallest] < -1.9).all()
    assert torch.allclose(noise[~smallest].double(), expected[~smallest], atol=1e-3)
    # numpy's float32 logarithm, used by the interpreter, is exact to 4 units in the last place.
    likely = bits < 2**30
    assert torch.allclose(noise[likely].double(), expected[likely], rtol=1e-6, atol=2e-6)


@GUMBEL
@pytest.mark.parametrize("bits", [0, 1, 1000, 2**31 // 100, 2**31 - 1])
def test_gumbel_at_its_ends(gumbel, bits):
    token_ids = torch.tensor([0, 12345]).int()
    for i, token_id in enumerate(token_ids.tolist()):
        key = key_with(token_id, bits)
        assert hashed(token_ids, key)[i] == bits
        noise = gumbel(token_ids, torch.tensor([key]))[0, i].item()
        if bits == 2**31 - 1:
            assert -3.1 < noise < -2.8
        else:
            assert noise == pytest.approx(noise_of(torch.tensor(bits)).item(), abs=3e-6)


def random_keys(n: int) -> list[int]:
    return torch.randint(-(2**63), 2**63 - 1, (n,)).tolist()


# -- drawing --

FILTERS = [
    {},
    dict(temperature=0.0),
    dict(temperature=0.0, top_k=3),
    dict(temperature=1e-5),
    dict(temperature=100.0),
    dict(top_k=1),
    dict(top_k=50),
    dict(top_k=300),  # more than the twin's candidates
    dict(top_k=VOCAB_SIZE - 1),
    dict(top_p=1e-30),
    dict(top_p=0.5, temperature=0.7),
    dict(top_p=0.9),
    dict(top_p=0.999, temperature=2.0),
    dict(min_p=1.0),
    dict(min_p=0.05),
    dict(min_p=1e-9),
    dict(top_k=20, top_p=0.8),
    dict(top_k=600, top_p=0.95),
    dict(top_k=1000, min_p=0.1),
    dict(min_p=0.02, top_p=0.7),
    dict(min_p=1e-9, top_p=0.9),
    dict(top_k=100, top_p=0.9, min_p=0.01, temperature=1.5),
]


def sampling_tensors(rows: list[dict]) -> SamplingTensors:
    def column(name: str, default: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([row.get(name, default) for row in rows], dtype=dtype)

    return SamplingTensors(
        temperature=column("temperature", 1.0),
        top_k=column("top_k", VOCAB_SIZE, torch.int32),
        top_p=column("top_p", 1.0),
        min_p=column("min_p", 0.0),
        keys=torch.tensor(random_keys(len(rows))),
        any_filtered=any(row.keys() - {"temperature"} for row in rows),
    )


def assert_drawn(tokens: Tensor, logits: Tensor, sampling: SamplingTensors) -> None:
    """One row after the other, sorted, in float64.

    Where two tokens' scores are as good as equal, either will do.
    """
    assert tokens.dtype == torch.int64
    columns = [column.tolist() for column in sampling[:5]]
    rows = zip(tokens.tolist(), logits.double(), *columns, strict=True)
    for token, x, temperature, top_k, top_p, min_p, key in rows:
        if temperature == 0:
            assert token == x.argmax()
            continue
        weights = ((x - x.max()) / temperature).exp()
        left = (weights >= min_p) & (x >= x.sort(descending=True).values[top_k - 1])
        weights *= left
        ahead = (weights * (x > x[:, None])).sum(-1)
        left &= (ahead < top_p * weights.sum()) | (x == x.max())
        scores = x + temperature * noise_of(hashed(torch.arange(len(x)), key))
        scores[~left] = -INF
        rounding = 1e-6 * x[token].abs() + 1e-5 * temperature
        assert scores[token] >= scores.max() - rounding


LOGITS = {
    "peaked": lambda *shape: torch.randn(shape) * 5,
    "flat": lambda *shape: torch.randn(shape) * 0.1,
    "ties": lambda *shape: torch.randn(shape).round(decimals=1) * 2,
    "forbidden": lambda *shape: torch.randn(shape).masked_fill_(torch.rand(shape) < 0.9, -INF),
    "far": lambda *shape: torch.randn(shape) * 3 - 1e4,
}
KINDS = pytest.mark.parametrize("kind", LOGITS)


@ALL
@KINDS
def test_sample(module, kind):
    logits, sampling = LOGITS[kind](len(FILTERS), VOCAB_SIZE), sampling_tensors(FILTERS)
    before = logits.clone()
    assert_drawn(module.sample(logits, sampling), logits, sampling)
    assert torch.equal(logits, before)


@ALL
@KINDS
def test_sample_without_filters(module, kind):
    rows = [dict(temperature=t) for t in (0.0, 0.3, 1.0, 1.0, 1.0, 5.0)]
    logits, sampling = LOGITS[kind](len(rows), VOCAB_SIZE), sampling_tensors(rows)
    assert_drawn(module.sample(logits, sampling), logits, sampling)


@ALL
@KINDS
def test_sample_greedily(module, kind):
    logits = LOGITS[kind](20, VOCAB_SIZE)
    assert module.sample(logits, None).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("num_programs", [1, 50, 1000])
def test_the_kernel_and_its_twin_draw_the_same(monkeypatch, num_programs):
    """One program computes a whole row, several tiles, or one tile."""
    monkeypatch.setattr(kernel, "_NUM_PROGRAMS", num_programs)
    torch.manual_seed(num_programs)  # so that no two scores are nearly equal
    logits, sampling = LOGITS["peaked"](len(FILTERS), VOCAB_SIZE), sampling_tensors(FILTERS)
    assert torch.equal(cuda.sample(logits, sampling), reference.sample(logits, sampling))


@needs_c
@pytest.mark.parametrize("kind", ["peaked", "flat", "ties"])
def test_the_c_function_and_its_twin_draw_the_same(kind):
    torch.manual_seed(0)  # so that no two scores are nearly equal
    logits, sampling = LOGITS[kind](len(FILTERS), 50_001), sampling_tensors(FILTERS)
    assert torch.equal(cpu.sample(logits, sampling), reference.sample(logits, sampling))


@ALL
def test_sample_the_same_alone(module):
    logits, sampling = LOGITS["flat"](len(FILTERS), VOCAB_SIZE), sampling_tensors(FILTERS)
    together = module.sample(logits, sampling).tolist()
    for i in range(0, len(FILTERS), 3):
        columns = (column[i : i + 1] for column in sampling[:5])
        assert module.sample(logits[i : i + 1], SamplingTensors(*columns, True)) == together[i]


@ALL
@pytest.mark.parametrize("vocab_size", [1, 2, 1023, 1025])
def test_sample_from_small_vocabularies(module, vocab_size):
    rows = [dict(top_k=vocab_size), dict(top_k=1), dict(top_k=vocab_size, top_p=0.5)]
    logits, sampling = torch.randn(3, vocab_size), sampling_tensors(rows)
    assert_drawn(module.sample(logits, sampling), logits, sampling)


@ALL
@pytest.mark.parametrize("fields", [{}, dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1)])
@pytest.mark.parametrize("nothing", [-INF, math.nan])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_sample_if_no_token_is_allowed(module, fields, nothing):
    """Any token is right, but it must be a valid one."""
    logits = torch.full((2, VOCAB_SIZE), nothing)
    tokens = module.sample(logits, sampling_tensors([fields, dict(temperature=0.0)]))
    assert all(0 <= token < VOCAB_SIZE for token in tokens.tolist())
