"""Times of work on the device, and the device's peak speeds."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

_REPEATS = 20


def seconds_per_call(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """The median time of one of `calls`, which do the same work on different data.

    On a GPU the calls are captured in one CUDA graph, like the engine's steps, so that the time
    does not include the host's work. Pass enough calls to read several times the size of the L2
    cache: then each call finds its data in memory, as in a model with other layers in between.
    """
    if device.type == "cpu":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles the kernels, which is impossible during capture
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
    """Bytes per second of a large copy, reads plus writes."""
    num_bytes = 2**32 if device.type == "cuda" else 2**20
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_per_call([lambda: target.copy_(source)], device)


def matmul_rate(device: torch.device) -> float:
    """FLOP/s of a large bfloat16 matrix product of random numbers (zeros would be faster)."""
    size = 8192 if device.type == "cuda" else 128
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / seconds_per_call([lambda: a @ b], device)
