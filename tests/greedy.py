"""Generation with our engine, and greedy generation with transformers' model."""

from typing import Any

import torch

from tests.helpers import Collector
from tests.prompts import NUM_TOKENS
from tritium.backend.engine.engine import Engine
from tritium.backend.engine.request import EngineRequest
from tritium.backend.runner.model_runner import ModelRunner


class SmallerRunner:
    """The same model and cache, limited to the first blocks."""

    def __init__(self, runner: ModelRunner, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.overlaps = runner.overlaps
        self.launch = runner.launch


def generate(engine: Engine, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    """Run all prompts at once and check the scheduler's integrity after every step."""
    engine.on_outputs = collector = Collector()
    for i, token_ids in enumerate(prompts):
        engine.reserve()
        engine.submit(EngineRequest(i, token_ids, NUM_TOKENS, **sampling))
    in_flight = None
    while len(collector.reasons) < len(prompts):
        in_flight = engine.step(in_flight)
        engine.scheduler.check_integrity()
    collector.raise_error()
    assert engine.stats().num_used_blocks == 0
    return [collector.token_ids(i) for i in range(len(prompts))]


def transformers_output(model: Any, prompt: list[int], guess: list[int]) -> list[int]:
    """The most likely next token, NUM_TOKENS times. A correct guess saves time."""
    output: list[int] = []
    guess = guess[: NUM_TOKENS - 1]
    while len(output) < NUM_TOKENS:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output + guess])).logits[0]
        likeliest = logits[-len(guess) - 1 :].argmax(-1).tolist()
        for token_id, guessed in zip(likeliest, [*guess, None], strict=True):
            output.append(token_id)
            if token_id != guessed:
                break
        guess = []
    return output
