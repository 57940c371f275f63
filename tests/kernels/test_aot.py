"""The kernels, compiled for Ampere, Ada and Hopper without a GPU.

In a process of its own: with the interpreter on, Triton-lang does not compile.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tritium.benchmarks import pages

pytestmark = pytest.mark.slow

Row = dict[str, Any]

# Capability -> shared memory per block, on the smallest GPU of Ampere, Ada (for fp8, which Ampere
# lacks) and Hopper.
SHARED = {80: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}

PROGRAM = """
import json
from tritium.kernels.cuda import aot
rows = aot.compile_all()
print(json.dumps({"rows": rows, "table": aot.table(rows)}))
"""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """The rows of all kernels and variants, and the table."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=pages.ROOT,
        env=env | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def rows(report: dict[str, Any]) -> list[Row]:
    return report["rows"]


def is_attention(row: Row) -> bool:
    return row["kernel"] in ("paged_attention", "decode_attention")


def is_quantised(row: Row) -> bool:
    return "fp8" in row["variant"] or "int8" in row["variant"]


def is_float32(row: Row) -> bool:
    """Exact, without tensor cores: for checks, not for speed."""
    return row["variant"].endswith("float32")


def test_every_kernel_is_compiled(rows: list[Row]) -> None:
    kernels: dict[int, set[str]] = {capability: set() for capability in SHARED}
    for row in rows:
        kernels[row["capability"]].add(row["kernel"])
    assert kernels[89] == {
        "activate",
        "decode_attention",
        "grouped_matmul",
        "matmul",
        "merge_splits",
        "paged_attention",
        "rope_and_cache",
    }
    assert (
        kernels[80]
        == kernels[90]
        == {
            "activate",
            "add_bias",
            "apply_mask",
            "apply_penalties",
            "decode_attention",
            "find_thresholds",
            "grouped_matmul",
            "matmul",
            "merge_splits",
            "paged_attention",
            "rms_norm",
            "rope_and_cache",
            "sample",
        }
    )


def test_no_variant_spills_registers(rows: list[Row]) -> None:
    assert not [row for row in rows if (row["stack"] or row["local"]) and not is_float32(row)]


def test_shared_memory_fits(rows: list[Row]) -> None:
    assert not [row for row in rows if row["shared"] > SHARED[row["capability"]]]


def test_attention_loads_keys_and_values_by_16_bytes(rows: list[Row]) -> None:
    """The other loads, of 4 bytes, are fewer: block ids, and a quantised cache's scales.

    A quantised cache's values are loaded by 8 bytes: Triton-lang gives them the queries' layout.
    """
    narrow = []
    for row in filter(is_attention, rows):
        main_loops = [loop for loop in row["loops"] if "16" in loop]
        assert len(main_loops) >= 2, row  # whole tiles, and the edge
        wide = {"8", "16"} if is_quantised(row) else {"16"}
        for loop in main_loops:
            num_wide = sum(loop.get(width, 0) for width in wide)
            if not set(loop) <= wide | {"4"} or loop["4"] > num_wide:
                narrow.append((row["variant"], row["capability"], loop))
    assert not narrow


def test_attention_rounds_the_same_with_and_without_a_mask(rows: list[Row]) -> None:
    """The batch decides which loop computes a tile of keys, and must not change its sums."""
    for row in rows:
        if row["kernel"] == "paged_attention":
            sums = [loop for loop in row["loop_sums"] if loop]
            assert len(sums) >= 2, row
            assert all(loop == sums[0] for loop in sums), row


def test_matrix_products_load_rows_and_weights_by_16_bytes(rows: list[Row]) -> None:
    """Weights of 4 bits by 8 bytes; and a quantised weight's scales and zeros, once per group."""
    for row in rows:
        if row["kernel"] in ("matmul", "grouped_matmul"):
            main_loop = max(row["loops"], key=lambda loop: sum(loop.values()))
            if "int4" in row["variant"]:
                assert set(main_loop) == {"16", "8", "2", "1"}, row
            elif "fp8" in row["variant"]:
                assert set(main_loop) == {"16", "4"}, row
            else:
                assert set(main_loop) == {"16"}, row


def test_rows_are_loaded_and_stored_by_16_bytes(rows: list[Row]) -> None:
    for row in rows:
        if row["kernel"] in ("rms_norm", "activate"):
            assert row["load_widths"] == row["store_widths"] == [16], row
        elif row["kernel"] == "rope_and_cache":
            assert row["load_widths"] == [8, 16], row  # 8: the slot


def test_prefill_and_matrix_product_use_wgmma_on_hopper(rows: list[Row]) -> None:
    for row in rows:
        if row["kernel"] in ("paged_attention", "matmul") and not is_float32(row):
            expected = "HGMMA" if row["capability"] == 90 else "HMMA"
            assert row["matrix_product"] == expected, row


def test_the_page_has_the_table(report: dict[str, Any]) -> None:
    """If this fails, run `make pages`."""
    page = (pages.ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    assert pages.replaced(page, "kernels", report["table"]) == page
