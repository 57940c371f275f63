"""The metrics of vLLM's Triton backend, which the parameter REPORT_CUSTOM_METRICS enables."""

import contextlib
import re

import pytest
import tritonclient.grpc as grpcclient

from tritium.loadtests.harness import collect, complete, send, until, write_model

# The prompts of that backend's own test, which generates 16 tokens for each.
PROMPTS = ["The most dangerous animal is", "The capital of France is", "The future of AI is"]
NUM_TOKENS = 16


def vllm_metrics(server, model: str) -> dict[str, float]:
    """Values by name; buckets by name and upper bound."""
    values = {}
    for line in server.metrics():
        match = re.fullmatch(r"(vllm:\w+)\{(.*)\} (\S+)", line)
        if match and f'model="{model}"' in match[2]:
            assert 'version="1"' in match[2]
            bound = re.search(r'le="([^"]*)"', match[2])
            values[match[1] + (f" {bound[1]}" if bound else "")] = float(match[3])
    return values


def test_metrics_are_absent_without_the_parameter(server):
    complete(server, PROMPTS[0], sampling={"max_tokens": 1})
    assert server.metric("requests_total", outcome="length") > 0
    assert not vllm_metrics(server, "smollm2")


@pytest.fixture(scope="module")
def model(server, repository, tiny_weights):
    write_model(
        repository,
        "counted",
        model=tiny_weights,
        max_model_len=512,
        kv_cache_memory="8MiB",
        REPORT_CUSTOM_METRICS="true",
    )
    with grpcclient.InferenceServerClient(server.grpc_url) as control:
        control.load_model("counted")
        yield "counted"
        control.unload_model("counted")


def test_metrics_count_exactly(server, model, tokenizer):
    num_prompt_tokens = [len(tokenizer.encode(prompt)) for prompt in PROMPTS]
    sampling = {"temperature": "0", "top_p": "1", "ignore_eos": True}  # 16 tokens by default
    for stream, prompt in zip((False, True, True), PROMPTS, strict=True):
        responses = collect(server, prompt, model=model, stream=stream, sampling=sampling)
        assert not responses[-1].error
    (refused,) = collect(server, PROMPTS[0], model=model, sampling={"temperature": -1})
    assert refused.error  # refused requests are not counted
    expected = {
        "prompt_tokens_total": sum(num_prompt_tokens),
        "generation_tokens_total": 3 * NUM_TOKENS,
        "time_to_first_token_seconds_count": 3,
        "time_to_first_token_seconds_bucket +Inf": 3,
        "time_per_output_token_seconds_count": 3 * (NUM_TOKENS - 1),
        "time_per_output_token_seconds_bucket +Inf": 3 * (NUM_TOKENS - 1),
        "e2e_request_latency_seconds_count": 3,
        "e2e_request_latency_seconds_bucket +Inf": 3,
        "request_prompt_tokens_count": 3,
        "request_prompt_tokens_sum": sum(num_prompt_tokens),
        "request_prompt_tokens_bucket 2": 0,
        "request_prompt_tokens_bucket 10": 3,
        "request_prompt_tokens_bucket +Inf": 3,
        "request_generation_tokens_count": 3,
        "request_generation_tokens_sum": 3 * NUM_TOKENS,
        "request_generation_tokens_bucket 10": 0,
        "request_generation_tokens_bucket 20": 3,
        "request_generation_tokens_bucket +Inf": 3,
        "request_params_n_count": 3,
        "request_params_n_sum": 3,
        "request_params_n_bucket 1": 3,
    }
    check(server, model, expected)
    values = vllm_metrics(server, model)
    for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency"):
        assert values[f"vllm:{name}_seconds_sum"] > 0

    # Two answers to one prompt; the prompt is computed once.
    (response,) = collect(server, PROMPTS[0], model=model, sampling={**sampling, "n": 2})
    assert response.tensors["text_output"].shape == (2,)
    more = {
        "prompt_tokens_total": num_prompt_tokens[0],
        "generation_tokens_total": 2 * NUM_TOKENS,
        "time_to_first_token_seconds_count": 1,
        "time_per_output_token_seconds_count": 2 * (NUM_TOKENS - 1),
        "e2e_request_latency_seconds_count": 1,
        "request_params_n_count": 1,
        "request_params_n_sum": 2,
    }
    check(server, model, {name: expected[name] + value for name, value in more.items()})
    assert server.metric("requests_total", model, outcome="length") == 4
    assert server.metric("requests_total", model, outcome="invalid_arg") == 1


def check(server, model: str, expected: dict[str, float]) -> None:
    def values() -> dict[str, float]:
        found = vllm_metrics(server, model)
        return {name: found[f"vllm:{name}"] for name in expected}

    with contextlib.suppress(AssertionError):
        until(lambda: values() == expected, timeout=5)
    assert values() == expected


def test_token_counters_move_while_an_answer_runs(server, model, tokenizer):
    def counted(name: str) -> float:
        return vllm_metrics(server, model)[f"vllm:{name}_tokens_total"]

    prompts, tokens = counted("prompt"), counted("generation")
    sampling = {"temperature": "0", "ignore_eos": True, "max_tokens": 500}
    with send(server, PROMPTS[0], model=model, stream=True, sampling=sampling) as stream:
        stream.next()
        until(lambda: counted("generation") > tokens)
        between = counted("generation")
        until(lambda: counted("generation") > between)
        assert between < tokens + 500
        assert counted("prompt") == prompts + len(tokenizer.encode(PROMPTS[0]))
