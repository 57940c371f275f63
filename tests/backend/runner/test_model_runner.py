"""The model runner with a small random model: overlapped steps, padded graphs, the KV cache."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from tests.backend.runner.test_models import TINY, make_hf_model
from tests.conftest import SMOLLM2
from tests.helpers import Collector
from tritium import kernels
from tritium.backend.config import ConfigError, EngineConfig, SpeculativeConfig
from tritium.backend.engine.engine import Engine
from tritium.backend.engine.request import EngineRequest
from tritium.backend.engine.sequence import ScheduledSequence, Sequence
from tritium.backend.engine.speculative import NgramProposer
from tritium.backend.engine.usage import DEFAULT_WEIGHTS, Weights
from tritium.backend.runner import calibration
from tritium.backend.runner.calibration import MeasuredStep
from tritium.backend.runner.cuda_graphs import DecodeGraphs, batch_sizes
from tritium.backend.runner.model_runner import ModelRunner
from tritium.backend.runner.models import DecoderModel, read_model_config
from tritium.kernels import cpu

pytestmark = pytest.mark.slow

PROMPTS = [[5], [1, 2, 3], list(range(40)), [7, 7, 7, 7, 7], [9] * 17, [3, 1, 4, 1, 5, 9, 2, 6]]


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    hf_model = make_hf_model(LlamaConfig(**TINY))
    config = read_model_config(hf_model.config)
    weights = [(name, weight.detach()) for name, weight in hf_model.named_parameters()]
    return DecoderModel(config, weights, torch.float32, torch.device("cpu"))


def make_config(**changes) -> EngineConfig:
    values = dict(model="none", max_num_seqs=8, max_num_batched_tokens=24, kv_cache_memory="1MiB")
    return EngineConfig(**{**values, **changes})


def test_tables_of_positions_are_as_long_as_the_longest_sequence() -> None:
    """Not as long as the model's positions, which may be millions."""
    hf_model = make_hf_model(LlamaConfig(**TINY | {"max_position_embeddings": 10_000_000}))
    config = read_model_config(hf_model.config)
    weights = [(name, weight.detach()) for name, weight in hf_model.named_parameters()]
    model = DecoderModel(config, weights, torch.float32, torch.device("cpu"))
    runner = ModelRunner(make_config(kv_cache_memory="16MiB"), model=model)
    held = runner.num_blocks * runner.block_size
    assert model.cos.shape == model.sin.shape == (1, held, 8)
    assert held < 100_000
    runner = ModelRunner(make_config(kv_cache_memory="16MiB", max_model_len=2000), model=model)
    assert model.cos.shape[1] == runner.num_positions == 2000


def generate(config: EngineConfig, runner: ModelRunner, **sampling) -> list[list[int]]:
    """Each prompt's answer; the lengths differ."""
    collector = Collector()
    engine = Engine(config, runner, collector)
    for i, prompt in enumerate(PROMPTS):
        engine.reserve()
        engine.submit(EngineRequest(i, prompt, max_tokens=6 + 3 * i, seed=i, **sampling))
    in_flight = None
    while len(collector.reasons) < len(PROMPTS):
        in_flight = engine.step(in_flight)
        engine.scheduler.check_integrity()
    collector.raise_error()
    assert not engine.stats().num_used_blocks
    return [collector.token_ids(i) for i in range(len(PROMPTS))]


def small_pool(runner: ModelRunner) -> int:
    """Bytes of a pool that causes preemptions: all PROMPTS and answers need 14 blocks."""
    return 6 * runner.block_bytes


SAMPLING = pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.9, "top_k": 5, "top_p": 0.9},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3},
    ],
    ids=["greedy", "random", "filtered", "penalties"],
)


@SAMPLING
@pytest.mark.parametrize("roomy", [True, False], ids=["roomy", "preempted"])
def test_overlapped_steps_give_the_same_tokens(model, roomy, sampling):
    runner = ModelRunner(make_config(), model=model)
    expected = generate(make_config(), runner, **sampling)
    assert [len(tokens) for tokens in expected] == [6, 9, 12, 15, 18, 21]
    assert len(set(map(tuple, expected))) == len(PROMPTS)
    config = make_config() if roomy else make_config(kv_cache_memory=small_pool(runner))
    runner = ModelRunner(config, model=model)
    runner.overlaps = True
    assert generate(config, runner, **sampling) == expected


