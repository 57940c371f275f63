"""The shipped model in the formats that the peers read, with the same weights for all.

The shipped file has 4-bit weights, which Tritium computes in bfloat16. The Hugging Face directory
contains them in bfloat16, the GGUF files in BF16 and Q8_0. The files are created once.
"""

import subprocess
from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from transformers import AutoTokenizer

from tritium.loadtests.transformers_model import transformers_model


def hugging_face(shipped: Path, folder: Path) -> Path:
    target = folder / "hf"
    if not (target / "tokenizer_config.json").exists():
        transformers_model(shipped, torch.bfloat16).save_pretrained(target)
        tokenizer = AutoTokenizer.from_pretrained(shipped.parent, gguf_file=shipped.name)
        tokenizer.save_pretrained(target)
    return target


def gguf_file(shipped: Path, folder: Path, kind: GGMLQuantizationType) -> Path:
    """Copy a GGUF file with matrices of another type; vectors stay as they are."""
    target = folder / f"{kind.name.lower()}.gguf"
    if target.exists():
        return target
    unfinished = target.with_suffix(".part")
    reader = GGUFReader(shipped)
    writer = GGUFWriter(unfinished, reader.fields["general.architecture"].contents())
    file_type = {
        GGMLQuantizationType.BF16: gguf.LlamaFileType.MOSTLY_BF16,
        GGMLQuantizationType.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    }[kind]
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], element)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(target)


def openvino_ir(model: Path, folder: Path, exporter: Path, weights: str) -> Path:
    """Export to OpenVINO's format with optimum-intel's command line.

    Args:
        model: Hugging Face directory.
        exporter: `optimum-cli` of the peer's environment.
        weights: int8 or fp16.
    """
    target = folder / f"openvino-{weights}"
    if not (target / "openvino_tokenizer.xml").exists():
        task = ["--task", "text-generation-with-past", "--weight-format", weights]
        command = [str(exporter), "export", "openvino", "--model", str(model), *task, str(target)]
        with (folder / f"openvino-{weights}.export.log").open("wb") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log)
    return target
