"""The C operations for CPUs: close to float64, and a row's result does not depend on the others."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tests.backend.runner.test_models import make_hf_model
from tests.interpreter import BF16, activated, error, poisoned_memory  # noqa: F401
from tests.kernels import test_sampling as test_kernels_sampling
from tests.kernels.test_attention import (
    BATCHES,
    HEADS,
    MIXED,
    check_attention,
    dense_attention,
    make_metadata,
    random_batch,
    random_qkv,
    rotated,
)
from tritium import kernels
from tritium.backend.runner.models import load_model
from tritium.benchmarks.quantized_weights import quantized_weight
from tritium.kernels import KVCache, QuantizedWeight, cpu, reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cpu.is_available(), reason="needs AVX2 and a compiler"),
]

DTYPE, BOUND = BF16
EPS = 1e-5
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 100]


def rows_alone(function, *tensors) -> torch.Tensor:
    rows = zip(*(tensor.split(1) for tensor in tensors), strict=True)
    return torch.cat([function(*row) for row in rows])


# -- linear --


@pytest.mark.parametrize("num_rows", LENGTHS)
@pytest.mark.parametrize("shape", [(16, 32), (48, 64), (960, 576), (576, 1536)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_linear(num_rows, shape, dtype):
    out_features, in_features = shape
    x = torch.randn(num_rows, in_features).to(DTYPE)
    weight, bias = torch.randn(shape).to(DTYPE), torch.randn(out_features).to(DTYPE)
    packed = kernels.pack_linear(weight)
    for b in (None, bias):
        out = kernels.linear(x, packed, b, dtype)
        assert out.dtype == dtype
        expected = x.double() @ weight.double().T + (0 if b is None else b.double())
        assert error(out, expected) < (BOUND if dtype == DTYPE else 1e-5)
        assert torch.equal(
            out, rows_alone(lambda row, b=b: kernels.linear(row, packed, b, dtype), x)
        )


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 33, 100])
@pytest.mark.parametrize("shape", [(16, 32), (48, 64), (960, 576), (576, 1536)], ids=str)
def test_linear_with_rounded_weights(bits, num_rows, shape):
    """The weights are rounded; of 4 bits, the dequantised weights are rounded to bfloat16, too."""
    out_features, in_features = shape
    x, bias = torch.randn(num_rows, in_features).to(DTYPE), torch.randn(out_features).to(DTYPE)
    weight = (torch.randn(shape) + 0.5).to(DTYPE)
    packed = kernels.pack_linear(weight, bits)
    exact = reference.quantize(weight, bits).dequantize()
    if bits == 4:
        exact = exact.to(DTYPE)
    expected = x.double() @ exact.double().T + bias
    out = kernels.linear(x, packed, bias, torch.float32)
    assert error(out, expected) < 1e-5
    assert error(kernels.linear(x, packed, bias), expected) < BOUND
    alone = rows_alone(lambda row: kernels.linear(row, packed, bias, torch.float32), x)
    assert torch.equal(out, alone)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 17, 33])
@pytest.mark.parametrize(
    ("shape", "group_size"),
    [((16, 32), 32), ((50, 192), 64), ((48, 224), 128), ((576, 1536), 1536)],
    ids=str,
)
def test_linear_with_quantised_weights(shape, group_size, num_rows, bits):
    """As a checkpoint stores them, rounded to bfloat16; 4 bits: zero * scale to float16 before."""
    x, bias = torch.randn(num_rows, shape[1]).to(DTYPE), torch.randn(shape[0]).to(DTYPE)
    weight = quantized_weight(shape, bits, group_size, DTYPE)
    packed = kernels.pack_linear(weight)
    assert packed.values.nbytes <= -(-shape[0] // 16) * 16 * shape[1] * bits / 8
    exact = weight._replace(dtype=torch.float32).dequantize()
    if bits == 4:
        zeros = weight._replace(values=torch.zeros_like(weight.values))  # -zero * scale
        offsets = zeros._replace(dtype=torch.float32).dequantize()
        exact += offsets.half() - offsets
    expected = x.double() @ exact.to(DTYPE).double().T + bias
    out = kernels.linear(x, packed, bias, torch.float32)
    assert out.shape == expected.shape
    assert error(out, expected) < 1e-5
    alone = rows_alone(lambda row: kernels.linear(row, packed, bias, torch.float32), x)
    assert torch.equal(out, alone)


def test_every_number_of_fp8():
    """Denormal ones and both zeros included; by each path that reads a weight."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[~numbers.float().isnan()]
    values = torch.cat((numbers, numbers[:2])).view(8, 32)
    weight = QuantizedWeight(values, torch.full((8, 1), 2.0**-7), None, 32, DTYPE)
    packed = kernels.pack_linear(weight)
    out = kernels.linear(torch.eye(32, dtype=DTYPE), packed, dtype=torch.float32)
    assert torch.equal(out, weight.values.float().t() / 128)
    one = torch.eye(32, dtype=DTYPE)[3:4]
    assert torch.equal(kernels.linear(one, packed, dtype=torch.float32), out[3:4])