@SAMPLING
@pytest.mark.parametrize("roomy", [True, False], ids=["roomy", "preempted"])
def test_drafts_give_the_same_tokens(model, roomy, sampling, monkeypatch):
    """Right and wrong drafts, from a proposer that knows the answers."""
    runner = ModelRunner(make_config(), model=model)
    expected = generate(make_config(), runner, **sampling)

    def propose(self, token_ids: list[int], limit: int) -> list[int]:
        texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
        [text] = [text for text in texts if text[: len(token_ids)] == token_ids]
        draft = text[len(token_ids) :][: max(min(limit, 4), 0)]
        return draft if len(token_ids) % 2 else [*draft[:-1], *(0 for _ in draft[-1:])]

    monkeypatch.setattr(NgramProposer, "propose", propose)
    changes = {} if roomy else {"kv_cache_memory": small_pool(runner)}
    config = make_config(
        speculative_config=SpeculativeConfig(),
        max_num_batched_tokens=44,  # steps with drafts and prompts, too
        **changes,
    )
    runner = ModelRunner(config, model=model)
    assert generate(config, runner, speculative=True, **sampling) == expected


@SAMPLING
@pytest.mark.parametrize("overlaps", [False, True])
def test_steps_without_memory_give_the_same_tokens(model, overlaps, sampling, monkeypatch):
    """With overlapping steps, the second attempt still finds the previous step's tokens."""
    runner = ModelRunner(make_config(), model=model)
    runner.overlaps = overlaps
    expected = generate(make_config(), runner, **sampling)
    forward, num_refused = DecoderModel.forward, 0

    def cramped(model, input_ids, *args):
        nonlocal num_refused
        if len(input_ids) > 5:
            num_refused += 1
            torch.empty(1 << 46)
        return forward(model, input_ids, *args)

    monkeypatch.setattr(DecoderModel, "forward", cramped)
    assert generate(make_config(), runner, **sampling) == expected
    assert num_refused


