"""vLLM's CPU build, in process: its LLM class, stepped from here.

It uses both cores, like Tritium. It reuses prefixes by default; its prefix cache is reset before
each cell.
"""

from collections.abc import Iterator
from typing import Any

import vllm
from closed_loop import Request, Run, serve, stepwise
from vllm.sampling_params import RequestOutputKind


def start(settings: dict[str, Any]) -> tuple[str, Run]:
    llm = vllm.LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=True,
    )
    engine = llm.llm_engine

    def add(i: int, token_ids: list[int], num_tokens: int) -> None:
        params = vllm.SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(str(i), {"prompt_token_ids": token_ids}, params)

    def step() -> Iterator[tuple[int, int, bool]]:
        for output in engine.step():
            request_id = str(output.request_id).partition("-")[0]
            yield int(request_id), len(output.outputs[0].token_ids), output.finished

    def run(requests: list[Request], concurrency: int) -> list[list[float]]:
        llm.reset_prefix_cache()
        return stepwise(requests, concurrency, add, step)

    return vllm.__version__, run


if __name__ == "__main__":
    serve(start)
