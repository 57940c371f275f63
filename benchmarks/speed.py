"""Speed of the attention kernels alone, and of whole models against their roofline."""

import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from tritium import kernels
from tritium.backend.config import EngineConfig
from tritium.backend.runner.model_runner import ModelRunner
from tritium.benchmarks.batches import BLOCK_SIZE, Heads, metadata_of
from tritium.benchmarks.engine_runs import (
    Meter,
    generate,
    make_engine,
    nano_vllm_work,
    random_work,
    steps,
)
from tritium.benchmarks.models import SMALL, MakeConfig, our_model
from tritium.benchmarks.phases import Case, Setup
from tritium.benchmarks.roofline import Machine, Step, memory_seconds, step_seconds
from tritium.benchmarks.timing import copy_bandwidth, matmul_rate, seconds_per_call
from tritium.kernels import KVCache

LLAMA_HEADS = Heads(32, 8, 128)
# Least bytes read by calls that are timed together: several times Hopper's L2 of 50 to 60 MB.
PAST_CACHES = 2**28
CONTEXT = 1024  # tokens per sequence, for whole models
DECODE_GOALS = {1: {"of_memory": 0.8}, 256: {"of_memory": 0.7, "gpu_busy": 0.95}}


def measured_machine(setup: Setup) -> Machine:
    return Machine("measured", copy_bandwidth(setup.device), matmul_rate(setup.device))


def ceilings(setup: Setup) -> Iterator[Case]:
    yield Case("copy and matrix product", lambda: measured_machine(setup)._asdict())


# -- attention alone --


def decode_attention_speed(setup: Setup) -> Iterator[Case]:
    """Bytes per second of keys and values in decode attention, against those of a copy."""
    bandwidth = copy_bandwidth(setup.device)
    auto = setup.dtype
    fp8, int8 = torch.float8_e4m3fn, torch.int8
    if setup.small:
        sizes = [(2, 64, auto), (2, 64, int8)]
    else:
        sizes = [(b, c, auto) for c in (1024, 4096, 16384) for b in (1, 8, 64, 256)]
        sizes += [(32, 4096, auto)]
        sizes += [(b, 4096, dtype) for dtype in (fp8, int8) for b in (32, 256)]
    for batch, context, dtype in sizes:
        kind = str(dtype).removeprefix("torch.")
        run = partial(time_decode_attention, setup, batch, context, dtype, bandwidth)
        goals = {"of_copy": 0.85} if dtype == auto and batch >= 32 and context >= 4096 else {}
        yield Case(f"{batch} x {context}, {kind}", run, goals)