def test_a_quantised_weight_that_is_not_supported_is_dequantised():
    for weight in (
        quantized_weight((32, 40), 4, 40, DTYPE),  # no multiple of 32
        quantized_weight((32, 64), 8, 64, torch.float32),
        quantized_weight((32, 64), 4, 16, DTYPE),
        quantized_weight((32, 64), 4, 32, DTYPE)._replace(scales=torch.full((32, 2), 1e4)),
    ):
        x = torch.randn(3, weight.shape[1]).to(weight.dtype)
        out = kernels.linear(x, kernels.pack_linear(weight), dtype=torch.float32)
        exact = weight.dequantize()
        assert error(out, x.double() @ exact.double().T) < BOUND


def test_what_is_stored_in_few_bits_is_not_rounded_to_more():
    weight = quantized_weight((32, 64), 4, 32, DTYPE)
    assert all(
        map(torch.equal, kernels.pack_linear(weight, 8)[:2], kernels.pack_linear(weight)[:2])
    )
    weight = quantized_weight((32, 64), 8, 32, DTYPE)
    rounded = kernels.pack_linear(weight.dequantize(), 4)
    assert all(map(torch.equal, kernels.pack_linear(weight, 4)[:2], rounded[:2]))


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_to_few_bits(bits):
    weight = torch.randn(64, 96) * torch.logspace(-6, 2, 64)[:, None]
    weight[3] = 0
    weight[4] = 1
    quantized = reference.quantize(weight, bits)
    off = (quantized.dequantize() - weight).abs()
    groups = weight.unflatten(1, (-1, reference.GROUP_SIZE if bits == 4 else 96))
    largest, smallest = groups.amax(2, keepdim=True), groups.amin(2, keepdim=True)
    step = groups.abs().amax(2, keepdim=True) / 127 if bits == 8 else (largest - smallest) / 15
    # Half a step, and the rounding error of the scales in float16.
    allowed = step * 0.51 + (0 if bits == 8 else groups.abs().amax(2, keepdim=True) * 2e-3 + 1e-6)
    assert (off.unflatten(1, groups.shape[1:]) <= allowed).all()
    assert (quantized.dequantize()[3] == 0).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_is_refused_where_it_is_not_supported(bits):
    for weight in (torch.randn(32, 32), torch.randn(32, 40).to(DTYPE)):
        with pytest.raises(ValueError, match=f"{bits} bits need bfloat16"):
            kernels.pack_linear(weight, bits)


def test_an_arena_keeps_tensors_apart(monkeypatch):
    monkeypatch.setattr(cpu.Arena, "_SIZE", 1000)
    arena = cpu.Arena()
    tensors = [torch.full((n,), n, dtype=torch.bfloat16) for n in (1, 30, 31, 33, 400, 2000, 7)]
    kept = [arena.keep(tensor) for tensor in tensors]
    assert all(map(torch.equal, kept, tensors))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in kept)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_linear_on_any_number_of_threads(num_threads):
    """Also on more threads than columns of tiles."""
    before = torch.get_num_threads()
    x, weight = torch.randn(20, 64).to(DTYPE), torch.randn(48, 64).to(DTYPE)
    try:
        torch.set_num_threads(num_threads)
        out = kernels.linear(x, kernels.pack_linear(weight))
    finally:
        torch.set_num_threads(before)
    assert error(out, x.double() @ weight.double().T) < BOUND


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("out_features", [1, 40, 49])
def test_any_number_of_rows_of_a_weight(bits, out_features):
    """Such as a vocabulary of 50,257 tokens."""
    x, bias = torch.randn(3, 64).to(DTYPE), torch.randn(out_features).to(DTYPE)
    weight = torch.randn(out_features, 64).to(DTYPE)
    exact = weight if bits == 16 else reference.quantize(weight, bits).dequantize()
    if bits == 4:
        exact = exact.to(DTYPE)
    packed = kernels.pack_linear(weight, bits)
    out = kernels.linear(x, packed, bias, dtype=torch.float32)
    assert out.shape == (3, packed.out_features) == (3, out_features)
    assert out.is_contiguous()
    assert error(out, x.double() @ exact.double().T + bias) < BOUND


