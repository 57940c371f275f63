"""`make quality`: the effect of rounded weights on a model's predictions.

The text is this project's documentation, in windows. Perplexity is exp(mean negative log
probability of the next token). Agreement is the share of positions whose most likely next token is
that of float32.
"""

import argparse
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tritium.backend.config import EngineConfig
from tritium.backend.engine.request import EngineRequest, SampledToken
from tritium.backend.front.tokenizer import Tokenizer
from tritium.backend.runner.model_runner import ModelRunner
from tritium.backend.runner.models.loader import resolve
from tritium.benchmarks.engine_runs import make_engine, stepping
from tritium.benchmarks.models import SMOLLM2

WINDOW = 512  # tokens per window


class Kind(NamedTuple):
    dtype: str
    quantization: str = "none"


KINDS = (Kind("float32"), Kind("bfloat16"), Kind("bfloat16", "int8"), Kind("bfloat16", "int4"))


def windows() -> Iterator[list[int]]:
    tokenizer = Tokenizer(resolve(SMOLLM2))
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(Path("docs").glob("*.md")))
    token_ids = tokenizer.encode(text)
    for start in range(0, len(token_ids) - WINDOW + 1, WINDOW):
        yield token_ids[start : start + WINDOW]


def score(kind: Kind, prompts: list[list[int]]) -> list[SampledToken]:
    """Score all tokens but the first of each window, with the most likely token at each."""
    settings: dict[str, Any] = {**kind._asdict(), "kv_cache_memory": 2**28}
    config = EngineConfig(model=SMOLLM2, **settings)
    engine = make_engine(config, ModelRunner(config))
    scored: list[SampledToken] = []
    for i, prompt in enumerate(prompts):
        engine.reserve()
        engine.submit(EngineRequest(i, prompt, max_tokens=1, num_prompt_logprobs=1))
        [output] = next(filter(None, stepping(engine)))
        scored += output.prompt_logprobs
    return scored


def perplexity(scored: list[SampledToken]) -> float:
    logprobs = [token.logprobs.logprob for token in scored if token.logprobs]
    return math.exp(-sum(logprobs) / len(logprobs))


def likeliest(scored: list[SampledToken]) -> list[int]:
    return [token.logprobs.top[0][0] for token in scored if token.logprobs]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium benchmark quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    prompts = list(windows())
    table = Table(title=f"{len(prompts)} windows of {WINDOW} tokens")
    for name in ("weights", "perplexity", "agreement with float32"):
        table.add_column(name, justify="right")
    with ThreadPoolExecutor(1) as thread:
        runs = [thread.submit(score, kind, prompts).result() for kind in KINDS]
    exact = likeliest(runs[0])
    for kind, scored in zip(KINDS, runs, strict=True):
        same = sum(a == b for a, b in zip(likeliest(scored), exact, strict=True)) / len(exact)
        name = kind.dtype if kind.quantization == "none" else kind.quantization
        table.add_row(name, f"{perplexity(scored):.3f}", f"{same:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
