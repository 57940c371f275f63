"""LoRA adapters against models with merged weights: mixed batches, refusals."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Ernie4_5Config,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from tests.adapters import merged, write_adapter
from tests.backend.runner.test_model_runner import FakeGraphs, make_config, small_pool
from tests.backend.runner.test_models import TINY, make_hf_model
from tests.backend.test_files import POINTER
from tests.helpers import Collector
from tritium.backend.config import ConfigError, EngineConfig
from tritium.backend.engine.engine import Engine
from tritium.backend.engine.request import EngineRequest
from tritium.backend.runner.model_runner import ModelRunner
from tritium.backend.runner.models import DecoderModel, read_model_config
from tritium.backend.runner.models.lora import PackedLora, add_lora
from tritium.kernels import pack_linear

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
VOCABULARY = TINY["vocab_size"]
PROMPTS = [[5], [1, 2, 3], list(range(40)), [7] * 5, [9] * 17, [3, 1, 4, 1, 5, 9, 2, 6], [5]]
# Two prompts per model. The longest answer is the base model's: its last steps use no adapter.
LORA = ["first", "second", "first", "", "second", "", ""]


class Checkpoint:
    """A small random model and two adapters: as files, and merged into the weights."""

    def __init__(self, directory: Path, hf_config: PretrainedConfig) -> None:
        hf_model = make_hf_model(hf_config)
        self.config = read_model_config(hf_model.config)
        self.weights = {name: w.detach() for name, w in hf_model.named_parameters()}
        first = write_adapter(
            directory / "first", self.config, ("q_proj", "v_proj", "down_proj"), 4, seed=1
        )
        second = write_adapter(
            directory / "second",
            self.config,
            ("k_proj", "o_proj", "gate_proj", "up_proj"),
            6,
            layers=range(1, 2),
            seed=2,
            use_rslora=True,
        )
        self.adapters = {"first": str(first), "second": str(second)}
        scalings = {"first": 8 / 4, "second": 12 / 6**0.5}
        self.merged = {"": self.model(self.weights)}
        for name, path in self.adapters.items():
            weights = merged(self.weights, Path(path), scalings[name])
            self.merged[name] = self.model(weights)

    def model(self, weights: dict[str, Tensor] | None = None) -> DecoderModel:
        return DecoderModel(self.config, (weights or self.weights).items(), torch.float32, CPU)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("adapters"), LlamaConfig(**TINY))


def generate(
    config: EngineConfig, runner: ModelRunner, lora: list[str], preempts: bool = False
) -> list[tuple[list[int], Tensor]]:
    """Each prompt's answer: (token ids, log probabilities [num_tokens, vocabulary])."""
    collector = Collector()
    engine = Engine(config, runner, collector)
    for i, (prompt, name) in enumerate(zip(PROMPTS, lora, strict=True)):
        engine.reserve()
        engine.submit(EngineRequest(i, prompt, 6 + 3 * i, num_logprobs=VOCABULARY, lora=name))
    in_flight = None
    while len(collector.reasons) < len(PROMPTS):
        in_flight = engine.step(in_flight)
        engine.scheduler.check_integrity()
    collector.raise_error()
    assert bool(engine.stats().num_preemptions) is preempts
    answers = []
    for i in range(len(PROMPTS)):
        tokens = [t for o in collector.outputs if o.request_id == i for t in o.tokens]
        logprobs = [[value for _, value in sorted(t.logprobs.top)] for t in tokens]
        answers.append(([t.token_id for t in tokens], torch.tensor(logprobs)))
    return answers


def expected_answers(checkpoint: Checkpoint) -> list[tuple[list[int], Tensor]]:
    """The answers of models with the adapters merged into their weights."""
    config = make_config()
    of_each = {
        name: generate(config, ModelRunner(config, model=model), [""] * len(PROMPTS))
        for name, model in checkpoint.merged.items()
    }
    return [of_each[name][i] for i, name in enumerate(LORA)]


def assert_same(answers, expected) -> None:
    for (token_ids, logprobs), (expected_ids, expected_logprobs) in zip(
        answers, expected, strict=True
    ):
        assert token_ids == expected_ids
        torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ["one by one", "overlapped", "graphs"])
