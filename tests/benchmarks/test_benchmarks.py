"""The roofline against numbers computed by hand, and the GPU check run on a CPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tritium.backend.runner.models import read_model_config
from tritium.benchmarks import pages, roofline
from tritium.benchmarks.engine_runs import nano_vllm_work
from tritium.benchmarks.gpu_check import PHASES, run_phase, table
from tritium.benchmarks.models import LLAMA_3_1_8B, QWEN3_0_6B
from tritium.benchmarks.phases import Case, Phase, Setup
from tritium.benchmarks.roofline import H200, Operation, Step

LLAMA = read_model_config(LLAMA_3_1_8B())
QWEN = read_model_config(QWEN3_0_6B())
CPU = Setup(torch.device("cpu"), small=True)

# -- roofline --


def test_bytes_of_weights_and_kv_cache():
    # 4096 x (2 x 4096 + 2 x 1024 + 3 x 14336) in each of 32 layers,
    # and 128256 x 4096 in the head.
    assert roofline.weight_bytes(LLAMA) == 2 * (32 * 218_103_808 + 525_336_576)
    # 1024 x (2 x 2048 + 2 x 1024 + 3 x 3072) in 28 layers, and 151936 x 1024.
    assert roofline.weight_bytes(QWEN) == 2 * (28 * 15_728_640 + 155_582_464)
    # 128 KiB per token: keys and values, 32 layers, 8 heads, 128 numbers, 2 bytes.
    assert roofline.kv_bytes(LLAMA, Step(3, 1, 1000)) == 3 * 1000 * 131_072


@pytest.mark.parametrize(
    ("step", "num_scores"),
    [(Step(1, 1, 1000), 1000), (Step(1, 3, 3), 1 + 2 + 3), (Step(2, 2, 5), 2 * (4 + 5))],
)
def test_pairs_of_query_and_key(step, num_scores):
    assert step.num_scores == num_scores


def test_operations_of_a_decode_step():
    operations = {o.name: o for o in roofline.operations(LLAMA, Step(1, 1, 1024))}
    assert operations["qkv"].num_bytes == 32 * (4096 * 6144 + 4096 + 6144) * 2
    assert operations["qkv"].flops == 32 * 2 * 4096 * 6144
    assert operations["attention"].num_bytes == 134_217_728 + 32 * 2 * 4096 * 2
    assert operations["attention"].flops == 32 * 4 * 1024 * 4096
    assert operations["lm head"].num_bytes == 128256 * 4096 * 2 + 4096 * 2 + 128256 * 4
    assert operations["sampling"].num_bytes == 128256 * 4
    # 65 x 4 rows of 4096; 2 x 6144 and 3 x 14336 in each of 32 layers.
    assert operations["norms, rope, activation"].num_bytes == 2 * (1_064_960 + 32 * 55_296)


def test_operation_takes_the_longer_of_two_times():
    assert Operation("reads", 4.3e12, 790e12 / 2).seconds(H200) == 1
    assert Operation("computes", 4.3e12, 790e12 * 2).seconds(H200) == 2


def test_step_of_one_sequence_is_bound_by_memory():
    step = Step(1, 1, 1024)
    # 15.14 GB at 4.3 TB/s; a few rows of activations add the rest.
    assert roofline.memory_seconds(LLAMA, step, H200) == pytest.approx(3.5217e-3, rel=1e-4)
    assert roofline.step_seconds(LLAMA, step, H200) == pytest.approx(3.5245e-3, rel=1e-4)


def test_step_of_256_sequences_is_bound_by_compute():
    operations = {o.name: o for o in roofline.operations(LLAMA, Step(256, 1, 1024))}
    gate_up = operations["gate-up"]
    assert gate_up.seconds(H200) == 32 * 2 * 256 * 4096 * 28672 / 790e12
    assert gate_up.seconds(H200) > gate_up.num_bytes / 4.3e12


def test_docs_page_has_the_current_roofline():
    page = (pages.ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    assert pages.replaced(page, "roofline", "\n\n".join(roofline.report(1024, H200))) == page


def test_only_text_between_the_marks_is_replaced():
    page = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb"
    assert pages.replaced(page, "x", "new") == "a\n<!-- begin x -->\n\nnew\n\n<!-- end x -->\nb"
    with pytest.raises(ValueError, match="y"):
        pages.replaced(page, "y", "new")


# -- GPU check --


def test_workload_of_nano_vllm():
    work = nano_vllm_work()
    assert len(work) == 256
    assert sum(w.num_output_tokens for w in work) == 133_966
    assert sum(len(w.prompt) for w in work) == 142_827


def good_then_bad(setup):
    yield Case("good", lambda: {"passed": True, "error": 0.25})
    yield Case("bad", lambda: {}["nothing"])
    yield Case("good again", lambda: {"us": 3.0}, {"us": 2.0})


def dies(setup):
    yield Case("good", lambda: {"passed": True})
    yield Case("dies", lambda: os._exit(3))


def hangs(setup):
    yield Case("good", lambda: {"passed": False})
    yield Case("hangs", lambda: time.sleep(60))


def test_failing_case_does_not_affect_others():
    rows = list(run_phase(Phase("p", 30, good_then_bad), CPU, 30))
    assert [row["case"] for row in rows] == ["good", "bad", "good again"]
    assert "KeyError" in rows[1]["error"]
    text = table(rows)
    assert "1 checks, 0 failed, 1 errors" in text
    assert "ERROR p: bad: KeyError: 'nothing'" in text
    assert "us 3 (goal 2.0)" in text


@pytest.mark.parametrize(
    ("cases", "error"), [(dies, "its process ended with 3"), (hangs, "its time limit was reached")]
)
def test_results_of_a_phase_that_dies_or_hangs_are_kept(cases, error):
    rows = list(run_phase(Phase("p", 2, cases), CPU, 2))
    assert [row["case"] for row in rows] == ["good", "the rest"]
    assert rows[1]["error"] == error


@pytest.mark.slow
def test_whole_check_on_cpu_with_few_packages(tmp_path):
    """The packages are those of a GPU machine with torch, transformers and their requirements."""
    others = ["gguf", "google", "locust", "psutil", "pytest", "rich", "tritonclient", "xxhash"]
    program = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({others}))
sys.argv[1:] = ["--device", "cpu", "--small"]
runpy.run_module("tritium.benchmarks.gpu_check", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OUT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    results = json.loads((tmp_path / "gpu_check.json").read_text())
    assert set(results["versions"]) == {"python", "torch", "triton", "transformers"}
    rows = {(row["phase"], row["case"]): row for row in results["rows"]}
    assert {phase for phase, _ in rows} == {phase.name for phase in PHASES}
    for model in ("Llama-3.1-8B", "Qwen3-0.6B"):
        checked = rows[f"engine, {model}", "float32, in chunks, with preemption"]["numbers"]
        assert checked["equal"] == checked["tokens"]
        assert checked["preemptions"] > 0
        assert rows[model, "decode, batch 4"]["numbers"]["of_roofline"] > 0
        assert rows[model, "nano-vllm's workload"]["numbers"]["tokens"] == sum(
            work.num_output_tokens for work in nano_vllm_work(4, 128)
        )
