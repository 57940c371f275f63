"""The kernels as compiled for Hopper, which takes no GPU.

In a process of its own: where the interpreter is on, Triton-lang doesn't compile.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, Any]]:
    """Each compiled variant's resources, by its name."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "kernels.aot"],
        cwd=Path(__file__).parents[1],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_no_variant_spills_registers(report: dict[str, dict[str, Any]]) -> None:
    assert not {name: use for name, use in report.items() if use["stack"] or use["local"]}


def test_shared_memory_fits_smaller_gpus_too(report: dict[str, dict[str, Any]]) -> None:
    """99 KiB: what a block may take where Hopper's 227 are not to be had (sm_86, sm_89)."""
    assert not {name: use for name, use in report.items() if use["shared"] > 99 * 1024}


def test_global_memory_is_accessed_by_16_bytes(report: dict[str, dict[str, Any]]) -> None:
    """All but the integers that say where: block ids and lengths (4 bytes), slots (8)."""
    for name, use in report.items():
        is_attention = name.startswith("attention")
        assert use["copy_widths"] == ([4, 16] if is_attention else []), name
        assert use["load_widths"] == ([4, 16] if is_attention else [8, 16]), name
        assert use["store_widths"] == [16], name


def test_prefill_uses_wgmma(report: dict[str, dict[str, Any]]) -> None:
    for name, use in report.items():
        assert use["wgmma"] == ("short" in name or "long" in name), name
