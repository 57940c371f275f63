"""The engine's greedy tokens against transformers' model in float32, with the same weights.

transformers' model receives each prompt with the engine's answer, and must choose the same tokens,
up to rounding. `gap` is the distance of a token's logit from the largest one, in standard
deviations of the logits. The gap of a random token would be about 4.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig

from tritium.backend.config import EngineConfig
from tritium.backend.engine.engine import Engine
from tritium.backend.runner.model_runner import ModelRunner
from tritium.backend.runner.models import read_model_config
from tritium.benchmarks.batches import BLOCK_SIZE
from tritium.benchmarks.engine_runs import Meter, Work, generate, make_engine, random_work
from tritium.benchmarks.models import SMALL, MakeConfig, our_model, transformers_model
from tritium.benchmarks.phases import Case, Setup
from tritium.kernels import KVCache, cpu

EXACT = 1e-3  # bound of the gap in float32
ROUNDED = 0.5  # bound of the gap in bfloat16, or with a quantised cache
NUM_LAYERS = 4  # a few layers suffice, since all of them are alike


def engine_checks(make_config: MakeConfig, setup: Setup) -> Iterator[Case]:
    if setup.small:
        hf_config = make_config(**SMALL)
        work = random_work(range(60, 0, -8), num_output_tokens=8)
    else:
        hf_config = make_config(num_hidden_layers=NUM_LAYERS)
        work = random_work([*range(761, 20, -39), 17, 16, 15, 2, 1], num_output_tokens=32)
    few_blocks = {"max_num_batched_tokens": 32, "kv_cache_memory": small_cache(hf_config, work)}

    exact = Engines(hf_config, torch.float32, setup, work, EXACT)
    yield Case("float32", exact.judge)
    yield Case("float32, without graphs", partial(exact.judge, cuda_graphs=False))
    yield Case("float32, in chunks, with preemption", partial(exact.judge, **few_blocks))
    del exact  # the next weights need the memory

    rounded = Engines(hf_config, setup.dtype, setup, work, ROUNDED)
    name = str(setup.dtype).removeprefix("torch.")
    yield Case(f"{name}, graphs against none", rounded.compare_graphs)
    for cache_dtype in ("auto", "fp8", "int8"):
        run = partial(rounded.judge, kv_cache_dtype=cache_dtype)
        yield Case(f"{name}, KV cache {cache_dtype}", run)
    del rounded
    if setup.on_gpu or cpu.is_available():
        company = Company(hf_config, setup, work)
        yield Case("batch-invariant, alone against together", company.compare)
        yield Case("batch-invariant, times as long", company.cost)


def small_cache(hf_config: PretrainedConfig, work: list[Work]) -> int:
    """Bytes of a float32 KV cache that holds little more than the first sequence.

    The first sequence has the longest prompt; the others get the few blocks that it leaves.
    """
    config = read_model_config(hf_config)
    num_blocks = (len(work[0].prompt) + work[0].num_output_tokens) // BLOCK_SIZE + 2
    sizes = (BLOCK_SIZE, config.num_kv_heads, config.head_dim, torch.float32)
    return num_blocks * config.num_layers * KVCache.block_bytes(*sizes)


def make_config_for(device: torch.device, work: list[Work], **changes: Any) -> EngineConfig:
    """A configuration in which all of the work runs at once."""
    settings = {
        "model": "random",
        "max_num_seqs": len(work),
        "max_num_batched_tokens": 1024,
        "max_model_len": 1024,
        "kv_cache_memory": 2**30 if device.type == "cuda" else 2**24,
    }
    return EngineConfig.model_validate(settings | changes)


class Company:
    """Two engines with the same weights in bfloat16, one of them batch-invariant."""

    def __init__(self, hf_config: PretrainedConfig, setup: Setup, work: list[Work]) -> None:
        self._device = setup.device
        self._work = work
        self._engines = {}
        for batch_invariant in (False, True):
            model = our_model(hf_config, torch.bfloat16, setup.device, batch_invariant)
            config = make_config_for(setup.device, work, batch_invariant=batch_invariant)
            self._engines[batch_invariant] = config, ModelRunner(config, model=model)

    def compare(self) -> dict[str, Any]:
        """Check that all tokens are the same with each prompt alone and with all together."""
        engine = make_engine(*self._engines[True])
        together = generate(engine, self._work)
        alone = [generate(engine, [work])[0] for work in self._work]
        different = sum(a != b for a, b in zip(alone, together, strict=True))
        return {"sequences": len(alone), "different": different, "passed": not different}

    def cost(self) -> dict[str, float]:
        """The time of the batch-invariant engine relative to the other.

        Returns:
            `all`: for all of the work; `decode`: for a step that decodes all sequences.
        """
        seconds, step_us = {}, {}
        for batch_invariant, (config, runner) in self._engines.items():
            generate(make_engine(config, runner), self._work)  # warm-up
            meter = Meter(runner, self._device)
            start = time.perf_counter()
            generate(make_engine(config, meter), self._work)
            seconds[batch_invariant] = time.perf_counter() - start
            step_us[batch_invariant] = meter.decode_times(len(self._work))["step_us"]
        return {"all": seconds[True] / seconds[False], "decode": step_us[True] / step_us[False]}


class Engines:
    """Engines with one model, and transformers' model as the reference."""

    def __init__(
        self,
        hf_config: PretrainedConfig,
        dtype: torch.dtype,
        setup: Setup,
        work: list[Work],
        bound: float,
    ) -> None:
        self._model = our_model(hf_config, dtype, setup.device)
        self._oracle = transformers_model(hf_config, dtype, setup.device)
        self._device = setup.device
        self._work = work
        self._bound = bound

    def judge(self, **changes: Any) -> dict[str, Any]:
        """Run the work on an engine with this configuration, and check each token."""
        engine = self._engine(**changes)
        generated = generate(engine, self._work)
        num_equal, gap = 0, 0.0
        for (prompt, *_), tokens in zip(self._work, generated, strict=True):
            logits = self._logits(prompt, tokens)  # [num_output_tokens, vocab_size]
            chosen = torch.tensor(tokens, device=self._device)[:, None]
            below = logits.max(-1).values - logits.gather(-1, chosen).flatten()
            num_equal += int((below == 0).sum())
            gap = max(gap, float((below / logits.std(-1)).max()))
        return {
            "tokens": sum(map(len, generated)),
            "equal": num_equal,
            "gap": gap,
            "preemptions": engine.stats().num_preemptions,
            "passed": gap < self._bound,
        }

    def compare_graphs(self) -> dict[str, Any]:
        """Check that all tokens are the same with and without CUDA graphs.

        All prompts fit in the first step, and there is a graph for this number of sequences. So no
        batch is padded, and both runs launch the same kernels.
        """
        one_step = {"max_num_batched_tokens": sum(len(work.prompt) for work in self._work)}
        with_graphs = generate(self._engine(**one_step), self._work)
        without = generate(self._engine(cuda_graphs=False, **one_step), self._work)
        different = sum(a != b for a, b in zip(with_graphs, without, strict=True))
        return {"sequences": len(self._work), "different": different, "passed": not different}

    def _engine(self, **changes: Any) -> Engine:
        config = make_config_for(self._device, self._work, **changes)
        return make_engine(config, ModelRunner(config, model=self._model))

    @torch.inference_mode()
    def _logits(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """The reference logits of each output token: [num_output_tokens, vocab_size]."""
        input_ids = torch.tensor([prompt + tokens[:-1]], device=self._device)
        return self._oracle(input_ids, logits_to_keep=len(tokens)).logits[0]
