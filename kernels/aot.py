"""Compiles the kernels for Hopper (sm_90) without a GPU and prints what they take, as JSON.

    python -m kernels.aot

Each kernel is compiled through its own launcher, with only the launch left out, so that what is
described is what runs: the same tile sizes, the same knowledge of alignments.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels.metadata import AttentionMetadata
from kernels.paged_attention import _paged_attention, paged_attention
from kernels.rope_cache import _rope_and_cache, rope_and_cache

NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 9, 3, 16


class Sm90Driver:
    """As much of a Triton-lang driver as compiling takes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launch(kernel: JITFunction, launch: Callable[[], object]) -> dict[str, Any]:
    """What `kernel` takes as `launch` would launch it."""
    compiled: list[Any] = []

    def compile_only(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(JITFunction.run(kernel, *args, grid=grid, warmup=True, **kwargs))

    kernel.run = compile_only
    launch()
    return describe(compiled[0])


def describe(compiled: Any) -> dict[str, Any]:
    """Resources, and the widths in bytes of the accesses to global memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    resources = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage))
    ptx = compiled.asm["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]+\], \[[^]]+\], 0x(\w+)", ptx)
    return {
        "registers": int(resources["REG"]),
        "stack": int(resources["STACK"]),
        "local": int(resources["LOCAL"]),
        "shared": compiled.metadata.shared,  # the dynamic part, which cuobjdump does not see
        "wgmma": "wgmma.mma_async" in ptx,
        "copy_widths": sorted({int(width, 16) for width in copies}),
        "load_widths": widths("ld", ptx),
        "store_widths": widths("st", ptx),
    }


def widths(instruction: str, ptx: str) -> list[int]:
    found = re.findall(rf"\b{instruction}\.global(?:\.v(\d))?\.b(\d+)", ptx)
    return sorted({int(vector or 1) * int(bits) // 8 for vector, bits in found})


def qkv_and_cache(num_tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim, dtype=torch.bfloat16),
        torch.empty(2, 64, BLOCK_SIZE, NUM_KV_HEADS, head_dim, dtype=torch.bfloat16),
    )


def launch_attention(head_dim: int, query_len: int, sliding_window: int | None) -> None:
    qkv, kv_cache = qkv_and_cache(query_len, head_dim)
    metadata = AttentionMetadata(
        query_start_loc=torch.empty(2, dtype=torch.int32),
        seq_lens=torch.empty(1, dtype=torch.int32),
        block_tables=torch.empty(1, 64, dtype=torch.int32),
        slot_mapping=torch.empty(query_len, dtype=torch.int64),
        block_size=BLOCK_SIZE,
        num_decodes=int(query_len == 1),
        max_query_len=query_len,
        max_seq_len=1024,
    )
    paged_attention(qkv[:, :NUM_HEADS], kv_cache, metadata, head_dim**-0.5, sliding_window)


def launch_rope_and_cache(head_dim: int) -> None:
    qkv, kv_cache = qkv_and_cache(2, head_dim)
    angles = torch.empty(2, head_dim // 2)
    rope_and_cache(qkv, angles, angles, kv_cache, torch.empty(2, dtype=torch.int64))


def main() -> None:
    triton.runtime.driver.set_active(Sm90Driver())
    report = {}
    for head_dim in (64, 80, 128, 256):
        launch: Callable[[], object] = partial(launch_rope_and_cache, head_dim)
        report[f"rope_and_cache-{head_dim}"] = compile_launch(_rope_and_cache, launch)
        for batch, query_len in (("decode", 1), ("short", 16), ("long", 512)):
            for name, window in (("", None), ("-window", 128)):
                launch = partial(launch_attention, head_dim, query_len, window)
                key = f"attention-{head_dim}-{batch}{name}"
                report[key] = compile_launch(_paged_attention, launch)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
