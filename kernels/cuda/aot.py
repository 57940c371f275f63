"""Compiles the kernels for Ampere, Ada and Hopper without a GPU, and lists their resources.

    tritium benchmark aot            # JSON
    tritium benchmark aot --table    # Markdown

Each kernel is compiled through its own launcher; only the launch is left out. So the code that is
described is the code that runs, with the same tile sizes and the same alignments.
"""

import argparse
import json
import multiprocessing
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tritium.kernels.cuda.activation import activate
from tritium.kernels.cuda.add_bias import add_bias
from tritium.kernels.cuda.apply_mask import apply_mask
from tritium.kernels.cuda.apply_penalties import apply_penalties
from tritium.kernels.cuda.decode_attention import decode_attention
from tritium.kernels.cuda.experts import experts
from tritium.kernels.cuda.matmul import matmul
from tritium.kernels.cuda.norm import rms_norm
from tritium.kernels.cuda.paged_attention import paged_attention
from tritium.kernels.cuda.rope_cache import rope_and_cache
from tritium.kernels.cuda.sampling import sample
from tritium.kernels.metadata import AttentionMetadata, KVCache
from tritium.kernels.quantized_weight import QuantizedWeight, StoredWeight
from tritium.kernels.sampling_tensors import SamplingTensors

AMPERE, ADA, HOPPER = 80, 89, 90
BLOCK_SIZE, NUM_BLOCKS = 16, 64

Launch = Callable[[], object]