def test_other_errors_of_a_step_are_not_out_of_memory(model, monkeypatch):
    runner = ModelRunner(make_config(), model=model)
    monkeypatch.setattr(DecoderModel, "forward", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        generate(make_config(), runner)


class FakeGraphs(DecodeGraphs):
    """Replays by a new forward pass with the addresses of the capture, like a CUDA graph."""

    def _capture(self, size: int) -> tuple[Callable[[], None], Tensor]:
        hidden = self._forward(size)
        self.replayed: list[int] = []

        def replay() -> None:
            self.replayed.append(size)
            hidden.copy_(self._forward(size))

        return replay, hidden


@SAMPLING
def test_padded_graphs_give_the_same_tokens(model, sampling):
    config = make_config()
    runner = ModelRunner(config, model=model)
    expected = generate(config, runner, **sampling)
    num_slots = runner.num_blocks * runner.block_size
    with torch.inference_mode():
        runner._graphs = FakeGraphs(model, runner.kv_caches, 16, config.max_num_seqs, num_slots)
    runner.overlaps = True
    assert generate(config, runner, **sampling) == expected
    assert set(runner._graphs.replayed) == {1, 2, 4, 8}


def test_graph_sizes():
    assert batch_sizes(1) == [1]
    assert batch_sizes(7) == [1, 2, 4, 7]
    assert batch_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert batch_sizes(256)[-6:] == [120, 128, 160, 192, 224, 256]


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_quantised_cache_is_smaller_and_gives_similar_answers(model, dtype):
    config = make_config(kv_cache_dtype=dtype)
    full, runner = ModelRunner(make_config(), model=model), ModelRunner(config, model=model)
    assert runner.block_bytes < full.block_bytes / 2
    expected, answers = generate(make_config(), full), generate(config, runner)
    assert sum(a[0] == b[0] for a, b in zip(answers, expected, strict=True)) >= 5


@pytest.mark.skipif(not cpu.is_available(), reason="needs AVX2 and a compiler")
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_rounded_weights_give_similar_answers(quantization, tokenizer):
    """The real model, in bfloat16."""
    config = make_config(model=SMOLLM2, dtype="bfloat16", quantization=quantization)
    collector = Collector()
    engine = Engine(config, ModelRunner(config), collector)
    engine.reserve()
    prompt = tokenizer.encode("The capital of France is the city of")
    engine.submit(EngineRequest(0, prompt, max_tokens=1, num_logprobs=0))
    in_flight = None
    while not collector.reasons:
        in_flight = engine.step(in_flight)
    [token] = collector.outputs[0].tokens
    assert tokenizer.decode_token(token.token_id) == " Paris"
    assert token.logprobs.logprob > -0.1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rounded_weights_are_refused_where_they_are_not_supported(dtype):
    config = make_config(model=SMOLLM2, dtype=dtype, device="cpu", quantization="int8")
    with pytest.raises(ConfigError, match=f"'quantization' can't be 'int8'.*not {dtype} on cpu"):
        ModelRunner(config)


def test_batch_invariance_is_refused_where_pytorch_computes(model):
    with pytest.raises(ConfigError, match=r"'batch_invariant': .*bfloat16 \(here float32\), AVX2"):
        ModelRunner(make_config(batch_invariant=True), model=model)


def test_the_model_passes_batch_invariant_to_each_operation(model, monkeypatch):
    """On a CPU the argument has no effect; this tests that it is passed."""
    asked = []

    def record(name: str) -> None:
        function = getattr(kernels, name)

        def recorded(*args, **options):
            asked.append((name, options["batch_invariant"]))
            return function(*args, **options)

        monkeypatch.setattr(kernels, name, recorded)

    record("linear")
    record("attention")
    hf_model = make_hf_model(LlamaConfig(**TINY))
    weights = [(name, weight.detach()) for name, weight in hf_model.named_parameters()]
    device = torch.device("cpu")
    for batch_invariant in (False, True):
        model = DecoderModel(model.config, weights, torch.float32, device, batch_invariant)
        asked.clear()
        ModelRunner(make_config(max_num_batched_tokens=8), model=model)
        one_step = [("linear", batch_invariant), ("attention", batch_invariant)]
        assert set(asked) == set(one_step)
        # Per step: four products per layer and the logits; one attention per layer.
        assert len(asked) % (4 * 2 + 1 + 2) == 0


def test_a_pool_without_a_block_is_refused(model):
    with pytest.raises(ConfigError, match="'kv_cache_memory': 100 bytes hold no block"):
        ModelRunner(make_config(kv_cache_memory=100), model=model)


def test_share_of_the_free_memory(model, monkeypatch):
    monkeypatch.setattr(
        "tritium.backend.runner.model_runner._free_memory", lambda device: 1_000_000
    )
    config = make_config(kv_cache_memory=None)
    runner = ModelRunner(config, model=model)
    assert runner.num_blocks == 500_000 // runner.block_bytes
    runner = ModelRunner(config.model_copy(update={"kv_cache_memory_fraction": 0.8}), model=model)
    assert runner.num_blocks == 800_000 // runner.block_bytes


@torch.inference_mode()
def prompt_logprobs(model: DecoderModel, prompt: list[int]) -> Tensor:
    """[len(prompt) - 1, vocab]: for each prompt token but the first, in one pass."""
    runner = ModelRunner(make_config(max_num_batched_tokens=64), model=model)
    sequence = Sequence(EngineRequest(0, prompt, 1))
    sequence.block_table = list(range(-(-len(prompt) // 16)))
    input_ids, positions, metadata = runner._tensors([ScheduledSequence.of(sequence, len(prompt))])
    hidden = model.forward(input_ids, positions, runner.kv_caches, metadata)
    return model.compute_logits(hidden[:-1]).log_softmax(dim=-1)


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("overlaps", [False, True])
def test_prompt_logprobs(model, overlaps, prompt):
    """Also for a prompt in chunks, in a batch with others, and with its prefix in the cache."""
    config = make_config(prefix_cache="on")
    runner = ModelRunner(config, model=model)
    runner.overlaps = overlaps
    collector = Collector()
    engine = Engine(config, runner, collector)
    for i in range(3):
        engine.reserve()
        wanted = 2 if i else None
        engine.submit(EngineRequest(i, prompt, max_tokens=3, num_prompt_logprobs=wanted))
    in_flight = None
    while len(collector.reasons) < 3:
        in_flight = engine.step(in_flight)
    expected = prompt_logprobs(model, prompt)
    for output in collector.outputs:
        if output.request_id == 0:
            assert output.prompt_logprobs == []
            continue
        assert [token for token, _ in output.prompt_logprobs] == prompt[1:]
        for row, (token, logprobs) in zip(expected, output.prompt_logprobs, strict=True):
            assert logprobs.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert logprobs.rank == int((row > row[token]).sum()) + 1
            assert [i for i, _ in logprobs.top] == row.topk(2).indices.tolist()


def test_weights_are_measured_on_the_model(model, monkeypatch):
    config = make_config(max_num_batched_tokens=128)
    runner = ModelRunner(config, model=model)
    expected = generate(config, runner)
    seen: list[MeasuredStep] = []

    def fit(steps):
        seen.extend(steps)
        return Weights(3, 2, 1)

    monkeypatch.setattr(calibration, "fit", fit)
    assert calibration.measure_weights(runner, 8, 128) == (3, 2, 1)
    positions = min(runner.num_blocks * runner.block_size, TINY["max_position_embeddings"])
    assert seen
    assert all(step.duration > 0 for step in seen)
    assert MeasuredStep(8, 8, 8, seen[1].duration) == seen[1]
    assert max(step.num_tokens for step in seen) <= min(128, positions)
    assert generate(config, runner) == expected  # the measurement's blocks are not reused

    monkeypatch.setattr(calibration, "fit", lambda steps: None)
    assert calibration.measure_weights(runner, 8, 128) == DEFAULT_WEIGHTS
