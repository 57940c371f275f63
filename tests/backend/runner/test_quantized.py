"""Quantised checkpoints: literal numbers of each format, and what is refused."""

import pytest
import torch

from tritium.backend.runner.models.quantized import (
    Quantization,
    dequantized,
    read_quantization,
)

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


def test_numbers_of_awq() -> None:
    parts = {
        "m.qweight": words(0, 2, 4, 6, 1, 3, 5, 15),  # the order in which AWQ stores columns
        "m.qzeros": words(*[1] * 8),
        "m.scales": torch.tensor([[0.5] * 7 + [2.0]], dtype=torch.float16),
    }
    [(name, weight)] = dequantized(parts.items(), Quantization("awq", 128))
    assert name == "m.weight"
    assert weight.flatten().tolist() == [-0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 28.0]


def test_numbers_of_gptq() -> None:
    parts = {
        "m.scales": torch.tensor([[0.5] * 8, [2.0] * 8], dtype=torch.float16),
        "m.qweight": words(0, 1, 2, 3, 4, 5, 6, 15).expand(1, 8),
        "m.g_idx": torch.tensor([0, 0, 0, 0, 1, 1, 1, 0], dtype=torch.int32),
        "m.qzeros": torch.cat((words(*[0] * 8), words(*[2] * 8))),  # stored less 1
    }
    [(_, weight)] = dequantized(parts.items(), Quantization("gptq", 4, zero_offset=1))
    expected = [-0.5, 0.0, 0.5, 1.0, 2.0, 4.0, 6.0, 7.0]
    assert weight.tolist() == [expected] * 8


def test_numbers_of_fp8() -> None:
    weight = torch.tensor([[1.0, 2.0, 3.5], [-4.0, 0.25, 448.0]]).to(torch.float8_e4m3fn)
    plain = torch.ones(2)
    weights = {
        "m.weight": weight,
        "norm.weight": plain,
        "m.input_scale": torch.tensor(3.0),
        "m.weight_scale_inv": torch.tensor([[2.0, 10.0]]),
    }
    read = dict(dequantized(weights.items(), Quantization("fp8", block_size=(2, 2))))
    assert read.keys() == {"norm.weight", "m.weight"}
    assert read["norm.weight"] is plain
    assert read["m.weight"].tolist() == [[2.0, 4.0, 35.0], [-8.0, 0.5, 4480.0]]


def test_missing_parts_and_wrong_shapes() -> None:
    with pytest.raises(ValueError, match="quantised weight m lacks its qzeros, scales"):
        list(dequantized([("m.qweight", words(0))], Quantization("awq", 128)))
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="quantised weight m lacks its scale"):
        list(dequantized([("m.weight", weight)], Quantization("fp8")))
    parts = [("m.weight", weight), ("m.weight_scale_inv", torch.ones(1, 1))]
    with pytest.raises(ValueError, match="quantised weight m can't be read"):
        list(dequantized(parts, Quantization("fp8", block_size=(2, 2))))