@pytest.mark.parametrize("shape", [(40, 64), (64, 40)], ids=str)
def test_a_weight_that_is_no_multiple_of_tiles(shape):
    x, weight = torch.randn(3, shape[1]).to(DTYPE), torch.randn(shape).to(DTYPE)
    out = kernels.linear(x, kernels.pack_linear(weight), dtype=torch.float32)
    assert error(out, x.double() @ weight.double().T) < BOUND


# -- norms and activation --


@pytest.mark.parametrize("size", [16, 576, 4096])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])
def test_norms(size, magnitude):
    x, residual = (torch.randn(2, 9, size) * magnitude).to(DTYPE)
    weight = torch.randn(size)

    def normalised(h):
        return h / (h.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()

    out = kernels.rms_norm(x, weight, EPS)
    assert error(out, normalised(x.double())) < BOUND
    assert torch.equal(out, rows_alone(lambda row: kernels.rms_norm(row, weight, EPS), x))

    expected = (x.double() + residual.double()).to(DTYPE)
    out, overwritten = kernels.add_rms_norm(x, residual, weight, EPS)
    assert overwritten is residual
    assert error(residual, expected.double()) < BOUND
    assert error(out, normalised(residual.double())) < BOUND


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
def test_activate(activation, is_gated):
    x = (torch.randn(9, 2 * 1536) * 3).to(DTYPE)
    x[0, :6] = torch.tensor([-1e4, -200, -90, 0, 90, 1e4])
    activate = partial(kernels.activate, activation=activation, is_gated=is_gated)
    out = activate(x)
    assert error(out, activated(x.double(), activation, is_gated)) < BOUND
    assert torch.equal(out, rows_alone(activate, x))


# -- rope_and_cache --


@HEADS
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_and_cache(heads, head_dim, has_norm):
    num_heads, num_kv_heads = heads
    qkv, angles, slots = random_qkv(heads, head_dim, DTYPE)
    data = torch.full((2, 3, 16, num_kv_heads, head_dim), float("nan"), dtype=DTYPE)
    written = slots >= 0
    values = qkv[:, num_heads + num_kv_heads :].clone()
    qk, norms = qkv[:, : num_heads + num_kv_heads].double(), None
    if has_norm:
        q_norm, k_norm = torch.rand(2, head_dim) + 0.5
        weights = torch.cat((q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)))
        qk = qk / (qk.square().mean(-1, keepdim=True) + 0.1).sqrt() * weights
        norms = (q_norm, k_norm, 0.1)
    expected = rotated(qk, angles)

    q = kernels.rope_and_cache(qkv, angles.cos(), angles.sin(), KVCache(data), slots, norms)

    keys_cached, values_cached = data.view(2, 48, num_kv_heads, head_dim)
    assert error(q, expected[:, :num_heads]) < BOUND
    assert error(keys_cached[slots[written]], expected[written, num_heads:]) < BOUND
    assert torch.equal(values_cached[slots[written]], values[written])
    assert data.isnan().sum() == data.numel() - 5 * 2 * num_kv_heads * head_dim


