"""The engine's configuration: the `parameters` of a model's config.pbtxt, typed and checked."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


_Name = Annotated[str, Field(min_length=1)]
_LineName = Annotated[str, Field(pattern="^[^_]")]  # with _ begin the accounts of the system


class ConfigError(ValueError):
    """A parameter of config.pbtxt is wrong; the message names it."""


def _parse_bytes(value: Any) -> Any:
    """'512MiB', '2 GB' or a plain number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", str(value), re.IGNORECASE)
    if not match:
        raise ValueError("should be a number of bytes such as 1073741824, 512MiB or 2GB")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def _parse_json(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"should be JSON: {error}") from None
    return value


class RepetitionDetection(BaseModel):
    """Whether an answer ends in a loop: a pattern of tokens, `min_count` times on end.

    The fields are those of vLLM's sampling parameter of this name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_pattern_size: int = Field(0, ge=0, le=1024)  # tokens; 0: never
    min_pattern_size: int = Field(1, ge=1)
    min_count: int = Field(2, ge=2)

    @model_validator(mode="after")
    def _check(self) -> "RepetitionDetection":
        if self.min_pattern_size > self.max_pattern_size > 0:
            raise ValueError(
                f"min_pattern_size ({self.min_pattern_size}) should be at most "
                f"max_pattern_size ({self.max_pattern_size})"
            )
        return self


class SpeculativeConfig(BaseModel):
    """Names as in vLLM's `speculative_config`, but for `by_default`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["ngram"] = "ngram"  # prompt lookup
    num_speculative_tokens: int = Field(8, ge=1, le=64)  # in a draft, at most
    prompt_lookup_min: int = Field(3, ge=1, le=16)  # tokens that have to be met again, at least
    prompt_lookup_max: int = Field(5, ge=1, le=16)  # the more are tried first
    disable_by_batch_size: int = Field(32, ge=1)  # no drafts while more sequences run
    by_default: bool = True  # ours: whether for requests that don't say

    @model_validator(mode="after")
    def _check(self) -> "SpeculativeConfig":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) should be at most "
                f"prompt_lookup_max ({self.prompt_lookup_max})"
            )
        return self


