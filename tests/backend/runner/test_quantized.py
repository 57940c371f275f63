"""Quantised checkpoints: literal numbers of each format, and what is refused."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Phi3Config, PreTrainedConfig, Qwen3MoeConfig

from tests.backend.runner import test_models
from tests.interpreter import error
from tests.kernels.test_attention import make_metadata
from tritium import kernels
from tritium.backend.runner.models import DecoderModel
from tritium.backend.runner.models.loader import load_config, load_weights
from tritium.backend.runner.models.quantized import (
    Quantization,
    read_quantization,
    read_quantized,
)
from tritium.benchmarks.quantized_weights import quantized_weight
from tritium.kernels import KVCache, StoredWeight, as_tensor

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": -1}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "tensor"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def test_what_is_read() -> None:
    assert read_quantization(AWQ) == Quantization("awq", 128)
    assert read_quantization(GPTQ) == Quantization("gptq", 0, zero_offset=1)
    assert read_quantization({**GPTQ, "checkpoint_format": "gptq_v2"}).zero_offset == 0
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 64]}
    assert read_quantization(blocks) == Quantization("fp8", block_size=(128, 64))
    groups = {"config_groups": {"group_0": {"weights": WEIGHTS}}}
    assert read_quantization(COMPRESSED | groups) == Quantization("fp8")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' .*Supported: fp8, awq"),
        ({}, "quant_method None"),
        ({**AWQ, "bits": 8}, "bits 8 .*Supported: 4"),
        ({**AWQ, "version": "gemv"}, "version 'gemv' .*Supported: gemm"),
        ({**AWQ, "zero_point": False}, "zero_point False"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' .*Supported: e4m3"),
        ({**COMPRESSED, "format": "pack-quantized"}, "format 'pack-quantized'"),
        (
            COMPRESSED | {"config_groups": {"g": {"weights": {**WEIGHTS, "type": "int"}}}},
            "type 'int' .*Supported: float",
        ),
    ],
)
def test_what_is_refused(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_quantization(config)


def words(*numbers: int) -> torch.Tensor:
    """Eight numbers of four bits, the first in the lowest bits. [1, 1] int32"""
    word = sum(number << 4 * i for i, number in enumerate(numbers))
    return torch.tensor([[word - 2**32 if word >= 2**31 else word]], dtype=torch.int32)


def numbers(weight: StoredWeight) -> list[list[float]]:
    return as_tensor(weight).tolist()


def test_numbers_of_awq() -> None:
    stored = words(0, 2, 4, 6, 1, 3, 5, 15)  # the order in which AWQ stores columns
    parts = {
        "m.qweight": torch.cat((stored, words(*[1] * 8))),
        "m.qzeros": words(*[1] * 8),
        "m.scales": torch.tensor([[0.5] * 7 + [2.0]], dtype=torch.float16),
    }
    [(name, weight)] = read_quantized(parts.items(), Quantization("awq", 2))
    assert name == "m.weight"
    assert (weight.bits, weight.shape) == (4, (8, 2))
    assert numbers(weight) == [[x, 0] for x in (-0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 28.0)]


def test_numbers_of_gptq() -> None:
    parts = {
        "m.scales": torch.tensor([[0.5] * 8, [2.0] * 8], dtype=torch.float16),
        "m.qweight": words(0, 1, 2, 3, 4, 5, 6, 15).expand(1, 8),
        "m.g_idx": torch.tensor([0, 0, 0, 0, 1, 1, 1, 0], dtype=torch.int32),
        "m.qzeros": torch.cat((words(*[0] * 8), words(*[2] * 8))),  # stored less 1
    }
    [(_, weight)] = read_quantized(parts.items(), Quantization("gptq", 4, zero_offset=1))
    expected = [-0.5, 0.0, 0.5, 1.0, 2.0, 4.0, 6.0, 7.0]
    assert isinstance(weight, torch.Tensor), "its groups are not consecutive inputs"
    assert numbers(weight) == [expected] * 8
    parts["m.g_idx"] = torch.tensor([0] * 4 + [1] * 4, dtype=torch.int32)
    [(_, weight)] = read_quantized(parts.items(), Quantization("gptq", 4, zero_offset=1))
    assert (weight.bits, weight.group_size) == (4, 4)
    assert numbers(weight) == [[*expected[:-1], 24.0]] * 8


FP8 = torch.tensor([[1.0, 2.0, 3.5], [-4.0, 0.25, 448.0]]).to(torch.float8_e4m3fn)


def test_numbers_of_fp8() -> None:
    plain = torch.ones(2)
    weights = {
        "m.weight": FP8,
        "norm.weight": plain,
        "m.input_scale": torch.tensor(3.0),
        "m.weight_scale_inv": torch.tensor([[2.0, 10.0]]),
    }
    read = dict(read_quantized(weights.items(), Quantization("fp8", block_size=(2, 2))))
    assert read.keys() == {"norm.weight", "m.weight"}
    assert read["norm.weight"] is plain
    assert (read["m.weight"].bits, read["m.weight"].shape) == (8, (2, 3))
    assert numbers(read["m.weight"]) == [[2.0, 4.0, 35.0], [-8.0, 0.5, 4480.0]]


@pytest.mark.parametrize(
    ("scale", "by_row"),
    [
        (torch.tensor(2.0), [2, 2]),
        (torch.tensor([2.0]), [2, 2]),
        (torch.tensor([2.0, 3.0]), [2, 3]),
        (torch.tensor([[2.0], [3.0]]), [2, 3]),
    ],
    ids=str,
)
def test_scales_of_fp8(scale: torch.Tensor, by_row: list[float]) -> None:
    parts = {"m.weight": FP8, "m.weight_scale": scale}
    [(_, weight)] = read_quantized(parts.items(), Quantization("fp8"))
    assert numbers(weight) == (FP8.float() * torch.tensor(by_row)[:, None]).tolist()


def test_missing_parts_and_wrong_shapes() -> None:
    with pytest.raises(ValueError, match="quantised weight m lacks its qzeros, scales"):
        list(read_quantized([("m.qweight", words(0))], Quantization("awq", 128)))
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="quantised weight m lacks its scale"):
        list(read_quantized([("m.weight", weight)], Quantization("fp8")))
    for blocks, scale in (((2, 2), torch.ones(1, 1)), ((0, 0), torch.ones(3))):
        parts = [("m.weight", weight), ("m.weight_scale_inv", scale)]
        with pytest.raises(ValueError, match=r"quantised weight m can't be read .* groups"):
            list(read_quantized(parts, Quantization("fp8", block_size=blocks)))
    weight[3, 2] = torch.nan
    parts = [("m.weight", weight), ("m.weight_scale", torch.tensor(1.0))]
    with pytest.raises(ValueError, match=r"quantised weight m can't be read .* NaN"):
        list(read_quantized(parts, Quantization("fp8")))


# -- models --

TINY = test_models.TINY
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    "hf_config",
    [
        LlamaConfig(**TINY),
        Phi3Config(**TINY, pad_token_id=0, partial_rotary_factor=0.5),
        Qwen3MoeConfig(**TINY, **EXPERTS),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_model_computes_with_what_is_stored(
    hf_config: PreTrainedConfig, bits: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Stacked, in another order, by experts; one projection of the first layer is not quantised."""
    test_models.make_hf_model(hf_config).save_pretrained(tmp_path)
    config, device = load_config(tmp_path), torch.device("cpu")
    stored: dict[str, StoredWeight] = {}
    for name, weight in load_weights(tmp_path, config):
        stored[name] = weight
        if name.endswith("_proj.weight") and name != "model.layers.0.self_attn.v_proj.weight":
            quantized = quantized_weight(weight.shape, bits, 32, torch.float32)
            stored[name] = quantized._replace(scales=quantized.scales / 8)
    exact = {name: as_tensor(weight) for name, weight in stored.items()}
    models = [DecoderModel(config, w.items(), dtype, device) for w in (stored, exact)]
    outputs = []
    for model in models:
        metadata = make_metadata([(20, 20)], torch.arange(2)[None])
        caches = [KVCache.empty(2, 16, 2, config.head_dim, dtype) for _ in range(2)]
        ids, positions = torch.arange(20) * 3, torch.arange(20)
        outputs.append(model.compute_logits(model.forward(ids, positions, caches, metadata)))
    if kernels.cpu.is_available() and dtype == torch.bfloat16:
        packed = models[0].layers[1].o_proj.weight
        assert packed.values.dtype == (torch.uint8 if bits == 4 else torch.float8_e4m3fn)
        if bits == 4:  # zero * scale is rounded to float16
            assert error(outputs[0].flatten(), outputs[1].flatten()) < 0.05
            return
    assert torch.equal(*outputs)
