"""Each kernel against float64 on the same random inputs; the sampling kernel against PyTorch.

Errors are relative, ||out - expected|| / ||expected||, of the row with the largest error. Memory
that a kernel must not read, and memory that it must write, is filled with NaN before. Without a GPU
the functions for CPUs are checked.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tritium import kernels
from tritium.benchmarks.batches import (
    BLOCK_SIZE,
    NAN,
    Heads,
    dense_attention,
    metadata_of,
    random_batch,
)
from tritium.benchmarks.phases import Case, Setup
from tritium.benchmarks.quantized_weights import quantized_weight
from tritium.benchmarks.timing import seconds_per_call
from tritium.kernels import KVCache, PackedLinear, PackedWeight, SamplingTensors, reference

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Error of a quantised cache against its source: half a rounding step, plus the dtype's error.
QUANTISED_BOUNDS = {torch.float8_e4m3fn: 5e-2, torch.int8: 2e-2}

Lengths = Sequence[tuple[int, int]]  # (query_len, seq_len) of each sequence
ALONE: Lengths = [(1, 1328)]
UNEVEN: Lengths = [(1, seq_len) for seq_len in (1, 2, 15, 16, 17, 127, 128, 129, 1000, 3000)]
MIXED: Lengths = [(1, 300), (1, 1), (1, 64), (5, 18), (70, 70), (129, 463)]


def attention_checks(setup: Setup) -> Iterator[Case]:
    fp8, int8 = torch.float8_e4m3fn, torch.int8
    fast = torch.bfloat16
    cases: list[tuple[str, Lengths, Heads, torch.dtype, dict[str, Any]]] = []
    for heads in (Heads(4, 4, 64), Heads(8, 2, 128), Heads(5, 1, 80), Heads(32, 8, 128)):
        for name, lengths in {"decode": ALONE, "uneven": UNEVEN, "mixed": MIXED}.items():
            cases.append((name, lengths, heads, fast, {}))
    for heads in (Heads(4, 4, 96), Heads(8, 4, 256)):
        cases.append(("uneven", UNEVEN, heads, fast, {}))
        cases.append(("mixed", MIXED, heads, fast, {}))
    for cache_dtype in (fp8, int8):
        for name, lengths in {"decode": ALONE, "uneven": UNEVEN, "mixed": MIXED}.items():
            cases.append((name, lengths, Heads(32, 8, 128), fast, {"cache_dtype": cache_dtype}))
        cases.append(("mixed", MIXED, Heads(9, 3, 64), fast, {"cache_dtype": cache_dtype}))
    for options in ({"sliding_window": 100}, {"soft_cap": 5.0}):
        cases.append(("uneven", UNEVEN, Heads(8, 2, 128), fast, options))
        cases.append(("mixed", MIXED, Heads(8, 2, 128), fast, options))
    for dtype in (torch.float16, torch.float32):
        cases.append(("uneven", UNEVEN, Heads(8, 2, 128), dtype, {}))
        cases.append(("mixed", MIXED, Heads(8, 2, 128), dtype, {}))
    # The number of splits decreases, down to one, which writes the result itself.
    for num_seqs in (2, 8, 32, 160):
        lengths = [(1, 900 + i) for i in range(num_seqs)]
        cases.append((f"decode of {num_seqs}", lengths, Heads(32, 8, 128), fast, {}))
    if setup.on_gpu:
        # Element offsets beyond int32.
        far = {"num_blocks": 2**31 // (BLOCK_SIZE * 8 * 128) + 4096}
        cases.append(("far blocks", UNEVEN, Heads(32, 8, 128), fast, far))
        cases.append(("far blocks, mixed", MIXED, Heads(32, 8, 128), fast, far))
    if setup.small:
        cases = [case for case in cases if case[2].num_heads < 10]
    for name, lengths, heads, dtype, options in cases:
        words = [name, "x".join(map(str, heads)), str(dtype).removeprefix("torch.")]
        words += [f"{key} {value}".replace("torch.", "") for key, value in options.items()]
        run = partial(check_attention, setup, lengths, heads, dtype, **options)
        yield Case(", ".join(words), run)


def check_attention(
    setup: Setup,
    lengths: Lengths,
    heads: Heads,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    num_blocks: int = 0,
    **options: Any,
) -> dict[str, Any]:
    # The kernel must not read these values. The PyTorch version reads them, and masks the result.
    unseen = NAN if setup.on_gpu else 0.0
    batch = random_batch(
        lengths, heads, dtype, cache_dtype or dtype, setup.device, unseen, num_blocks
    )
    scale = heads.head_dim**-0.5
    with poisoned_memory():
        out = kernels.attention(*batch, scale, **options)
    return compared(out, dense_attention(batch, scale, **options), BOUNDS[dtype])


def rope_checks(setup: Setup) -> Iterator[Case]:
    for heads in (Heads(9, 3, 64), Heads(5, 1, 80), Heads(32, 8, 128), Heads(8, 4, 256)):
        for cache_dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int8):
            for norm in (False, True):
                kind = str(cache_dtype).removeprefix("torch.")
                name = f"{'x'.join(map(str, heads))}, {kind}{', norm' * norm}"
                yield Case(name, partial(check_rope, setup.device, heads, cache_dtype, norm))


def check_rope(
    device: torch.device, heads: Heads, cache_dtype: torch.dtype, norm: bool
) -> dict[str, Any]:
    num_tokens, (num_heads, num_kv_heads, head_dim) = 37, heads
    slots = torch.randperm(4 * BLOCK_SIZE, device=device)[:num_tokens]
    slots[::5] = -1  # padding
    written = slots >= 0
    qkv = random(device, num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    angles = torch.rand(num_tokens, head_dim // 2, device=device) * 1000
    q_weight, k_weight = 1 + torch.randn(2, head_dim, device=device) / 8
    kv_cache = KVCache.empty(4, BLOCK_SIZE, num_kv_heads, head_dim, cache_dtype, device)
    q, k, v = qkv.double().split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if norm:
        q, k = rms_norm(q, q_weight.double(), 1e-6), rms_norm(k, k_weight.double(), 1e-6)
    q, k = (rotated(x, angles.double()) for x in (q, k))

    qk_norm = (q_weight, k_weight, 1e-6) if norm else None
    out = kernels.rope_and_cache(qkv, angles.cos(), angles.sin(), kv_cache, slots, qk_norm)

    data = kv_cache.data.double()
    if kv_cache.scales is not None:
        data *= kv_cache.scales[..., None]
    cached = data.view(2, -1, num_kv_heads, head_dim)[:, slots[written]]
    bounds = [QUANTISED_BOUNDS.get(cache_dtype, BOUNDS[torch.bfloat16])] * 2
    results = [compared(out[written], q[written], BOUNDS[torch.bfloat16])]
    for got, expected, bound in zip(cached, (k, v), bounds, strict=True):
        results.append(compared(got, expected[written], bound))
    # Slots without a token, and the slot of padding, are still 0.
    untouched = int(data.any(-1).sum()) == 2 * num_kv_heads * int(written.sum())
    worst = max(results, key=lambda result: result["error"] / result["bound"])
    return worst | {"passed": untouched and all(result["passed"] for result in results)}


def batch_invariant_checks(setup: Setup) -> Iterator[Case]:
    for out_features, in_features in ((1000, 1000), (960, 576), (6144, 4096), (4096, 14336)):
        if not setup.small or out_features <= 1000:
            run = partial(check_product, setup, out_features, in_features)
            yield Case(f"{in_features} to {out_features}", run)
    fast, fp8, int8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
    attentions = [(Heads(8, 2, 128), cache_dtype) for cache_dtype in (fast, fp8, int8)]
    attentions += [(Heads(9, 3, 64), fast), (Heads(8, 4, 256), fast)]
    for heads, cache_dtype in attentions:
        kind = str(cache_dtype).removeprefix("torch.")
        run = partial(check_tokens_alone, setup, heads, cache_dtype)
        yield Case(f"attention, {'x'.join(map(str, heads))}, {kind}", run)


def check_product(setup: Setup, out_features: int, in_features: int) -> dict[str, Any]:
    """Close to float64; on a GPU each row is identical to the bit to the same row alone."""
    x, weight = (random(setup.device, n, in_features) for n in (300, out_features))
    product = partial(kernels.linear, weight=weight, dtype=torch.float32, batch_invariant=True)
    with poisoned_memory():
        out = product(x)
    different = sum(not torch.equal(product(x[i : i + 1]), out[i : i + 1]) for i in range(300))
    result = compared(out, x.double() @ weight.double().T, BOUNDS[x.dtype])
    passed = result["passed"] and not (setup.on_gpu and different)
    return result | {"different": different, "passed": passed}


def quantised_checks(setup: Setup) -> Iterator[Case]:
    """Weights as checkpoints store them: right, and fast, against the same weights in bfloat16."""
    shapes = ((1000, 992),) if setup.small else ((1000, 992), (6144, 4096), (4096, 14336))
    for out_features, in_features in shapes:
        for bits, group_size in ((4, 32), (4, 128), (8, 128), (8, in_features)):
            size = (out_features, in_features)
            run = partial(check_quantised_product, setup, size, bits, group_size)
            yield Case(f"{in_features} to {out_features}, {bits} bits by {group_size}", run)


def check_quantised_product(
    setup: Setup, shape: tuple[int, int], bits: int, group_size: int
) -> dict[str, Any]:
    out_features, in_features = shape
    x = random(setup.device, 300, in_features)
    stored = quantized_weight(shape, bits, group_size, x.dtype).to(x)
    weight, plain = kernels.pack_linear(stored), kernels.pack_linear(stored.dequantize())
    with poisoned_memory():
        out = kernels.linear(x, weight, dtype=torch.float32)
    result = compared(out, x.double() @ stored.dequantize().double().T, BOUNDS[x.dtype])
    different = sum(
        not torch.equal(kernels.linear(x[i : i + 1], weight, dtype=torch.float32), out[i : i + 1])
        for i in range(300)
    )
    times = {}
    for rows in (1, 32, 256):
        seconds = []
        for kind in (weight, plain):
            copies = [kind]
            if setup.on_gpu:  # more than its caches hold
                copies += [_copy(kind) for _ in range(2**28 // (out_features * in_features))]
            calls = [partial(kernels.linear, x[:rows], copy) for copy in copies]
            seconds.append(seconds_per_call(calls, setup.device))
        times[f"of_bfloat16_{rows}"] = seconds[1] / seconds[0]
    return result | times | {"different": different, "passed": result["passed"] and not different}


def _copy(weight: PackedLinear) -> PackedLinear:
    assert not isinstance(weight, PackedWeight), "only of weights on a GPU"
    return weight.clone() if isinstance(weight, Tensor) else weight.map(torch.clone)


def check_tokens_alone(setup: Setup, heads: Heads, cache_dtype: torch.dtype) -> dict[str, Any]:
    """On a GPU the attention of each token is identical to the bit to decoding it alone."""
    unseen = NAN if setup.on_gpu else 0.0
    batch = random_batch(MIXED, heads, torch.bfloat16, cache_dtype, setup.device, unseen)
    q, kv_cache, metadata = batch
    out = kernels.attention(*batch, heads.head_dim**-0.5, batch_invariant=True)
    starts, tables = metadata.query_start_loc.tolist(), metadata.block_tables.cpu()
    different = 0
    for i, (query_len, seq_len) in enumerate(MIXED):
        for j in range(query_len):
            rows = slice(starts[i] + j, starts[i] + j + 1)
            decode = metadata_of([(1, seq_len - query_len + 1 + j)], tables[i : i + 1], q.device)
            alone = kernels.attention(
                q[rows], kv_cache, decode, heads.head_dim**-0.5, batch_invariant=True
            )
            different += not torch.equal(alone, out[rows])
    return {"tokens": len(q), "different": different, "passed": not (setup.on_gpu and different)}


def elementwise_checks(setup: Setup) -> Iterator[Case]:
    for size in (576, 1000, 1024, 4096):
        yield Case(f"rms_norm, {size}", partial(check_rms_norm, setup.device, size))
        yield Case(f"add_rms_norm, {size}", partial(check_add_rms_norm, setup.device, size))
    for size in (1000, 1536, 3072, 14336):
        yield Case(f"activate, {size}", partial(check_activate, setup.device, size))


def check_rms_norm(device: torch.device, size: int) -> dict[str, Any]:
    x, weight = random(device, 300, size), torch.randn(size, device=device)
    with poisoned_memory():
        out = kernels.rms_norm(x, weight, 1e-5)
    return compared(out, rms_norm(x.double(), weight.double(), 1e-5), BOUNDS[x.dtype])


def check_add_rms_norm(device: torch.device, size: int) -> dict[str, Any]:
    x, residual = random(device, 300, size), random(device, 300, size)
    weight = torch.randn(size, device=device)
    total = x.double() + residual.double()
    with poisoned_memory():
        out, residual = kernels.add_rms_norm(x, residual, weight, 1e-5)
    results = [
        compared(residual, total, BOUNDS[x.dtype]),
        compared(out, rms_norm(total, weight.double(), 1e-5), BOUNDS[x.dtype]),
    ]
    return max(results, key=lambda result: result["error"])


def check_activate(device: torch.device, size: int) -> dict[str, Any]:
    gate_up = random(device, 300, 2 * size)
    gate, up = gate_up.double().chunk(2, dim=-1)
    with poisoned_memory():
        out = kernels.activate(gate_up, "silu")
    return compared(out, F.silu(gate) * up, BOUNDS[gate_up.dtype])


def sampling_checks(setup: Setup) -> Iterator[Case]:
    for vocab_size in (1000,) if setup.small else (49152, 128256, 151936):
        for num_rows in (1, 64):
            for kind in ("greedy", "temperature", "filters"):
                run = partial(check_sample, setup.device, num_rows, vocab_size, kind)
                yield Case(f"sample, {kind}, {num_rows}x{vocab_size}", run)
        run = partial(check_adjustments, setup.device, vocab_size)
        yield Case(f"bias, penalties, mask, 64x{vocab_size}", run)


def check_sample(device: torch.device, num_rows: int, vocab_size: int, kind: str) -> dict[str, Any]:
    """The same tokens as the PyTorch version with the same noise.

    Logarithms differ in the last place, so among many rows one may get the second-best token.
    """
    logits = torch.randn(num_rows, vocab_size) * 3
    rows, ones = torch.arange(num_rows), torch.ones(num_rows)
    sampling = SamplingTensors(
        temperature=ones * 0.8,
        top_k=torch.full((num_rows,), vocab_size, dtype=torch.int32),
        top_p=ones.clone(),
        min_p=ones * 0,
        keys=torch.randint(2**62, (num_rows,)),
        any_filtered=kind == "filters",
    )
    sampling.temperature[rows % 4 == 3] = 0
    if sampling.any_filtered:
        sampling.top_k[rows % 3 == 0] = 50
        sampling.top_p[rows % 2 == 0] = 0.9
        sampling.min_p[rows % 5 == 1] = 0.05
    there: dict[str, Any] = {
        name: x.to(device) for name, x in sampling._asdict().items() if torch.is_tensor(x)
    }
    greedy = kind == "greedy"
    with poisoned_memory():
        token_ids = kernels.sample(
            logits.to(device), None if greedy else sampling._replace(**there)
        ).cpu()
    expected = reference.sample(logits, None if greedy else sampling)
    different = int((token_ids != expected).sum())
    return {"different": different, "passed": different <= num_rows // 50}


def check_adjustments(device: torch.device, vocab_size: int) -> dict[str, Any]:
    """Bias, penalties and mask, applied in turn."""
    num_rows, num_each = 64, 100
    logits = torch.randn(num_rows, vocab_size)
    token_ids = torch.stack([torch.randperm(vocab_size)[:num_each] for _ in range(num_rows)])
    token_ids = token_ids.flatten().int()
    starts = (torch.arange(num_rows + 1) * num_each).int()
    counts = torch.randint(5, token_ids.shape).int()
    penalties = [torch.rand(num_rows) + 1 for _ in range(3)]
    words = -(-vocab_size // 32)
    mask = torch.randint(-(2**31), 2**31, (num_rows, words)).int()

    def adjusted(module: Any, device: torch.device) -> Tensor:
        def there(*tensors: Tensor) -> list[Tensor]:
            return [tensor.to(device) for tensor in tensors]

        x = logits.to(device, copy=True)
        module.add_bias(x, *there(token_ids, counts.float(), starts))
        module.apply_penalties(x, *there(token_ids, counts, starts, *penalties))
        module.apply_mask(x, *there(mask))
        return x

    got, expected = adjusted(kernels, device).cpu(), adjusted(reference, torch.device("cpu"))
    same_mask = torch.equal(got.isinf(), expected.isinf())
    result = compared(got.nan_to_num(neginf=0), expected.nan_to_num(neginf=0).double(), 1e-5)
    return result | {"passed": result["passed"] and same_mask}


# -- helpers --


def random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).bfloat16()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """(x1 + i x2) * e^(i angle), where x1 and x2 are the halves of a head."""
    x1, x2 = x.chunk(2, dim=-1)
    turned = torch.complex(x1, x2) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def compared(out: Tensor, expected: Tensor, bound: float) -> dict[str, Any]:
    difference = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    error = float(difference.max())  # NaN, if the dtype has it
    return {"error": error, "bound": bound, "passed": error < bound}


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """A context in which torch fills uninitialised memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