@HEADS
def test_rope_and_cache_with_a_norm_of_all_heads(heads):
    num_heads, num_kv_heads = heads
    qkv, angles, slots = random_qkv(heads, 64, DTYPE)
    data = torch.zeros((2, 3, 16, num_kv_heads, 64), dtype=DTYPE)
    twin, copy = data.clone(), qkv.clone()
    norms = (torch.rand(num_heads * 64) + 0.5, torch.rand(num_kv_heads * 64) + 0.5, 0.1)

    q = kernels.rope_and_cache(qkv, angles.cos(), angles.sin(), KVCache(data), slots, norms)

    reference_arguments = (copy.float(), angles.cos(), angles.sin(), KVCache(twin.float()), slots)
    expected = reference.rope_and_cache(*reference_arguments, norms)
    assert (
        error(q.flatten(), expected.double().flatten()) < 2 * BOUND
    )  # the norm is rounded once more
    cached = reference_arguments[3].data.double()
    assert error(data.flatten(), cached.flatten()) < 2 * BOUND


# -- attention --


def attention(q, kv_cache, metadata, scale, sliding_window=None, soft_cap=None):
    assert cpu.supports_attention(q, kv_cache)
    return kernels.attention(q, kv_cache, metadata, scale, sliding_window, soft_cap)


@BATCHES
@HEADS
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("sliding_window", [None, 1, 20, 100])
def test_attention(batch, heads, head_dim, sliding_window):
    """Slots that no token sees hold NaN."""
    check_attention(attention, batch, heads, head_dim, *BF16, sliding_window=sliding_window)


@pytest.mark.parametrize("block_size", [32, 48, 128])
def test_attention_block_sizes(block_size):
    check_attention(attention, MIXED, (4, 2), 64, *BF16, block_size=block_size)


@pytest.mark.parametrize("group", [2, 5, 16])
def test_attention_around_the_edges_of_tiles(group):
    for sliding_window in (None, 3, 16):
        for query_len in (1, 2, 17):
            batch = [(query_len, seq_len) for seq_len in (17, 31, 32, 33, 47, 48, 49, 64, 65)]
            check_attention(attention, batch, (group, 1), 64, *BF16, sliding_window=sliding_window)


def test_attention_of_scores_that_differ_much():
    q, kv_cache, metadata = random_batch(MIXED, (4, 2), 64, DTYPE)
    q *= 50
    out = attention(q, kv_cache, metadata, 1.0)
    assert error(out, dense_attention(q, kv_cache, metadata, 1.0)) < BOUND


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_attention_does_not_depend_on_the_batch(sliding_window):
    """A sequence alone, and a prompt in pieces, give the same bits as the batch."""
    q, kv_cache, metadata = random_batch(MIXED, (9, 3), 64, DTYPE)
    together = attention(q, kv_cache, metadata, 0.125, sliding_window)
    starts = metadata.query_start_loc.tolist()
    for i, (query_len, seq_len) in enumerate(MIXED):
        for piece in (1, 4, 32, query_len):
            for first in range(0, query_len, piece):
                last = min(first + piece, query_len)
                alone = make_metadata(
                    [(last - first, seq_len - query_len + last)], metadata.block_tables[i : i + 1]
                )
                rows = slice(starts[i] + first, starts[i] + last)
                out = attention(q[rows], kv_cache, alone, 0.125, sliding_window)
                assert torch.equal(out, together[rows])


@pytest.mark.parametrize("soft_cap", [0.8, 30.0])
def test_attention_with_a_soft_cap(soft_cap):
    check_attention(attention, MIXED, (4, 2), 64, *BF16, soft_cap=soft_cap, sliding_window=20)


@pytest.mark.parametrize(
    ("heads", "head_dim", "options"),
    [
        ((4, 2), 64, {"dtype": torch.float32}),
        ((4, 2), 64, {"cache_dtype": torch.int8}),
        ((4, 2), 64, {"block_size": 8}),
        ((4, 2), 80, {}),
        ((34, 2), 64, {}),
    ],
)
def test_the_twin_computes_what_c_does_not_support(heads, head_dim, options):
    options = {"dtype": DTYPE, **options}
    q, kv_cache, metadata = random_batch(MIXED, heads, head_dim, **options, unused=0.0)
    assert not cpu.supports_attention(q, kv_cache)
    out = kernels.attention(q, kv_cache, metadata, 0.125)
    assert error(out, dense_attention(q, kv_cache, metadata, 0.125)) < BOUND


# -- all layers at once --