@pytest.mark.parametrize("roomy", [True, False], ids=["roomy", "preempted"])
def test_a_mixed_batch_equals_models_with_merged_weights(checkpoint, roomy, mode):
    expected = expected_answers(checkpoint)
    assert expected[0][0] != expected[6][0][:6]  # two models' answers to one prompt
    config = make_config(lora_modules=checkpoint.adapters)
    runner = ModelRunner(config, model=checkpoint.model())
    if not roomy:
        small = {"kv_cache_memory": small_pool(runner), "reserve_blocks_per_seq": 0}
        config = config.model_copy(update=small)
        runner = ModelRunner(config, model=runner.model)
    runner.overlaps = mode != "one by one"
    if mode == "graphs":
        num_slots = runner.num_blocks * runner.block_size
        with torch.inference_mode():
            runner._graphs = FakeGraphs(
                runner.model, runner.kv_caches, 16, config.max_num_seqs, num_slots
            )
    assert_same(generate(config, runner, LORA, preempts=not roomy), expected)
    if mode == "graphs":
        assert runner._graphs.replayed


@pytest.mark.parametrize(
    "hf_config",
    [
        Qwen3Config(**TINY, head_dim=24, attention_bias=True),
        Ernie4_5Config(**TINY, head_dim=24),  # the rows of queries and keys are in another order
        Gemma2Config(**TINY, head_dim=24, sliding_window=7),
        GraniteConfig(**TINY, residual_multiplier=0.5, attention_multiplier=0.25),
    ],
    ids=lambda hf_config: hf_config.model_type,
)
def test_another_shape_of_model(hf_config, tmp_path):
    checkpoint = Checkpoint(tmp_path, hf_config)
    config = make_config(lora_modules=checkpoint.adapters)
    runner = ModelRunner(config, model=checkpoint.model())
    assert_same(generate(config, runner, LORA), expected_answers(checkpoint))


def test_steps_without_an_adapter_cost_nothing(checkpoint, monkeypatch):
    config = make_config(lora_modules=checkpoint.adapters)
    runner = ModelRunner(config, model=checkpoint.model())
    monkeypatch.setattr("tritium.backend.runner.models.linear.add_lora", None)
    base = ModelRunner(make_config(), model=checkpoint.merged[""])
    answers, expected = (generate(config, r, [""] * len(PROMPTS)) for r in (runner, base))
    for (token_ids, logprobs), (expected_ids, expected_logprobs) in zip(
        answers, expected, strict=True
    ):
        assert token_ids == expected_ids
        assert torch.equal(logprobs, expected_logprobs)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]
)
def test_the_operation(dtype, tolerance):
    generator = torch.Generator().manual_seed(3)
    out, x, a, b = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((7, 24), (7, 40), (5, 40), (24, 5))
    )
    rows = torch.tensor([1, 2, 6])
    expected = out.double()
    expected[rows] += x.double()[rows] @ a.double().T @ b.double().T
    untouched = out[[0, 3, 4, 5]].clone()
    adapters = {"one": PackedLora(pack_linear(a), pack_linear(b))}
    with torch.inference_mode():
        add_lora(out, x, adapters, {"one": rows, "not here": torch.tensor([0, 3])})
    assert torch.equal(out[[0, 3, 4, 5]], untouched)
    error = (out.double() - expected).norm() / expected.norm()
    assert error < tolerance


# -- refused adapters --