class Driver:
    """The part of a Triton-lang driver that compilation needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # the key of compiled kernels

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002 -- Triton-lang's interface
        return 0


def compile_all() -> list[dict[str, Any]]:
    """One row per kernel, variant and capability."""
    work = [(c, name) for c in (AMPERE, ADA, HOPPER) for name, _ in variants(c)]
    # Forked, so that torch is not imported again.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        return [row for rows in pool.map(compile_variant, *zip(*work, strict=True)) for row in rows]


def compile_variant(capability: int, name: str) -> list[dict[str, Any]]:
    """One row per kernel that the variant launches."""
    triton.runtime.driver.set_active(Driver(capability))
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **kwargs: Any) -> None:
        compiled.append(run(kernel, *args, **kwargs | {"warmup": True}))

    with patch.object(JITFunction, "run", compile_only):
        dict(variants(capability))[name]()
    common = {"variant": name, "capability": capability}
    return [common | {"kernel": kernel.name.strip("_")} | describe(kernel) for kernel in compiled]


# -- variants --

# (query heads, KV heads, head_dim) of SmolLM2, of a model whose head_dim is no power of two, of
# Phi-3, Llama 3.1 and Gemma 2.
HEADS = {
    "64": (9, 3, 64),
    "80": (8, 8, 80),
    "96": (32, 32, 96),
    "128": (32, 8, 128),
    "256": (8, 4, 256),
}
LLAMA = HEADS["128"]
VOCAB_SIZE = 128256


def variants(capability: int) -> Iterator[tuple[str, Launch]]:
    """(name, launch) of everything that is compiled."""
    if capability != ADA:
        yield from attention_variants()
        yield from quantised_variants("int8", torch.int8)
        yield from other_variants()
    if capability >= ADA:  # the oldest with fp8
        yield from quantised_variants("fp8", torch.float8_e4m3fn)


def attention_variants() -> Iterator[tuple[str, Launch]]:
    for name, heads in HEADS.items():
        yield f"prefill-{name}", partial(prefill, heads, 512)
        yield f"decode-{name}", partial(decode, heads, splits=1)
        yield f"rope-{name}", partial(rope, heads)
    yield "prefill-128-short", partial(prefill, LLAMA, 16)
    yield "decode-128-split", partial(decode, LLAMA, splits=16)
    yield "rope-128-norm", partial(rope, LLAMA, norm=True)
    options: dict[str, dict[str, Any]] = {
        "window-cap": {"sliding_window": 4096, "soft_cap": 50.0},
        "float32": {"dtype": torch.float32},
    }
    for name, option in options.items():
        yield f"prefill-128-{name}", partial(prefill, LLAMA, 512, **option)
        yield f"decode-128-{name}", partial(decode, LLAMA, splits=1, **option)


def quantised_variants(name: str, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    yield f"prefill-128-{name}", partial(prefill, LLAMA, 512, cache_dtype=dtype)
    yield f"prefill-128-{name}-short", partial(prefill, LLAMA, 16, cache_dtype=dtype)
    yield f"decode-128-{name}", partial(decode, LLAMA, splits=1, cache_dtype=dtype)
    yield f"decode-128-{name}-split", partial(decode, LLAMA, splits=16, cache_dtype=dtype)
    yield f"rope-128-{name}", partial(rope, LLAMA, cache_dtype=dtype)
    bits = 4 if name == "int8" else 8
    weights = "int4" if bits == 4 else name
    yield f"matmul-4096-{weights}", partial(product, 4096, bits=bits)
    yield f"experts-2048-{weights}-short", partial(mixture, num_tokens=2, bits=bits)
    yield f"experts-2048-{weights}", partial(mixture, num_tokens=2048, bits=bits)


def other_variants() -> Iterator[tuple[str, Launch]]:
    for size in (576, 4096):
        yield f"rms_norm-{size}", partial(norm, size, add=False)
        yield f"add_rms_norm-{size}", partial(norm, size, add=True)
    for size in (1536, 14336):
        yield f"activate-{size}", partial(activate, empty(2, 2 * size), "silu")
    for size in (576, 4096):
        yield f"matmul-{size}", partial(product, size)
    yield "matmul-4096-bias", partial(product, 4096, bias=True)
    yield "matmul-4096-logits", partial(product, 4096, out_dtype=torch.float32)
    yield "matmul-4096-float32", partial(product, 4096, dtype=torch.float32)
    yield "experts-2048-short", partial(mixture, num_tokens=2)
    yield "experts-2048", partial(mixture, num_tokens=2048)
    yield "sample", partial(draw, filtered=False)
    yield "sample-filters", partial(draw, filtered=True)
    yield "add_bias", bias
    yield "apply_penalties", penalties
    yield "apply_mask", mask


def prefill(
    heads: tuple[int, int, int],
    query_len: int,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    **options: Any,
) -> None:
    q, kv_cache, scale = attention_tensors(heads, query_len, dtype, cache_dtype)
    paged_attention(q, kv_cache, metadata(query_len), scale, **options)


def decode(
    heads: tuple[int, int, int],
    splits: int,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    **options: Any,
) -> None:
    q, kv_cache, scale = attention_tensors(heads, 1, dtype, cache_dtype)
    decode_attention(q, kv_cache, metadata(1), scale, splits=splits, **options)


def attention_tensors(
    heads: tuple[int, int, int],
    num_tokens: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
) -> tuple[Tensor, KVCache, float]:
    """Queries, as a view of qkv as in the model; the cache; the scale."""
    num_heads, num_kv_heads, head_dim = heads
    qkv = empty(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    kv_cache = KVCache.empty(NUM_BLOCKS, BLOCK_SIZE, *heads[1:], cache_dtype or dtype)
    return qkv[:, :num_heads], kv_cache, head_dim**-0.5


def metadata(query_len: int) -> AttentionMetadata:
    """The metadata of a batch of one sequence."""
    return AttentionMetadata(
        query_start_loc=empty(2, dtype=torch.int32),
        seq_lens=empty(1, dtype=torch.int32),
        block_tables=empty(1, NUM_BLOCKS, dtype=torch.int32),
        slot_mapping=empty(query_len, dtype=torch.int64),
        block_size=BLOCK_SIZE,
        num_decodes=int(query_len == 1),
        max_query_len=query_len,
    )


def rope(
    heads: tuple[int, int, int], cache_dtype: torch.dtype = torch.bfloat16, norm: bool = False
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    qkv = empty(2, num_heads + 2 * num_kv_heads, head_dim)
    angles = empty(2, head_dim // 2, dtype=torch.float32)
    kv_cache = KVCache.empty(NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim, cache_dtype)
    weight = empty(head_dim, dtype=torch.float32)
    qk_norm = (weight, weight, 1e-6) if norm else None
    rope_and_cache(qkv, angles, angles, kv_cache, empty(2, dtype=torch.int64), qk_norm)


def norm(size: int, add: bool) -> None:
    weight = empty(size, dtype=torch.float32)
    rms_norm(empty(2, size), weight, 1e-5, empty(2, size) if add else None)


def mixture(num_tokens: int, bits: int = 16) -> None:
    num_experts, hidden, size = 16, 2048, 768
    experts(
        empty(num_tokens, hidden),
        empty(num_tokens, 8, dtype=torch.int64).zero_(),  # read by PyTorch, too
        empty(num_tokens, 8, dtype=torch.float32),
        weights((num_experts, 2 * size, hidden), bits),
        weights((num_experts, hidden, size), bits),
        "silu",
    )


def product(
    size: int,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    out_dtype: torch.dtype | None = None,
    bits: int = 16,
) -> None:
    x, weight = empty(2, size, dtype=dtype), weights((2 * size, size), bits, dtype)
    matmul(x, weight, empty(2 * size, dtype=dtype) if bias else None, out_dtype)


def weights(
    shape: tuple[int, ...], bits: int = 16, dtype: torch.dtype = torch.bfloat16
) -> StoredWeight:
    """8 bits: FP8 in blocks; 4 bits: groups as AWQ and GPTQ make them."""
    if bits == 16:
        return empty(*shape, dtype=dtype)
    groups = (*shape[:-1], shape[-1] // 128)
    if bits == 8:
        values, scales = empty(*shape, dtype=torch.float8_e4m3fn), empty(*groups, dtype=torch.float)
        return QuantizedWeight(values, scales, None, 128, dtype)
    values = empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8)
    scales, zeros = empty(*groups, dtype=torch.float16), empty(*groups, dtype=torch.uint8)
    return QuantizedWeight(values, scales, zeros, 128, dtype)


def draw(filtered: bool) -> None:
    column = empty(2, dtype=torch.float32)
    sample(
        logits(),
        SamplingTensors(
            temperature=column,
            top_k=empty(2, dtype=torch.int32),
            top_p=column,
            min_p=column,
            keys=empty(2, dtype=torch.int64),
            any_filtered=filtered,
        ),
    )


def bias() -> None:
    token_ids, starts = empty(8, dtype=torch.int32), empty(3, dtype=torch.int32)
    add_bias(logits(), token_ids, empty(8, dtype=torch.float32), starts)


def penalties() -> None:
    token_ids, starts = empty(8, dtype=torch.int32), empty(3, dtype=torch.int32)
    column = empty(2, dtype=torch.float32)
    apply_penalties(logits(), token_ids, token_ids, starts, column, column, column)


def mask() -> None:
    apply_mask(logits(), empty(2, VOCAB_SIZE // 32, dtype=torch.int32))


def logits() -> Tensor:
    return empty(2, VOCAB_SIZE, dtype=torch.float32)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


# -- description of the machine code --


def describe(compiled: Any) -> dict[str, Any]:
    """A kernel's resources, and from its machine code the global loads, stores and products."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    resources = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    code = _Code(text)
    return {
        "registers": int(resources["REG"]),
        "stack": int(resources["STACK"]),
        "local": int(resources["LOCAL"]),
        "shared": compiled.metadata.shared,  # dynamic, so not in the cubin
        "warps": compiled.metadata.num_warps,
        "loops": code.loops(),
        "loop_sums": code.loop_sums(),
        "load_widths": sorted(code.widths("LDG", "LDGSTS")),
        "store_widths": sorted(code.widths("STG")),
        "matrix_product": next((op for op in ("HGMMA", "HMMA") if code.count(op)), ""),
    }


