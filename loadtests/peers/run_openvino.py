"""OpenVINO GenAI's ContinuousBatchingPipeline, in process, with its defaults for a CPU."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino
import openvino_genai
from closed_loop import Request, Run, serve, stepwise


def start(settings: dict[str, Any]) -> tuple[str, Run]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 512
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU")
    handles: dict[int, Any] = {}

    def add(i: int, token_ids: list[int], num_tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        input_ids = openvino.Tensor(np.array([token_ids], dtype=np.int64))
        handles[i] = pipeline.add_request(i, input_ids, config)

    def step() -> Iterator[tuple[int, int, bool]]:
        pipeline.step()
        for i, handle in list(handles.items()):
            num_tokens = 0
            while handle.can_read():
                num_tokens += sum(len(out.generated_ids) for out in handle.read().values())
            ended = handle.get_status() == openvino_genai.GenerationStatus.FINISHED
            if ended:
                del handles[i]
            yield i, num_tokens, ended

    def run(requests: list[Request], concurrency: int) -> list[list[float]]:
        return stepwise(requests, concurrency, add, step)

    return openvino_genai.__version__, run


if __name__ == "__main__":
    serve(start)
