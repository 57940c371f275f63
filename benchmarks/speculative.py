"""Gain and cost of drafts by prompt lookup: `tritium benchmark speculative`.

The engine runs without a server, in turns with drafts of several lengths and without drafts. One
task copies text from its prompt. The other writes stories, which are sampled to avoid loops. Every
answer is compared with the answer without drafts.
"""

import argparse
import statistics
import time
from typing import NamedTuple

from tritium.backend.config import EngineConfig, SpeculativeConfig
from tritium.backend.engine.request import EngineRequest
from tritium.backend.front.tokenizer import Tokenizer
from tritium.backend.runner.model_runner import ModelRunner
from tritium.backend.runner.models.loader import resolve
from tritium.benchmarks.engine_runs import make_engine, stepping
from tritium.benchmarks.models import SMOLLM2

PARAGRAPHS = [
    f"The harbour of {town} lies in the {side} of the lake. Its entrance is marked by a lighthouse "
    f"of {year} and the statue of a {beast}, six metres tall. From April to October boats leave "
    f"every hour for the other towns; in winter the harbour is quiet, and only the fishermen go "
    f"out before dawn. In {year + 31} the railway ferry carried {number} wagons at a time across "
    f"the water, which took a little over an hour in fair weather."
    for town, side, year, beast, number in (
        *(("Lindau", "east", 1856, "lion", 8), ("Konstanz", "west", 1863, "horse", 12)),
        *(("Bregenz", "south", 1841, "bear", 5), ("Rorschach", "south", 1839, "swan", 7)),
        *(("Meersburg", "north", 1870, "fox", 6), ("Arbon", "west", 1822, "wolf", 9)),
        *(("Romanshorn", "west", 1855, "stag", 14), ("Bottighofen", "north", 1848, "owl", 3)),
    )
]
COPYING = [f"{text}\n\n{text}\n\n" for text in PARAGRAPHS]
STORIES = [
    f"Here is the story of {subject}.\n\n"
    for subject in (
        *("a fox who could read", "the last train", "two sisters and a boat", "a broken clock"),
        *("the night market", "an honest thief", "a winter in the hills", "the deaf musician"),
    )
]
NUM_TOKENS = 96


class Run(NamedTuple):
    tokens_per_s: float
    num_draft_tokens: int
    num_accepted_tokens: int
    answers: list[list[int]]


def run(
    config: EngineConfig, runner: ModelRunner, prompts: list[list[int]], temperature: float
) -> Run:
    """Run all prompts at once; the rate counts from the first token on."""
    engine = make_engine(config, runner)
    for i, prompt in enumerate(prompts):
        engine.reserve()
        engine.submit(
            EngineRequest(i, prompt, NUM_TOKENS, temperature=temperature, seed=i, speculative=True)
        )
    answers: list[list[int]] = [[] for _ in prompts]
    start = 0.0
    for outputs in stepping(engine):
        for output in outputs:
            answers[output.request_id] += [token.token_id for token in output.tokens]
        if not start and all(answers):  # until the prompts are computed
            start, at_start = time.perf_counter(), sum(map(len, answers))
        if min(map(len, answers)) == NUM_TOKENS:
            break
    seconds = time.perf_counter() - start
    stats = engine.stats()
    rate = (len(prompts) * NUM_TOKENS - at_start) / seconds
    return Run(rate, stats.num_draft_tokens, stats.num_accepted_tokens, answers)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium benchmark speculative",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", default="auto", help="dtype of the model; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[4, 8, 15],
        help="numbers of draft tokens; default: %(default)s",
    )
    parser.add_argument(
        "--requests",
        type=int,
        nargs="+",
        default=[1, 8],
        help="numbers of requests; default: %(default)s",
    )
    options = parser.parse_args(arguments)
    config = EngineConfig.model_validate(
        {
            "model": SMOLLM2,
            "dtype": options.dtype,
            "max_num_seqs": 32,
            "kv_cache_memory": "512MiB",
        }
    )
    runner = ModelRunner(config)
    runner.start()
    tokenizer = Tokenizer(resolve(SMOLLM2))
    drafts = [
        SpeculativeConfig.model_validate({"num_speculative_tokens": n}) for n in options.lengths
    ]
    print("| task | requests | draft tokens | tokens/s | ratio | accepted | equal answers |")
    print("|---|---|---|---|---|---|---|")
    for task, texts, temperature in (("copying", COPYING, 0.0), ("stories", STORIES, 1.0)):
        prompts = [tokenizer.encode(text) for text in texts]
        for num_requests in options.requests:
            by_length: dict[int, list[Run]] = {}
            batch = (prompts * -(-num_requests // len(prompts)))[:num_requests]
            for _ in range(options.repeats):
                for speculative in (None, *drafts):
                    changed = config.model_copy(update={"speculative_config": speculative})
                    length = speculative.num_speculative_tokens if speculative else 0
                    by_length.setdefault(length, []).append(
                        run(changed, runner, batch, temperature)
                    )
            rates = {
                n: statistics.median(r.tokens_per_s for r in runs) for n, runs in by_length.items()
            }
            for length, runs in by_length.items():
                last, plain = runs[-1], by_length[0][0]
                same = sum(a == b for a, b in zip(last.answers, plain.answers, strict=True))
                accepted = last.num_accepted_tokens / max(last.num_draft_tokens, 1)
                print(
                    f"| {task} | {num_requests} | {length or 'none'} | {rates[length]:.1f} "
                    f"| {rates[length] / rates[0]:.2f} "
                    f"| {last.num_accepted_tokens} of {last.num_draft_tokens} ({accepted:.0%}) "
                    f"| {same} of {num_requests} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
