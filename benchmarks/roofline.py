"""The least cost of a step: the bytes that it must move and its arithmetic, by operation.

    tritium benchmark roofline            # Markdown, for one H200

An operation takes the longer of two times: bytes divided by the measured copy bandwidth, and FLOPs
divided by the measured rate of a large matrix product. The next operation starts when it ends.
Launches cost nothing, each input is read once and each output is written once. No step can be
faster, except for activations that stay in the L2 cache. Measurements are compared with this
prediction.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tritium.backend.runner.models import ModelConfig, read_model_config
from tritium.benchmarks.models import MODELS

BYTES = 2  # bytes per number: bfloat16 weights, activations and KV cache
LOGIT_BYTES = 4  # float32

DECODE_BATCHES = (1, 32, 256)
PREFILL_LENGTHS = (2048, 8192)


class Machine(NamedTuple):
    """Measured speeds of a GPU."""

    name: str
    bytes_per_second: float  # a large copy, bytes read and bytes written together
    flops_per_second: float  # a large matrix product in bfloat16


H200 = Machine("H200", 4.3e12, 790e12)


class Operation(NamedTuple):
    """One kind of operation, summed over all layers."""

    name: str
    num_bytes: float
    flops: float

    def seconds(self, machine: Machine) -> float:
        return max(self.num_bytes / machine.bytes_per_second, self.flops / machine.flops_per_second)


class Step(NamedTuple):
    """A step over `batch` sequences of the same length; each samples one token."""

    batch: int
    query_len: int  # new tokens per sequence; 1 in decode
    seq_len: int  # tokens per sequence, new ones included

    @property
    def num_tokens(self) -> int:
        return self.batch * self.query_len

    @property
    def num_scores(self) -> int:
        """Pairs of a query and a key that it attends to."""
        context_len = self.seq_len - self.query_len
        causal = self.query_len * (self.query_len + 1) // 2
        return self.batch * (self.query_len * context_len + causal)


def operations(config: ModelConfig, step: Step) -> list[Operation]:
    """A step's operations, in the order in which they run."""
    n, hidden, intermediate = step.num_tokens, config.hidden_size, config.intermediate_size
    layers = config.num_layers
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    qkv_size = q_size + 2 * kv_size

    def matmul(name: str, in_size: int, out_size: int) -> Operation:
        numbers = in_size * out_size + n * (in_size + out_size)
        return Operation(name, layers * numbers * BYTES, layers * 2 * n * in_size * out_size)

    attention = Operation(
        "attention",
        layers * (step.batch * step.seq_len * 2 * kv_size + n * 2 * q_size) * BYTES,
        layers * 4 * step.num_scores * q_size,  # q k^T and p v
    )
    lm_head = Operation(
        "lm head",
        (config.vocab_size + step.batch) * hidden * BYTES
        + step.batch * config.vocab_size * LOGIT_BYTES,
        2 * step.batch * hidden * config.vocab_size,
    )
    # Two norms per layer, each with the addition to the residual stream: two rows in, two out.
    # The embedding and its norm before the first layer move as much again.
    norms = (2 * layers + 1) * n * 4 * hidden
    rope = layers * n * 2 * qkv_size  # read, and written to the queries and the cache
    activation = layers * n * 3 * intermediate
    return [
        matmul("qkv", hidden, qkv_size),
        attention,
        matmul("o", q_size, hidden),
        matmul("gate-up", hidden, 2 * intermediate),
        matmul("down", intermediate, hidden),
        lm_head,
        Operation("norms, rope, activation", (norms + rope + activation) * BYTES, 0),
        Operation("sampling", step.batch * config.vocab_size * LOGIT_BYTES, 0),
    ]


def step_seconds(config: ModelConfig, step: Step, machine: Machine) -> float:
    """The least time of the step, as the sum over operations."""
    return sum(operation.seconds(machine) for operation in operations(config, step))


def memory_seconds(config: ModelConfig, step: Step, machine: Machine) -> float:
    """The simpler bound that is often used: weights and KV cache, read once."""
    return (weight_bytes(config) + kv_bytes(config, step)) / machine.bytes_per_second


def weight_bytes(config: ModelConfig) -> int:
    """Bytes that every step reads: all matrices except the embedding."""
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * q_size + 2 * kv_size + 3 * config.intermediate_size)
    return (config.num_layers * layer + config.vocab_size * config.hidden_size) * BYTES


def kv_bytes(config: ModelConfig, step: Step) -> int:
    """Bytes of the keys and values that the step reads."""
    tokens = step.batch * step.seq_len
    return config.num_layers * tokens * 2 * config.num_kv_heads * config.head_dim * BYTES


# -- Markdown --


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with the first column aligned left, the others right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def steps_table(config: ModelConfig, steps: dict[str, Step], machine: Machine) -> str:
    """The operations of each step: MB, GFLOP, microseconds, share of the step."""
    header = ["operation"]
    for name in steps:
        header += [f"{name}: MB", "GFLOP", "µs", "%"]
    columns = [operations(config, step) for step in steps.values()]
    totals = [step_seconds(config, step, machine) for step in steps.values()]
    rows = []
    for same in zip(*columns, strict=True):
        row = [same[0].name]
        for operation, total in zip(same, totals, strict=True):
            seconds = operation.seconds(machine)
            row += [f"{operation.num_bytes / 1e6:,.1f}", f"{operation.flops / 1e9:,.1f}"]
            row += [f"{seconds * 1e6:,.1f}", f"{seconds / total:.1%}".rstrip("%")]
        rows.append(row)
    last = ["**step**"]
    for column, total in zip(columns, totals, strict=True):
        last += [f"{sum(o.num_bytes for o in column) / 1e6:,.1f}"]
        last += [f"{sum(o.flops for o in column) / 1e9:,.1f}", f"**{total * 1e6:,.1f}**", "100"]
    return markdown_table(header, [*rows, last])


def decode_table(config: ModelConfig, steps: dict[str, Step], machine: Machine) -> str:
    """Predictions for whole decode steps."""
    header = ["", "µs per step", "tokens/s", "weights and KV alone: µs", "tokens/s"]
    rows = []
    for name, step in steps.items():
        times = (step_seconds(config, step, machine), memory_seconds(config, step, machine))
        pairs = [(f"{t * 1e6:,.0f}", f"{step.batch / t:,.0f}") for t in times]
        rows.append([name, *pairs[0], *pairs[1]])
    return markdown_table(header, rows)


def report(context: int, machine: Machine) -> Iterator[str]:
    """The paragraphs of the page."""
    yield (
        f"One {machine.name}: {machine.bytes_per_second / 1e12:g} TB/s, "
        f"{machine.flops_per_second / 1e12:g} TFLOP/s in bfloat16."
    )
    for name, hf_config in MODELS.items():
        config = read_model_config(hf_config())
        decode = {f"batch {batch}": Step(batch, 1, context) for batch in DECODE_BATCHES}
        prefill = {f"{length} tokens": Step(1, length, length) for length in PREFILL_LENGTHS}
        yield f"**{name}, decode**, {context} tokens of context per sequence:"
        yield decode_table(config, decode, machine)
        yield steps_table(config, decode, machine)
        yield f"**{name}, prefill** of one prompt in one step:"
        yield steps_table(config, prefill, machine)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tritium benchmark roofline")
    parser.add_argument("--context", type=int, default=1024, help="tokens per sequence")
    print("\n\n".join(report(parser.parse_args(arguments).context, H200)))


if __name__ == "__main__":
    main()
