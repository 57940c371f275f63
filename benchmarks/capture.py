"""The cost of capturing a request (`trace_path`), on the front's and on the writer's thread.

    tritium benchmark capture

Both are CPU times of this process, which writes into a temporary folder.
"""

import argparse
import gc
import random
import statistics
import tempfile
import time
from pathlib import Path

from tritium.backend.accounts.trace import Captured, TraceWriter

PROMPT_TOKENS, NUM_REQUESTS, ROUNDS = (16, 256, 1024, 8192), 500, 9


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tritium benchmark capture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    print("prompt tokens | front's thread, us | capture's thread, us, ns per token")
    for length in PROMPT_TOKENS:
        measured = [_measure(length) for _ in range(ROUNDS)]
        front, capture = (statistics.median(column) * 1e6 for column in zip(*measured, strict=True))
        print(f"{length:13} | {front:18.2f} | {capture:.1f}, {capture / length * 1e3:.0f}")


def _measure(length: int) -> tuple[float, float]:
    """CPU seconds per request, on the thread that ends it and on the thread that writes it."""
    prompts = [[random.randrange(49152) for _ in range(length)] for _ in range(NUM_REQUESTS)]
    gc.freeze()  # only this benchmark has so many prompts at once
    with tempfile.TemporaryDirectory() as folder:
        writer = TraceWriter(Path(folder) / "trace.jsonl", 2**30, block_size=16)
        process, thread = time.process_time(), time.thread_time()
        for prompt in prompts:
            writer.add(Captured(time.time(), prompt, [100], b"salt", "search", "interactive"))
        writer.close()
        front = time.thread_time() - thread
        capture = time.process_time() - process - front
    return front / NUM_REQUESTS, capture / NUM_REQUESTS


if __name__ == "__main__":
    main()