def refusal(checkpoint: Checkpoint, directory: Path) -> str:
    config = make_config(lora_modules={"good": checkpoint.adapters["first"], "bad": str(directory)})
    with pytest.raises(ConfigError) as refused:
        ModelRunner(config, model=checkpoint.model())
    prefix = (
        f"config.pbtxt: parameter 'lora_modules': adapter 'bad' can't be loaded from {directory}: "
    )
    message = str(refused.value)
    assert message.startswith(prefix)
    return message.removeprefix(prefix)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"use_qalora": True}, "use_qalora True is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication [[0, 2]] is not supported"),
        ({"velora_config": {"groups": 2}}, "velora_config {'groups': 2} is not supported"),
        ({"a_key_of_next_year": 1}, "adapter_config.json: a_key_of_next_year 1 is not supported"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights can't be 'loftq'. "),
        ({"init_lora_weights": "corda"}, "init_lora_weights can't be 'corda'. "),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights can't be 'pissa_niter_4'. "),
        ({"init_lora_weights": "new"}, "init_lora_weights can't be 'new'. "),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head'] is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern {'q_proj': 8} is not supported"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern {'q_proj': 8} is not supported"),
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices [1] is not supported"),
        ({"bias": "all"}, "bias can't be 'all'. Input should be 'none'"),
        ({"peft_type": "IA3"}, "peft_type can't be 'IA3'. Input should be 'LORA'"),
        ({"r": 0}, "r can't be 0. Input should be greater than or equal to 1"),
        ({"lora_alpha": "much"}, "lora_alpha can't be 'much'"),
        ({"target_modules": 5}, "target_modules can't be 5"),
        (
            {"target_modules": ["q_proj", "query_key_value"]},
            "it targets query_key_value; supported target modules are down_proj, gate_proj, "
            "k_proj, o_proj, q_proj, up_proj, v_proj",
        ),
        ({"target_modules": ["embed_tokens"]}, "it targets embed_tokens; supported"),
        (
            {"target_modules": ["v_proj", "q_proj"]},
            "it holds no weights of v_proj, which it targets",
        ),
        (
            {"r": 8},
            "model.layers.0.self_attn.q_proj.lora_A.weight is [4, 64], but [8, 64] by the model "
            "and the adapter's r of 8 (it was made for some/base)",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_are_refused(checkpoint, tmp_path, options, words):
    write_adapter(tmp_path, checkpoint.config, ("q_proj",), **options)
    assert words in refusal(checkpoint, tmp_path)


@pytest.mark.parametrize("targets", ["all-linear", ".*q_proj", None, ["self_attn.q_proj"]])
def test_other_forms_of_target_modules(checkpoint, tmp_path, targets):
    write_adapter(tmp_path, checkpoint.config, ("q_proj",), target_modules=targets)
    checkpoint.model().load_adapter("good", tmp_path, checkpoint.weights.items)


@pytest.mark.parametrize(
    "options",
    [
        {"init_lora_weights": True},
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"lora_dropout": 0.5, "inference_mode": True, "peft_version": "0.21.2"},
        {"auto_mapping": {"base_model_class": "X"}, "revision": "main", "layers_pattern": "layers"},
        {"megatron_core": "megatron.core", "loftq_config": {}, "megatron_config": None},
        {"use_dora": False, "arrow_config": None, "a_key_of_next_year": None, "another": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_change_nothing(checkpoint, tmp_path, options):
    write_adapter(tmp_path, checkpoint.config, ("q_proj",), **options)
    model = checkpoint.model()
    model.load_adapter("good", tmp_path, checkpoint.weights.items)
    (q_proj, *_), *_ = (layer.linears for layer in model.layers)
    assert q_proj.adapters["good"].a.shape[0] == 4


# -- adapters that began as a part of the base --


def start(method: str, weight: Tensor, rank: int, scaling: float) -> Tensor:
    """What PEFT takes off a base weight."""
    exact = weight.double().numpy()
    if method == "pissa":
        u, s, vh = np.linalg.svd(exact, full_matrices=False)
        return torch.from_numpy((u[:, :rank] * s[:rank]) @ vh[:rank]).float()
    q, r = np.linalg.qr(exact)
    return torch.from_numpy(scaling * q[:, :rank] @ r[:rank]).float()


@pytest.mark.parametrize("method", ["pissa", "olora"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_that_began_as_a_part_of_the_base(checkpoint, tmp_path, method, use_rslora):
    make_hf_model(LlamaConfig(**TINY)).save_pretrained(tmp_path / "base")
    adapter = write_adapter(
        tmp_path / "adapter",
        checkpoint.config,
        ("q_proj", "v_proj", "o_proj", "up_proj"),
        init_lora_weights=method,
        use_rslora=use_rslora,
    )
    scaling = 8 / (2 if use_rslora else 4)
    weights = merged(checkpoint.weights, adapter, scaling)
    for name, weight in weights.items():
        if weight is not checkpoint.weights[name]:
            weights[name] = weight - start(method, checkpoint.weights[name], 4, scaling)
    config = make_config(
        model=str(tmp_path / "base"), lora_modules={"first": str(adapter), "second": str(adapter)}
    )
    answers = generate(config, ModelRunner(config, model=checkpoint.model()), LORA)
    expected_config = make_config()
    of_merged, of_base = (
        generate(expected_config, ModelRunner(expected_config, model=model), [""] * len(PROMPTS))
        for model in (checkpoint.model(weights), checkpoint.merged[""])
    )
    expected = [(of_merged if name else of_base)[i] for i, name in enumerate(LORA)]
    assert_same(answers, expected)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_or_damaged_file(checkpoint, tmp_path, name):
    path = write_adapter(tmp_path, checkpoint.config) / name
    path.write_bytes(path.read_bytes()[:-20])
    assert name in refusal(checkpoint, tmp_path)
    path.unlink()
    assert refusal(checkpoint, tmp_path) == f"{path} does not exist"


@pytest.mark.parametrize("text", ["[]", '"r"', "{}"])
def test_an_invalid_config(checkpoint, tmp_path, text):
    (write_adapter(tmp_path, checkpoint.config) / "adapter_config.json").write_text(text)
    assert "adapter_config.json" in refusal(checkpoint, tmp_path)


def test_broken_json_and_weights_say_where(checkpoint, tmp_path):
    write_adapter(tmp_path, checkpoint.config)
    (tmp_path / "adapter_config.json").write_text('{\n "r": 4,\n}')
    assert refusal(checkpoint, tmp_path).startswith(
        f"{tmp_path / 'adapter_config.json'} is not valid JSON: line 3, column 1: "
    )
    (tmp_path / "adapter_config.json").write_text(POINTER)
    assert "is a git-lfs pointer, not the file itself" in refusal(checkpoint, tmp_path)
    path = write_adapter(tmp_path, checkpoint.config) / "adapter_model.safetensors"
    weights = load_file(path)
    name = next(iter(weights))
    save_file({**weights, name: weights[name] * torch.nan}, path)
    assert f"{path} holds NaN or infinity in {name}" in refusal(checkpoint, tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 96), "has no place for"),
        ("base_model.model.lm_head.lora_A.weight", (4, 64), "has no place for"),
        ("base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight", (4, 64), "no place"),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
            (64,),
            "it may hold lora_A and lora_B of each layer's down_proj, gate_proj, k_proj, o_proj, "
            "q_proj, up_proj, v_proj",
        ),
        (
            "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight",
            (4, 64),
            "it lacks model.layers.0.self_attn.k_proj.lora_B.weight",
        ),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight",
            (64,),
            "q_proj.lora_B.weight is [64], but [64, 4] by the model",
        ),
    ],
)
def test_weights_that_do_not_fit(checkpoint, tmp_path, name, shape, words):
    path = write_adapter(tmp_path, checkpoint.config, ("q_proj",)) / "adapter_model.safetensors"
    save_file({**load_file(path), name: torch.ones(shape)}, path)
    assert words in refusal(checkpoint, tmp_path)


def test_an_adapter_of_another_model(checkpoint, tmp_path):
    wide = read_model_config(LlamaConfig(**TINY | {"hidden_size": 128}))
    write_adapter(tmp_path, wide, ("q_proj",))
    assert "is [4, 128], but [4, 64] by the model" in refusal(checkpoint, tmp_path)
    assert "(it was made for some/base)" in refusal(checkpoint, tmp_path)


def test_an_adapter_without_weights(checkpoint, tmp_path):
    write_adapter(tmp_path, checkpoint.config, (), target_modules="all-linear")
    assert refusal(checkpoint, tmp_path) == "it holds no weights"