class EngineConfig(BaseModel):
    """Everything that config.pbtxt can set, each with a default that protects the server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        description="Hugging Face directory, GGUF file, or package:<Python package>/<file in it>"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: bfloat16 where the device has it, else float32"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: the GPU of the model instance where there is one, else the CPU"
    )
    cpu_threads: int | None = Field(
        None,
        ge=1,
        description="threads of arithmetic on CPU; default: OMP_NUM_THREADS, or all cores",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="tokens of prompt and answer together; default: the model's"
    )
    max_num_seqs: int = Field(64, ge=1, description="requests that run at once")
    max_num_batched_tokens: int = Field(
        512, ge=1, description="tokens that one step computes, prompts and answers together"
    )
    max_output_tokens: int = Field(
        2048, ge=1, description="the server's cap on an answer's tokens, whatever max_tokens says"
    )
    default_max_tokens: int = Field(16, ge=1, description="max_tokens of requests without it")
    max_queue_size: int = Field(
        256,
        ge=0,
        description="requests of a class that may wait beyond those that can run; more are refused",
    )
    max_queue_tokens: int = Field(
        1_000_000,
        ge=1,
        description="while so many prompt tokens of a class wait, its requests are refused",
    )
    max_queue_delay_ms: int = Field(
        60_000,
        ge=1,
        description="how long an interactive request may wait; refused where the queue is slower",
    )
    max_request_seconds: float = Field(
        3600.0, gt=0, description="how long a request may take, waiting and running"
    )
    max_preemptions: int = Field(
        3,
        ge=0,
        description="how often a request may give its KV blocks to others and be recomputed; then "
        "it runs only with all the blocks promised that it can need",
    )
    reserve_blocks_per_seq: int = Field(
        1,
        ge=0,
        description="KV blocks that admission leaves free for each request that runs, so that it "
        "can grow",
    )
    max_bypasses: int = Field(
        16,
        ge=0,
        description="how many may be admitted before one that came first but does not fit into "
        "the KV cache yet",
    )
    ageing_seconds: float = Field(
        30.0,
        ge=0,
        description="after which a request that waits goes before all others, whatever its class "
        "and priority, in an eighth of the places",
    )
    block_size: int = Field(16, ge=1, description="tokens in a block of the KV cache")
    kv_cache_memory: Annotated[int, BeforeValidator(_parse_bytes)] | None = Field(
        None, description="bytes of the KV cache, as 1073741824, 512MiB or 2GB"
    )
    kv_cache_memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="where kv_cache_memory is not set: share of what is free beside weights and "
        "the largest step; default: 0.9 on a GPU, 0.5 on CPU",
    )
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = Field(
        "auto", description="auto: the model's; fp8 (e4m3, GPUs from Ada on) and int8 take half"
    )
    cuda_graphs: bool = Field(
        True, description="whether steps that only decode replay CUDA graphs on a GPU"
    )
    batch_invariant: bool = Field(
        False,
        description="whether an answer is the same to the bit in any company, on a GPU at a cost; "
        "on CPU, in bfloat16 by kernels/cpu/ops.c, it always is",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none",
        description="int8, int4: weights are rounded to so many bits when they are loaded (rows, "
        "groups of 32), and computed in bfloat16; on CPUs with AVX2",
    )
    repetition_detection: Annotated[RepetitionDetection | None, BeforeValidator(_parse_json)] = (
        Field(
            None,
            description="loop guard of requests that name none (nor ignore_eos), as JSON: an "
            "answer ends when a pattern of up to max_pattern_size tokens comes min_count times",
        )
    )
    trim_blanks: bool = Field(
        False, description="whether blanks at the end of an answer are left out"
    )
    lora_modules: Annotated[dict[_Name, _Name], BeforeValidator(_parse_json)] = Field(
        {},
        description="LoRA adapters that requests may name (lora_name), as JSON: "
        '{"<name>": "<directory with PEFT\'s adapter_config.json and adapter_model.safetensors>"}',
    )
    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(_parse_json)] = Field(
        None,
        description="speculative decoding by prompt lookup, as JSON with vLLM's names: "
        '{"method": "ngram", "num_speculative_tokens": 8}; default: none',
    )
    prefix_cache: Literal["auto", "on", "off"] = Field(
        "auto",
        description="reuse of computed prefixes; auto: where enough of the prompts could be reused",
    )
    prefix_cache_scope: Literal["line", "shared"] = Field(
        "line",
        description="whose prompts are measured and reused together: one business line's, or all",
    )
    business_lines: Annotated[list[_LineName], BeforeValidator(_parse_json)] = Field(
        [],
        description='those that metrics tell apart, as JSON: ["search", "ads"]; all others '
        "are counted as 'other'",
    )
    price_per_hour: float | None = Field(
        None, ge=0, description="of the device; where set, a request's usage has its cost"
    )
    ledger_path: Path | None = Field(
        None, description="directory of the ledger's files; default: there is no ledger"
    )
    ledger_rotate_hours: float = Field(
        24.0, gt=0, description="how long a file of the ledger is written to"
    )
    ledger_retention_days: float = Field(
        90.0, gt=0, description="how long a file of the ledger is kept after its last row"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="json: a log line is one JSON object, and each request is one line"
    )
    trace_path: Path | None = Field(
        None, description="file to which lengths, times and block hashes of requests are written"
    )
    trace_max_size: Annotated[int, BeforeValidator(_parse_bytes)] = Field(
        2**30, ge=2**16, description="bytes of that file and of older ones; the oldest go"
    )
    drain_seconds: float = Field(
        10.0, ge=0, description="how long running requests may go on when the model is unloaded"
    )
    exit_on_crash: bool = Field(
        True,
        description="whether Triton Server is ended when this model's process is killed, since it "
        "would leave clients waiting",
    )

    @model_validator(mode="after")
    def _check(self) -> "EngineConfig":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that each running request can move on"
            )
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size ({self.block_size}) must be a power of two")
        if self.batch_invariant and self.lora_modules:
            raise ValueError(
                "batch_invariant can't be true beside lora_modules: what adapters add is computed "
                "by products that depend on the batch"
            )
        return self

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> "EngineConfig":
        """Read the `parameters` map of a model configuration, {name: {"string_value": text}}.

        Names in capitals belong to Triton Server and its Python backend and are left to them.

        Raises:
            ConfigError: names the parameter, its value and what is allowed.
        """
        values = {
            name: value["string_value"].strip()
            for name, value in parameters.items()
            if not name.isupper()
        }
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    details = error.errors()[0]
    reason = details["msg"].removeprefix("Value error, ")
    if not details["loc"]:
        return f"config.pbtxt: {reason}"
    name, *inside = details["loc"]
    if details["type"] == "extra_forbidden" and not inside:
        known = ", ".join(sorted(EngineConfig.model_fields))
        return f"config.pbtxt: unknown parameter '{name}'; known are: {known}"
    if details["type"] == "missing":
        field = EngineConfig.model_fields[str(name)]
        return f"config.pbtxt: parameter '{name}' is missing ({field.description})"
    where = f", as its '{inside[0]}'" if inside else ""
    return f"config.pbtxt: parameter '{name}' can't be {details['input']!r}{where}. {reason}"
