"""The contract of vLLM's Triton backend, through a real Triton Server."""

import itertools
import json

import pytest

from tritium.loadtests.harness import collect, complete, until

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 8}
FLAGS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
FULL_STREAM_ERROR = (
    "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
)


def test_config_has_every_tensor_of_the_contract(server):
    _, body = server.http("models/smollm2/config")
    config = json.loads(body)
    inputs = {i["name"]: (i["data_type"], i["dims"], i["optional"]) for i in config["input"]}
    outputs = {o["name"]: (o["data_type"], o["dims"]) for o in config["output"]}
    assert inputs["text_input"] == ("TYPE_STRING", ["1"], True) or inputs["text_input"] == (
        "TYPE_STRING",
        [1],
        True,
    )
    assert all(inputs[name][0] == "TYPE_BOOL" for name in ("stream", *FLAGS))
    assert {"sampling_parameters", "exclude_input_in_output", "messages", "stop"} <= set(inputs)
    assert outputs["cumulative_logprob"][0] == "TYPE_FP32"
    assert outputs["num_input_tokens"][0] == outputs["num_output_tokens"][0] == "TYPE_UINT32"
    assert config["max_batch_size"] == 0
    assert config["model_transaction_policy"]["decoupled"] is True


def test_readiness(server):
    # The server is not ready while another model is being unloaded.
    until(lambda: server.http("health/ready")[0] == 200)
    assert server.http("models/smollm2/ready")[0] == 200
    assert server.http("models/unknown/ready")[0] != 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("flags", [*itertools.combinations(FLAGS, 1), (), FLAGS], ids="+".join)
def test_optional_outputs_come_on_request(server, stream, logprobs, flags):
    responses = collect(
        server,
        PROMPT,
        stream=stream,
        sampling={**GREEDY, "logprobs": logprobs},
        **dict.fromkeys(flags, True),
    )
    names = {"text_output", *(flag.removeprefix("return_") for flag in flags)}
    assert all(set(response.tensors) == names for response in responses)
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    if "return_finish_reason" in flags:
        reasons = [response.string("finish_reason") for response in responses]
        assert reasons == ["None"] * (len(responses) - 1) + ["length"]
    if "return_num_input_tokens" in flags:
        assert {response.tensors["num_input_tokens"].item() for response in responses} == {5}
    if "return_num_output_tokens" in flags:
        counts = [response.tensors["num_output_tokens"].item() for response in responses]
        assert sum(counts) == 8
    if "return_cumulative_logprob" in flags:
        sums = [response.tensors["cumulative_logprob"].item() for response in responses]
        assert sums == sorted(sums, reverse=True)
        assert sums[-1] < 0
    if "return_logprobs" in flags:
        per_response = [json.loads(response.string("logprobs")) for response in responses]
        if logprobs is None:
            assert per_response == [None] * len(responses)
        else:
            tokens = list(itertools.chain.from_iterable(per_response))
            assert len(tokens) == 8
            assert {len(token) for token in tokens} == {max(logprobs, 1)}
            best = [min(token.values(), key=lambda t: t["rank"]) for token in tokens]
            assert all(t["rank"] == 1 and t["logprob"] <= 0 for t in best)
            text = "".join(response.text for response in responses)
            spelt = "".join(t["decoded_token"] for t in best)
            assert spelt == (text if stream else text.removeprefix(PROMPT))


@pytest.mark.parametrize("exclude", [None, True, False])
def test_echo_without_streaming_unless_excluded(server, exclude):
    tensors = {} if exclude is None else {"exclude_input_in_output": exclude}
    (response,) = collect(server, PROMPT, sampling=GREEDY, stream=False, **tensors)
    assert response.text.startswith(" Paris" if exclude else f"{PROMPT} Paris")


@pytest.mark.parametrize("exclude", [None, True])
def test_stream_has_only_deltas(server, exclude):
    tensors = {} if exclude is None else {"exclude_input_in_output": exclude}
    responses = collect(server, PROMPT, sampling=GREEDY, stream=True, **tensors)
    assert len(responses) > 1
    assert responses[0].text == " Paris"


def test_stream_with_the_input_is_an_error(server):
    (response,) = collect(server, PROMPT, stream=True, exclude_input_in_output=False)
    assert response.error == FULL_STREAM_ERROR
    _, body = server.http(
        "models/smollm2/generate_stream",
        {"text_input": PROMPT, "stream": True, "exclude_input_in_output": False},
    )
    assert FULL_STREAM_ERROR in body