TINY = dict(
    vocab_size=96,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
)


@torch.inference_mode()
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
        MistralConfig(**TINY, sliding_window=7),
        Qwen2Config(**TINY),
        Qwen3Config(**TINY),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_all_layers_in_one_call_are_bit_identical(config, bits, tmp_path):
    make_hf_model(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), DTYPE, torch.device("cpu"), weight_bits=bits)
    decoder = model._decoder
    for batch in (MIXED, [(1, 40)]):
        tables = torch.randperm(len(batch) * 32).view(len(batch), 32)
        metadata = make_metadata(batch, tables)
        input_ids = torch.randint(96, metadata.slot_mapping.shape)
        positions = torch.cat([torch.arange(end - length, end) for length, end in batch])
        seen = torch.randn(3, 2, tables.numel(), 16, 2, 32).to(DTYPE)
        outputs = []
        for model._decoder in (decoder, None):
            caches = [KVCache(data.clone()) for data in seen]
            hidden = model.forward(input_ids, positions, caches, metadata)
            outputs.append([hidden, model.compute_logits(hidden), *(data for data, _ in caches)])
        for at_once, one_by_one in zip(*outputs, strict=True):
            assert torch.equal(at_once, one_by_one)


def test_caches_that_the_decoder_does_not_support(tmp_path):
    make_hf_model(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    decoder = load_model(str(tmp_path), DTYPE, torch.device("cpu"))._decoder
    assert decoder.supports_cache(KVCache.empty(1, 16, 2, 32, DTYPE))
    assert not decoder.supports_cache(KVCache.empty(1, 16, 2, 32, torch.int8))
    assert not decoder.supports_cache(KVCache.empty(1, 8, 2, 32, DTYPE))
    assert load_model(str(tmp_path), torch.float32, torch.device("cpu"))._decoder is None


# -- threads --


def test_each_thread_has_a_core_of_its_own():
    num_cores = len(os.sched_getaffinity(0))
    before = torch.get_num_threads()

    def cores_of(num_threads: int) -> set[int]:
        torch.set_num_threads(num_threads)
        kernels.bind_threads()
        return os.sched_getaffinity(0)

    try:
        for num_threads in (num_cores, num_cores + 1):
            with ThreadPoolExecutor(1) as pool:
                cores = pool.submit(cores_of, num_threads).result()
            assert len(cores) == (1 if num_threads == num_cores else num_cores)
    finally:
        torch.set_num_threads(before)
    assert len(os.sched_getaffinity(0)) == num_cores


# -- the library --


def test_without_amx():
    """The code for processors without AMX, tested on any processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        cpu.library.cache_clear()
        try:
            test_kernels_sampling.test_the_c_function_and_its_twin_draw_the_same("peaked")
            for num_rows in (1, 5, 49):
                test_linear(num_rows, (48, 64), DTYPE)
                for bits in (8, 4):
                    test_linear_with_rounded_weights(bits, num_rows, (48, 64))
                    test_linear_with_quantised_weights((50, 192), 64, num_rows, bits)
            test_every_number_of_fp8()
            for activation in ("silu", "gelu_tanh", "relu2"):
                test_activate(activation, is_gated=activation != "relu2")
            test_attention_with_a_soft_cap(30.0)
            test_attention_around_the_edges_of_tiles(5)
            test_attention_does_not_depend_on_the_batch(20)
        finally:
            cpu.library.cache_clear()


@pytest.fixture
def unbuilt():
    cpu.library.cache_clear()
    yield
    cpu.library.cache_clear()


def test_without_a_compiler(unbuilt, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert not cpu.is_available()
    assert "no C compiler was found" in caplog.text
    x = torch.randn(3, 64).to(DTYPE)
    assert torch.equal(kernels.activate(x, "silu"), reference.activate(x, "silu", True))


def test_with_a_compiler_that_fails(unbuilt, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert not cpu.is_available()
    assert "more slowly" in caplog.text


def test_built_once(unbuilt, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu.is_available()
    [built] = (tmp_path / "tritium").iterdir()
    monkeypatch.setenv(
        "CC", built.with_suffix(".none").as_posix()
    )  # never started; changes the key
    cpu.library.cache_clear()
    assert not cpu.is_available()