def time_decode_attention(
    setup: Setup, batch: int, context: int, cache_dtype: torch.dtype, bandwidth: float
) -> dict[str, Any]:
    num_blocks = batch * context // BLOCK_SIZE
    num_bytes = num_blocks * KVCache.block_bytes(BLOCK_SIZE, *LLAMA_HEADS[1:], cache_dtype)
    # Several layers, each with its part of one large cache.
    num_layers = 1 if setup.small else min(-(-PAST_CACHES // num_bytes), 64)
    kv_cache = random_cache(setup, num_layers * num_blocks, cache_dtype)
    tables = torch.randperm(num_layers * num_blocks).view(num_layers, batch, -1)
    q = torch.randn(batch, *LLAMA_HEADS[::2], device=setup.device).to(setup.dtype)
    lengths = [(1, context)] * batch
    scale = LLAMA_HEADS.head_dim**-0.5
    calls = [
        partial(kernels.attention, q, kv_cache, metadata_of(lengths, t, setup.device), scale)
        for t in tables
    ]
    seconds = seconds_per_call(calls, setup.device)
    rate = num_bytes / seconds
    return {"us": seconds * 1e6, "tb_per_s": rate / 1e12, "of_copy": rate / bandwidth}


def random_cache(setup: Setup, num_blocks: int, dtype: torch.dtype) -> KVCache:
    kv_cache = KVCache.empty(num_blocks, BLOCK_SIZE, *LLAMA_HEADS[1:], dtype, setup.device)
    for part in kv_cache.data.split(4096, dim=1):  # a float32 copy of everything would be too large
        numbers = torch.randn(part.shape, device=setup.device)
        part.copy_(numbers if kv_cache.scales is None else (numbers * 32).clamp_(-127, 127))
    if kv_cache.scales is not None:
        kv_cache.scales.fill_(1 / 32)
    return kv_cache


def prefill_attention_speed(setup: Setup) -> Iterator[Case]:
    """FLOP/s of one prompt, against torch's attention on contiguous keys and values."""
    for length in (64,) if setup.small else (2048, 8192, 32768):
        goals = {"of_flash": 1.0} if length == 8192 else {}
        yield Case(f"{length} tokens", partial(time_prefill_attention, setup, length), goals)


def time_prefill_attention(setup: Setup, length: int) -> dict[str, Any]:
    num_heads, num_kv_heads, head_dim = LLAMA_HEADS
    flops = 4 * (length * (length + 1) // 2) * num_heads * head_dim
    kv_cache = random_cache(setup, length // BLOCK_SIZE, setup.dtype)
    metadata = metadata_of(
        [(length, length)], torch.randperm(length // BLOCK_SIZE)[None], setup.device
    )
    q = torch.randn(length, num_heads, head_dim, device=setup.device).to(setup.dtype)
    scale = head_dim**-0.5

    def ours() -> Tensor:
        return kernels.attention(q, kv_cache, metadata, scale)

    result: dict[str, Any] = {"tflops": flops / seconds_per_call([ours], setup.device) / 1e12}
    rows = q.transpose(0, 1)[None].contiguous()  # [1, num_heads, length, head_dim]
    k, v = (
        cached.view(1, length, num_kv_heads, head_dim).transpose(1, 2).contiguous()
        for cached in kv_cache.data
    )
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def theirs(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    rows, k, v, is_causal=True, scale=scale, enable_gqa=True
                )

        name = backend.name.partition("_")[0].lower()
        try:
            result[name] = flops / seconds_per_call([theirs], setup.device) / 1e12
        except RuntimeError as error:  # not every build of torch has every backend
            result[name] = str(error)
    if isinstance(result["flash"], float):
        result["of_flash"] = result["tflops"] / result["flash"]
    return result


# -- whole models --


def model_speed(make_config: MakeConfig, setup: Setup) -> Iterator[Case]:
    hf_config = make_config(**SMALL) if setup.small else make_config()
    batches, context = ((1, 4), 32) if setup.small else ((1, 32, 256), CONTEXT)
    settings: dict[str, Any] = {"model": "random", "max_num_seqs": batches[-1]}
    if setup.small:
        settings |= {"max_num_batched_tokens": 256, "kv_cache_memory": "16MiB"}
    else:
        settings |= {"max_num_batched_tokens": 8192, "max_model_len": 4096}
    config = EngineConfig.model_validate(settings)
    machine = measured_machine(setup)  # before the runner allocates the KV cache
    model = our_model(hf_config, setup.dtype, setup.device)
    start = time.perf_counter()
    runner = ModelRunner(config, model=model)
    started = {"seconds": time.perf_counter() - start, "kv_tokens": runner.num_blocks * BLOCK_SIZE}
    yield Case("start", lambda: started)
    bench = _ModelBench(setup, config, runner, machine)
    for batch in reversed(batches):
        run = partial(bench.decode, batch, context)
        yield Case(f"decode, batch {batch}", run, DECODE_GOALS.get(batch, {}))
    yield Case("nano-vllm's workload", bench.nano_vllm)
    for batch in batches:
        if setup.on_gpu:
            yield Case(f"by kernel, batch {batch}", partial(bench.by_kernel, batch, context))


class _ModelBench:
    def __init__(
        self, setup: Setup, config: EngineConfig, runner: ModelRunner, machine: Machine
    ) -> None:
        self._setup = setup
        self._config = config
        self._runner = runner
        self._machine = machine

    def decode(self, batch: int, context: int) -> dict[str, Any]:
        """Steps that decode `batch` sequences of about `context` tokens."""
        meter = Meter(self._runner, self._setup.device)
        generate(make_engine(self._config, meter), self._work(batch, context))
        result: dict[str, Any] = meter.decode_times(batch)
        step = Step(batch, 1, round(result["context"]))
        model = self._runner.model.config
        seconds = result["step_us"] / 1e6
        result["roofline_us"] = step_seconds(model, step, self._machine) * 1e6
        result["of_roofline"] = step_seconds(model, step, self._machine) / seconds
        result["of_memory"] = memory_seconds(model, step, self._machine) / seconds
        return result

    def by_kernel(self, batch: int, context: int) -> dict[str, Any]:
        """Microseconds of a decode step by kernel, longest first."""
        num_steps = 8
        engine = make_engine(self._config, self._runner)
        running = steps(engine, self._work(batch, context))
        num_full = 0
        for outputs in running:  # until all sequences decode
            num_full += len(outputs) == batch
            if num_full == 4:
                break
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(num_steps):
                next(running)
            torch.cuda.synchronize()
        times: dict[str, float] = defaultdict(float)
        for event in profiled.key_averages():
            times[event.key[:60]] += event.self_device_time_total / num_steps
        longest = sorted(times.items(), key=lambda item: -item[1])
        return {name: microseconds for name, microseconds in longest[:16] if microseconds}

    def nano_vllm(self) -> dict[str, Any]:
        work = nano_vllm_work(4, 128) if self._setup.small else nano_vllm_work()
        start = time.perf_counter()
        generated = generate(make_engine(self._config, self._runner), work)
        seconds = time.perf_counter() - start
        num_tokens = sum(map(len, generated))
        return {"tokens": num_tokens, "seconds": seconds, "tokens_per_s": num_tokens / seconds}

    def _work(self, batch: int, context: int) -> Any:
        """Prompts whose sequences have about `context` tokens when all of them decode.

        A sequence that was prefilled early decodes while the others are prefilled, at one token
        budget per step.
        """
        num_prefills = -(-batch * context // self._config.max_num_batched_tokens)
        num_measured = 8 if self._setup.small else 64
        num_output_tokens = num_prefills + num_measured
        prompt_len = max(context - num_output_tokens // 2, 1)
        return random_work([prompt_len] * batch, num_output_tokens)
