"""The cost of dividing a step's time, on the engine's thread, and its share of a step.

    tritium benchmark bill-cost

Decoding sequences of 1,024 tokens. The cost is compared with two steps: the measured step of
SmolLM2-135M on 2 cores (docs/results.md), and the shortest possible step of an 8B model on an H200
(benchmarks/roofline.py).
"""

import argparse
import statistics
import time

from tritium.backend.engine.request import EngineRequest
from tritium.backend.engine.sequence import ScheduledSequence, Sequence
from tritium.backend.engine.usage import BusyTime
from tritium.backend.runner.models import read_model_config
from tritium.benchmarks.models import LLAMA_3_1_8B
from tritium.benchmarks.roofline import H200, Step, step_seconds

LLAMA = read_model_config(LLAMA_3_1_8B())
CONTEXT, ROUNDS = 1024, 2000


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium benchmark bill-cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    for num_sequences in (1, 32, 256):
        own = _seconds(num_sequences)
        cpu = 0.0156 + 0.00071 * num_sequences
        gpu = step_seconds(LLAMA, Step(num_sequences, 1, CONTEXT), H200)
        print(
            f"{num_sequences:4} sequences: {own * 1e6:6.1f} us; {own / cpu:.3%} of a step on CPU, "
            f"{own / gpu:.2%} of a step on an H200"
        )


def _seconds(num_sequences: int) -> float:
    """Seconds for the bill of one step."""
    busy_time = BusyTime()
    sequences = [
        Sequence(EngineRequest(i, [7] * CONTEXT, max_tokens=8)) for i in range(num_sequences)
    ]
    for sequence in sequences:
        sequence.token_ids.append(7)  # decoding
    batch = [ScheduledSequence(s, CONTEXT, CONTEXT + 1, True) for s in sequences]
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        busy_time.end_step(busy_time.shares(batch))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