class _Code:
    """A kernel's machine code (SASS)."""

    _LINE = re.compile(r"^\s*/\*(\w+)\*/\s+(?:@\S+\s+)?([A-Z]\w*)([^;]*);", re.MULTILINE)

    def __init__(self, disassembled: str) -> None:
        self.lines = [(int(at, 16), op, rest) for at, op, rest in self._LINE.findall(disassembled)]

    def count(self, op: str) -> int:
        return sum(line[1] == op for line in self.lines)

    def widths(self, *ops: str, begin: int = 0, end: int = 2**62) -> Counter[int]:
        """How many accesses of each width in bytes between two addresses."""
        return Counter(
            _width(rest) for at, op, rest in self.lines if op in ops and begin <= at <= end
        )

    def loops(self) -> list[dict[int, int]]:
        """The widths of the loads in each loop."""
        return [
            dict(self.widths("LDG", "LDGSTS", begin=begin, end=end)) for begin, end in self._loops()
        ]

    def loop_sums(self) -> list[dict[str, int]]:
        """The number of instructions of each rounding operation in each loop."""
        ops = ("FADD", "FMUL", "FFMA", "MUFU", "HMMA", "HGMMA")
        return [
            dict(Counter(op for at, op, _ in self.lines if op in ops and begin <= at <= end))
            for begin, end in self._loops()
        ]

    def _loops(self) -> Iterator[tuple[int, int]]:
        """First and last address of each loop; a backward branch ends a loop."""
        for at, op, rest in self.lines:
            target = re.search(r"0x(\w+)", rest)
            if op == "BRA" and target and int(target[1], 16) < at:
                yield int(target[1], 16), at


def _width(modifiers: str) -> int:
    match = re.match(r"\S*?\.(?:(128|64)|[US](8|16))(?:\.|\s|$)", modifiers)
    bits = (match[1] or match[2]) if match else 32
    return int(bits) // 8


# -- the table --


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line per kernel and variant, `Ampere / Hopper` where they differ.

    With a KV cache in fp8, which Ampere lacks, `Ada / Hopper`.
    """
    lines = [
        "| kernel | variant | warps | registers | spilled bytes | shared memory, KiB "
        "| loads, bytes (how many a turn of the loop) | matrix products |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    by_kernel: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        key = (row["kernel"], row["variant"])
        by_kernel.setdefault(key, {})[row["capability"]] = row
    for key, of_targets in sorted(by_kernel.items()):
        columns = [_cells(row) for _, row in sorted(of_targets.items())]
        cells = (" / ".join(dict.fromkeys(cell)) for cell in zip(*columns, strict=True))
        lines.append(f"| {' | '.join((*key, *cells))} |")
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["warps"]),
        str(row["registers"]),
        str(row["stack"] + row["local"]),
        f"{row['shared'] / 1024:.1f}",
        _loads(row),
        row["matrix_product"],
    ]


def _loads(row: dict[str, Any]) -> str:
    main_loop: dict[int, int] = max(row["loops"], key=lambda loads: sum(loads.values()), default={})
    if not main_loop:
        return ", ".join(map(str, row["load_widths"]))
    return ", ".join(f"{width} ({main_loop[width]})" for width in sorted(main_loop))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tritium benchmark aot")
    parser.add_argument("--table", action="store_true", help="Markdown instead of JSON")
    as_table = parser.parse_args(arguments).table
    rows = compile_all()
    print(table(rows) if as_table else json.dumps(rows))


if __name__ == "__main__":
    main()
