"""TensorRT-LLM's tensors translated to the main model's, and back."""

import json

import numpy as np
import pytest

from tritium.backend.errors import InvalidArgument, RequestError, Unsupported
from tritium.backend.front.protocol import INPUTS as MAIN_INPUTS
from tritium.backend.front.protocol import OUTPUTS as MAIN_OUTPUTS
from tritium.backend.front.protocol import parse
from tritium.backend.front.sampling_params import SamplingParams
from tritium.backend.trtllm import handover
from tritium.backend.trtllm.contract import INPUTS, response_tensors, translate

_TYPES = {"TYPE_INT32": np.int32, "TYPE_UINT64": np.uint64, "TYPE_FP32": np.float32}


def tensors(**values):
    """Tensors as clients send them, of shape [1, n]."""
    types = {name: data_type for name, data_type, _ in INPUTS}
    arrays = {}
    for name, value in values.items():
        values = value if isinstance(value, list) else [value]
        if types[name] == "TYPE_STRING":
            values = [v.encode() if isinstance(v, str) else v for v in values]
        arrays[name] = np.array([values], dtype=_TYPES.get(types[name], np.object_))
        if types[name] == "TYPE_BOOL":
            arrays[name] = arrays[name].astype(bool)
    return arrays


def sampling(parameters="", **values):
    translation = translate(tensors(**values), parameters)
    return json.loads(translation.inputs["sampling_parameters"].item())


def test_translation_uses_the_main_model_contract():
    translation = translate(
        tensors(
            text_input="Hi",
            stream=True,
            max_tokens=5,
            return_log_probs=True,
            return_num_input_tokens=True,
            return_num_output_tokens=True,
        ),
        '{"business_line": "search", "min_p": 0.1}',
    )
    assert set(translation.inputs) <= {spec.name for spec in MAIN_INPUTS}
    assert set(translation.outputs) <= {spec.name for spec in MAIN_OUTPUTS}
    request = parse(translation.inputs, "")
    assert (request.text_input, request.stream, request.business_line) == ("Hi", True, "search")
    assert request.sampling == SamplingParams(max_tokens=5, temperature=0, min_p=0.1, logprobs=0)
    asked_for = {f"return_{name}" for name in translation.outputs[1:]}
    assert request.returned == asked_for


@pytest.mark.parametrize(
    ("stream", "exclude", "echo"),
    [
        *((True, exclude, False) for exclude in (None, False, True)),
        *((False, exclude, not exclude) for exclude in (None, False, True)),
        (None, None, True),
    ],
)
def test_input_is_in_the_output_unless_excluded_or_streamed(stream, exclude, echo):
    flags = {"stream": stream, "exclude_input_in_output": exclude}
    given = {name: flag for name, flag in flags.items() if flag is not None}
    translation = translate(tensors(text_input="Hi", **given), "")
    assert parse(translation.inputs, "").echo == echo


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({}, {"temperature": 0}),
        ({"temperature": 0.7}, {"temperature": 0}),
        ({"top_k": 0, "top_p": 0.0, "temperature": 0.7}, {"top_k": 0, "temperature": 0}),
        ({"top_k": 4, "temperature": 0.7}, {"top_k": 4, "temperature": 0.7}),
        ({"top_k": 4, "top_p": 0.0}, {"top_k": 4}),
        ({"top_p": 0.95, "temperature": 0.7}, {"top_p": 0.95, "temperature": 0.7}),
    ],
)
def test_greedy_without_top_k_and_top_p(sent, expected):
    assert sampling(**sent) == expected


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"min_length": 3}, {"min_tokens": 3}),
        ({"min_tokens": 3}, {"min_tokens": 3}),
        ({"random_seed": 2**64 - 1}, {"seed": 2**64 - 1}),
        ({"seed": 0}, {"seed": 0}),
        ({"stop_words": ["a,b", "é"]}, {"stop": ["a,b", "é"]}),
        ({"stop_words": [""], "bad_words": [""]}, {}),
        ({"bad_words": ["x"]}, {"bad_words": ["x"]}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"presence_penalty": -0.3}, {"presence_penalty": -0.3}),
        ({"frequency_penalty": 0.2}, {"frequency_penalty": 0.2}),
        ({"length_penalty": 2.0, "pad_id": 2, "beam_width": 1, "num_return_sequences": 1}, {}),
        ({"end_id": 7}, {"ignore_eos": True, "stop_token_ids": [7]}),
        ({"end_id": -1}, {"ignore_eos": True}),
        ({"end_id": 2**20}, {"ignore_eos": True}),
        ({"return_context_logits": False, "return_perf_metrics": False}, {}),
        (
            {"guided_decoding_guide_type": "json"},
            {"structured_outputs": {"json_object": True}},
        ),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"},
            {"structured_outputs": {"regex": "a+"}},
        ),
    ],
)
def test_sampling_parameters(sent, expected):
    assert sampling(top_k=1, **sent) == {"top_k": 1, **expected}


