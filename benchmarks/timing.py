"""How long work takes on the device, and how fast the device is at most."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

_REPEATS = 20


def seconds_per_call(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """The median time of one of `calls`, which do the same on data of their own.

    On a GPU they are captured in one CUDA graph, as the engine's steps are, so that the host's
    work is not in the time. Give so many that together they read several times what the L2 cache
    holds: then each finds its data in memory, as in a model, where other layers lie between.
    """
    if device.type == "cpu":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles the kernels, which can't be done while capturing
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / len(calls))
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, those read and those written together."""
    num_bytes = 2**32 if device.type == "cuda" else 2**20
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_per_call([lambda: target.copy_(source)], device)


def matmul_rate(device: torch.device) -> float:
    """FLOP/s of a large matrix product in bfloat16, of random numbers: zeros are faster."""
    size = 8192 if device.type == "cuda" else 128
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / seconds_per_call([lambda: a @ b], device)