@pytest.mark.parametrize("sampling", [None, {"temperature": 0}])
def test_16_tokens_by_default(server, sampling):
    (response,) = collect(
        server, PROMPT, sampling=sampling, return_finish_reason=True, return_num_output_tokens=True
    )
    count = response.tensors["num_output_tokens"].item()
    reason = response.string("finish_reason")
    assert (count, reason) == (16, "length") or (count < 16 and reason == "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_one_token_makes_one_response(server, stream):
    responses = collect(
        server,
        PROMPT,
        stream=stream,
        sampling={"temperature": 0, "max_tokens": 1},
        exclude_input_in_output=True,
        return_finish_reason=True,
    )
    assert [(r.text, r.final, r.string("finish_reason")) for r in responses] == [
        (" Paris", True, "length")
    ]


def test_parameters_by_every_route(server):
    expected = complete(server, PROMPT, sampling=GREEDY)
    body = {"text_input": PROMPT, "exclude_input_in_output": True}
    flat = json.loads(server.http("models/smollm2/generate", {**body, **GREEDY})[1])
    nested = json.loads(server.http("models/smollm2/generate", {**body, "parameters": GREEDY})[1])
    assert flat["text_output"] == nested["text_output"] == expected
    # The tensor replaces the request's parameters, so max_tokens 2 has no effect.
    both = {**body, "max_tokens": 2, "sampling_parameters": json.dumps(GREEDY)}
    assert json.loads(server.http("models/smollm2/generate", both)[1])["text_output"] == expected


def test_numbers_as_strings(server):
    numbers = {"temperature": 0, "max_tokens": 8, "top_p": 0.9, "top_k": 5, "seed": 1, "min_p": 0.1}
    strings = {name: str(value) for name, value in numbers.items()}
    assert complete(server, PROMPT, sampling=strings) == complete(server, PROMPT, sampling=numbers)


def test_false_as_a_string_is_false(server):
    # This chat answer ends with EOS within the limit.
    chat = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    plain = {"temperature": 0, "max_tokens": 100}
    reasons = {}
    for value in (None, "false", "true"):
        sampling = plain if value is None else {**plain, "ignore_eos": value}
        (response,) = collect(server, chat, sampling=sampling, return_finish_reason=True)
        reasons[value] = response.string("finish_reason")
    assert reasons == {None: "stop", "false": "stop", "true": "length"}


def test_stop_strings(server):
    text = complete(server, "List five fruits:\n1.", sampling={"temperature": 0, "max_tokens": 40})
    stop = text[9:14]  # spans several tokens
    before = text[: text.index(stop)]
    for sampling in ({"stop": stop}, {"stop": ["never", stop]}):
        for stream in (False, True):
            responses = collect(
                server,
                "List five fruits:\n1.",
                stream=stream,
                exclude_input_in_output=True,
                sampling={"temperature": 0, "max_tokens": 40, **sampling},
                return_finish_reason=True,
            )
            assert "".join(response.text for response in responses) == before
            assert responses[-1].string("finish_reason") == "stop"
    generated = server.http(
        "models/smollm2/generate",
        {
            "text_input": "List five fruits:\n1.",
            "exclude_input_in_output": True,
            "temperature": 0,
            "max_tokens": 40,
            "stop": ["never", stop],
        },
    )[1]
    assert json.loads(generated)["text_output"] == before


def test_top_k_off_and_greedy_settings(server):
    greedy = complete(server, PROMPT, sampling=GREEDY)
    for setting in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert complete(server, PROMPT, sampling={"max_tokens": 8, **setting}) == greedy
    for seed in range(2):
        texts = {
            complete(server, PROMPT, sampling={"max_tokens": 8, "seed": seed, "top_k": top_k})
            for top_k in (-1, 0)
        }
        assert len(texts) == 1


def test_seeds(server):
    def text(**sampling):
        return complete(server, "Once upon a time", sampling={"max_tokens": 16, **sampling})

    first = [text(seed=seed) for seed in range(3)]
    assert first == [text(seed=seed) for seed in range(3)]
    assert len(set(first)) == 3
    assert len({text() for _ in range(4)}) > 1


def test_messages_use_the_chat_template(server):
    messages = [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    rendered = (
        "<|im_start|>system\nYou answer in one word.<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    sampling = {"temperature": 0, "max_tokens": 16}
    by_template = complete(server, None, messages=json.dumps(messages), sampling=sampling)
    assert by_template == complete(server, rendered, sampling=sampling)
    assert "Paris" in by_template


def test_usage(server):
    responses = collect(server, PROMPT, stream=True, sampling=GREEDY, return_usage=True)
    assert ["usage" in response.tensors for response in responses] == [False] * (
        len(responses) - 1
    ) + [True]
    usage = json.loads(responses[-1].string("usage"))
    assert (usage["prompt_tokens"], usage["cached_tokens"], usage["output_tokens"]) == (5, 0, 8)
    assert 0 <= usage["queue_ms"] <= usage["ttft_ms"] <= usage["total_ms"]


def test_decoupled_models_need_a_stream(server):
    status, body = server.http(
        "models/smollm2/infer",
        {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}]},
    )
    assert status >= 400
    assert "decoupled" in body