def test_request_parameters():
    sent = '{"accumulate_tokens": true, "ignore_eos": true, "business_line": "b", "cache_salt": 7}'
    translation = translate(tensors(text_input="Hi", top_k=1), sent)
    assert json.loads(translation.inputs["sampling_parameters"].item()) == {
        "top_k": 1,
        "ignore_eos": True,
    }
    request = parse(translation.inputs, "")
    assert (request.business_line, request.cache_salt) == ("b", "7")


@pytest.mark.parametrize(
    ("sent", "error", "words"),
    [
        ({"beam_width": 3}, Unsupported, ["beam_width", "3"]),
        ({"num_return_sequences": 2}, Unsupported, ["num_return_sequences", "2"]),
        ({"return_context_logits": True}, Unsupported, ["return_context_logits"]),
        ({"return_generation_logits": True}, Unsupported, ["return_generation_logits"]),
        ({"return_perf_metrics": True}, Unsupported, ["return_perf_metrics"]),
        ({"embedding_bias_words": ["a"]}, Unsupported, ["embedding_bias_words"]),
        ({"stop_words": [b"\xff"]}, InvalidArgument, ["stop_words", "UTF-8"]),
        ({"guided_decoding_guide_type": "xml"}, InvalidArgument, ["guide_type", "xml", "regex"]),
        ({"guided_decoding_guide_type": "regex"}, InvalidArgument, ["guided_decoding_guide:"]),
    ],
)
def test_error_names_the_refused_input(sent, error, words):
    with pytest.raises(error) as refused:
        translate(tensors(text_input="Hi", **sent), "")
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize("n", [2, "2", 0])
def test_more_than_one_answer_is_refused(n):
    with pytest.raises(Unsupported, match="n: "):
        translate(tensors(text_input="Hi"), json.dumps({"n": n}))
    assert sampling(json.dumps({"n": 1}), top_k=1) == {"top_k": 1}


def test_errors_use_the_client_names():
    translation = translate(tensors(text_input="Hi", min_length=-1, random_seed=1, top_k=-5), "")
    for ours, theirs in {"min_tokens": "min_length", "seed": "random_seed"}.items():
        message = f"sampling parameter '{ours}': no"
        assert translation.with_own_names(message) == f"sampling parameter '{theirs}': no"
    assert translation.with_own_names("'top_k', 'stop'") == "'top_k', 'stop'"


def test_response():
    outputs = {
        "text_output": np.array([b" Paris"], dtype=np.object_),
        "finish_reason": np.array([b"None"], dtype=np.object_),
        "num_input_tokens": np.array([5], dtype=np.uint32),
        "num_output_tokens": np.array([2], dtype=np.uint32),
        "cumulative_logprob": np.array([-3.5], dtype=np.float32),
        "logprobs": np.array(
            [json.dumps([{"1": {"logprob": -0.5}}, {"9": {"logprob": -3.0}}])], dtype=np.object_
        ),
    }
    tensors = response_tensors(outputs)
    assert tensors["text_output"].tolist() == [b" Paris"]
    assert tensors["output_log_probs"].tolist() == [[[-0.5, -3.0]]]
    assert tensors["cum_log_probs"].tolist() == [[-3.5]]
    assert tensors["num_input_tokens"].tolist() == [[5]]
    assert tensors["num_output_tokens"].tolist() == [[2]]
    assert {name: array.dtype for name, array in tensors.items()} == {
        "text_output": np.object_,
        "output_log_probs": np.float32,
        "cum_log_probs": np.float32,
        "num_input_tokens": np.int32,
        "num_output_tokens": np.int32,
    }


def test_ids_of_relayed_requests():
    first, second = handover.new_id(), handover.new_id()
    assert first != second
    assert handover.is_handed_over(first)
    assert not handover.is_cancel(first)
    cancel = handover.cancel(first)
    assert handover.is_cancel(cancel)
    assert not handover.is_handed_over(cancel)
    assert not handover.is_handed_over("")
    assert not handover.is_cancel("")


@pytest.mark.parametrize("message", ["stop: no", "two\nlines", "", "error INTERNAL in it"])
@pytest.mark.parametrize("kind", [RequestError, *RequestError.__subclasses__()])
def test_errors_as_finish_reasons(kind, message):
    error = handover.read_error(handover.finish_reason(kind(message)))
    assert (type(error), str(error)) == (kind, message)


@pytest.mark.parametrize("finish_reason", ["None", "stop", "length", "repetition"])
def test_finish_reasons_without_an_error(finish_reason):
    assert handover.read_error(finish_reason) is None
