"""The engine's configuration: the `parameters` of a model's config.pbtxt, typed and checked."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tritium.backend import hub

_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"  # as Triton Server's Python backend writes it
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


_Name = Annotated[str, Field(min_length=1)]
_LineName = Annotated[str, Field(pattern="^[^_]")]  # names of system accounts begin with _


class ConfigError(ValueError):
    """A parameter of config.pbtxt is invalid; the message names it."""


def _parse_bytes(value: Any) -> Any:
    """Read a number of bytes such as 1073741824, '512MiB' or '2 GB'."""
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
    """Ends an answer in a loop: when a pattern of tokens occurs `min_count` times in succession.

    The fields are those of vLLM's sampling parameter of the same name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_pattern_size: int = Field(0, ge=0, le=1024)  # tokens; 0: off
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
    """Speculative decoding. Names as in vLLM's `speculative_config`, except `by_default`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["ngram"] = "ngram"  # prompt lookup
    num_speculative_tokens: int = Field(8, ge=1, le=64)  # most tokens per draft
    prompt_lookup_min: int = Field(3, ge=1, le=16)  # fewest last tokens that must occur earlier
    prompt_lookup_max: int = Field(5, ge=1, le=16)  # most last tokens; tried first
    disable_by_batch_size: int = Field(32, ge=1)  # no drafts while more sequences run
    by_default: bool = True  # ours: whether requests without `speculative` use drafts

    @model_validator(mode="after")
    def _check(self) -> "SpeculativeConfig":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) should be at most "
                f"prompt_lookup_max ({self.prompt_lookup_max})"
            )
        return self


class EngineConfig(BaseModel):
    """The parameters of config.pbtxt. Their defaults protect the server from overload."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        description="Hugging Face directory, GGUF file, package:<Python package>/<file in it>, or "
        "the name of a model on the Hugging Face Hub, which is downloaded: org/name or "
        "org/name@revision"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="float32, bfloat16 or float16; auto: bfloat16 where the device has it (a CPU "
        "needs AVX2 and a C compiler), else float32",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="cpu or cuda; auto: the GPU of the model instance if there "
        "is one, else the CPU",
    )
    cpu_threads: int | None = Field(
        None,
        ge=1,
        description="threads for arithmetic on CPU; default: OMP_NUM_THREADS, or all cores",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="limit of prompt tokens plus output tokens; default: the model's"
    )
    max_num_seqs: int = Field(64, ge=1, description="sequences that run at the same time")
    max_num_batched_tokens: int = Field(
        512,
        ge=1,
        description="tokens that one step computes: a small budget gives steadier streams, a large "
        "one faster prefill",
    )
    max_output_tokens: int = Field(
        2048,
        ge=1,
        description="limit of an answer's tokens, even if the request's max_tokens is larger",
    )
    default_max_tokens: int = Field(
        16, ge=1, description="max_tokens of requests that do not set it"
    )
    max_queue_size: int = Field(
        256,
        ge=0,
        description="requests per class that may wait beyond the max_num_seqs that can run; further"
        " requests are refused",
    )
    max_queue_tokens: int = Field(
        1_000_000,
        ge=1,
        description="requests of a class are refused while this many of its prompt tokens wait",
    )
    max_queue_delay_ms: int = Field(
        60_000,
        ge=1,
        description="longest time that an interactive request may wait; it is refused at once if "
        "the queue is slower",
    )
    max_request_seconds: float = Field(
        3600.0, gt=0, description="longest time that a request may take, waiting and running"
    )
    max_preemptions: int = Field(
        3,
        ge=0,
        description="how often a request may be preempted and recomputed; after that it runs only "
        "with all the KV blocks reserved that it can need; 0: always",
    )
    reserve_blocks_per_seq: int = Field(
        1,
        ge=0,
        description="KV blocks per running sequence that admission leaves free, so that running "
        "sequences can grow",
    )
    max_bypasses: int = Field(
        16,
        ge=0,
        description="how many later requests may be admitted before one that does not fit into the "
        "KV cache yet",
    )
    ageing_seconds: float = Field(
        30.0,
        ge=0,
        description="waiting time after which a request goes before all others, whatever its class "
        "and priority, in at most an eighth of the slots",
    )
    block_size: int = Field(
        16, ge=1, description="tokens per block of the KV cache; a power of two"
    )
    kv_cache_memory: Annotated[int, BeforeValidator(_parse_bytes)] | None = Field(
        None, description="size of the KV cache: 1073741824, 512MiB or 2GB"
    )
    kv_cache_memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="used if kv_cache_memory is not set: share of the memory left by the weights "
        "and the largest step; default: 0.9 on a GPU, 0.5 on a CPU",
    )
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = Field(
        "auto",
        description="auto: the model's dtype; fp8 (e4m3, GPUs from Ada on) and int8 take half the "
        "memory of 16 bits",
    )
    cuda_graphs: bool = Field(
        True, description="on a GPU, replay CUDA graphs for steps that only decode"
    )
    batch_invariant: bool = Field(
        False,
        description="an answer is identical to the bit whatever else runs; on a GPU at a cost in "
        "speed that is not measured yet, and without lora_modules; on a CPU free, but "
        "only in bfloat16",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none",
        description="int8 or int4: weights are rounded when they are loaded and computed in "
        "bfloat16; only on CPUs with AVX2; docs/results.md shows the effect on answers",
    )
    repetition_detection: Annotated[RepetitionDetection | None, BeforeValidator(_parse_json)] = (
        Field(
            None,
            description="loop guard for requests that set neither this nor "
            "ignore_eos, as JSON with "
            'vLLM\'s names: {"max_pattern_size": 64, "min_count": 16} ends an answer when a '
            "pattern of up to 64 tokens repeats 16 times",
        )
    )
    trim_blanks: bool = Field(False, description="remove white space at the end of an answer")
    lora_modules: Annotated[dict[_Name, _Name], BeforeValidator(_parse_json)] = Field(
        {},
        description='LoRA adapters that requests may select with lora_name, as JSON: {"<name>": '
        '"<directory saved by PEFT>"}; PiSSA and OLoRA adapters too',
    )
    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(_parse_json)] = Field(
        None,
        description="speculative decoding by prompt lookup, as JSON with vLLM's names and "
        'by_default; the defaults are {"method": "ngram", "num_speculative_tokens": 8, '
        '"prompt_lookup_min": 3, "prompt_lookup_max": 5, "disable_by_batch_size": 32, '
        '"by_default": true}; answers stay the same',
    )
    prefix_cache: Literal["auto", "on", "off"] = Field(
        "auto",
        description="reuse of computed prompt prefixes within one cache_salt: on, off, or auto: on "
        "while a fifth of the prompts' tokens could be reused",
    )
    prefix_cache_scope: Literal["line", "shared"] = Field(
        "line",
        description="line: prefixes are shared within one business line, and auto decides per line;"
        " shared: among all requests",
    )
    business_lines: Annotated[list[_LineName], BeforeValidator(_parse_json)] = Field(
        [],
        description='business lines that metrics show, as JSON: ["search", "ads"]; all others are '
        "counted as other",
    )
    price_per_hour: float | None = Field(
        None, ge=0, description="price of the device; if set, a request's usage contains its cost"
    )
    ledger_path: Path | None = Field(
        None,
        description="directory of the ledger, which keeps one row per request for bills; default: "
        "no ledger",
    )
    ledger_rotate_hours: float = Field(
        24.0, gt=0, description="time after which a new ledger file is begun"
    )
    ledger_retention_days: float = Field(
        90.0, gt=0, description="time that a ledger file is kept after its last row"
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="json: each log line is a JSON object, and each request that ends is one line",
    )
    trace_path: Path | None = Field(
        None,
        description="file that records lengths, times and salted block hashes of each request, "
        "never its text; default: no trace",
    )
    trace_max_size: Annotated[int, BeforeValidator(_parse_bytes)] = Field(
        2**30,
        ge=2**16,
        description="size of that file and its predecessors (.1, .2, ...) together; the oldest are "
        "deleted",
    )
    drain_seconds: float = Field(
        10.0,
        ge=0,
        description="how long running and queued requests may continue when the model is unloaded",
    )
    exit_on_crash: bool = Field(
        True,
        description="end Triton Server if this model's process is killed; false if the server has "
        "other models that must go on",
    )

    @model_validator(mode="after")
    def _check(self) -> "EngineConfig":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that each step can advance all requests"
            )
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size ({self.block_size}) must be a power of two")
        if self.batch_invariant and self.lora_modules:
            raise ValueError(
                "batch_invariant can't be true beside lora_modules: an adapter's matrix products "
                "depend on the batch"
            )
        return self

    @classmethod
    def from_parameters(
        cls, parameters: Mapping[str, Any], model_directory: Path | None = None
    ) -> "EngineConfig":
        """Read the `parameters` map of a model configuration, {name: {"string_value": text}}.

        Names in capitals are ignored: they belong to Triton Server and its Python backend.

        Args:
            model_directory: The model's folder in the model repository. Paths may be relative to
                it or start with $$TRITON_MODEL_DIRECTORY. None: they stay as they are.

        Raises:
            ConfigError: names the parameter, its value and what is allowed.
        """
        values = {
            name: value["string_value"].strip()
            for name, value in parameters.items()
            if not name.isupper()
        }
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None
        return config if model_directory is None else _with_paths(config, model_directory)


def _with_paths(config: EngineConfig, folder: Path) -> EngineConfig:
    """The configuration with paths that do not depend on the working directory."""

    def place(path: str | Path) -> Path:
        first, *rest = Path(path).parts or ["."]
        return folder.joinpath(*rest) if first == _MODEL_DIRECTORY else folder / path

    model = config.model
    if not model.startswith("package:") and (place(model).exists() or not hub.is_name(model)):
        model = str(place(model))
    return config.model_copy(
        update={
            "model": model,
            "lora_modules": {name: str(place(path)) for name, path in config.lora_modules.items()},
            "ledger_path": config.ledger_path and place(config.ledger_path),
            "trace_path": config.trace_path and place(config.trace_path),
        }
    )


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
