"""Sampling parameters as clients send them: accepted values, refusals and their messages."""

from dataclasses import asdict, fields

import pytest

from tritium.backend.config import RepetitionDetection
from tritium.backend.errors import InvalidArgument, Unsupported
from tritium.backend.front.sampling_params import SamplingParams


def refusal(**values) -> str:
    with pytest.raises(InvalidArgument) as refused:
        SamplingParams.parse(values)
    return str(refused.value)


def test_defaults():
    assert asdict(SamplingParams.parse({})) == {
        "n": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "allowed_token_ids": None,
        "bad_words": [],
        "seed": None,
        "max_tokens": None,
        "min_tokens": 0,
        "stop": [],
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "lora_name": None,
        "skip_special_tokens": True,
        "truncate_prompt_tokens": None,
        "priority": 0,
        "structured_outputs": None,
        "repetition_detection": None,
        "trim_blanks": None,
        "speculative": None,
    }


@pytest.mark.parametrize(
    ("name", "value", "parsed"),
    [
        ("n", 1, 1),
        ("n", "4", 4),
        ("presence_penalty", "-2", -2.0),
        ("frequency_penalty", 2, 2.0),
        ("repetition_penalty", "1.1", 1.1),
        ("logit_bias", {"5": -100, "7": "1.5"}, {5: -100.0, 7: 1.5}),
        ("allowed_token_ids", [1, "2"], [1, 2]),
        ("bad_words", "no", ["no"]),
        ("bad_words", ["no", "never ever"], ["no", "never ever"]),
        ("truncate_prompt_tokens", -1, -1),
        ("priority", "-3", -3),
        ("trim_blanks", "true", True),
        ("speculative", "false", False),
        ("lora_name", "one", "one"),
        ("temperature", 0, 0.0),
        ("temperature", "0.7", 0.7),
        ("temperature", 100, 100.0),
        ("top_k", -1, -1),
        ("top_k", "40", 40),
        ("top_p", 1, 1.0),
        ("top_p", "0.9", 0.9),
        ("min_p", 0, 0.0),
        ("min_p", 1, 1.0),
        ("seed", 0, 0),
        ("seed", -1, -1),
        ("seed", "18446744073709551615", 2**64 - 1),
        ("max_tokens", 1, 1),
        ("max_tokens", "32", 32),
        ("max_tokens", 32.0, 32),
        ("min_tokens", "2", 2),
        ("stop", "END", ["END"]),
        ("stop", ["a", "b"], ["a", "b"]),
        ("stop", [], []),
        ("stop_token_ids", 2, [2]),
        ("stop_token_ids", "2", [2]),
        ("stop_token_ids", [0, "2"], [0, 2]),
        ("include_stop_str_in_output", "true", True),
        ("include_stop_str_in_output", "false", False),
        ("ignore_eos", "False", False),
        ("ignore_eos", 1, True),
        ("skip_special_tokens", "false", False),
        ("skip_special_tokens", False, False),
        ("logprobs", 0, 0),
        ("logprobs", "20", 20),
    ],
)
def test_good_values(name, value, parsed):
    result = getattr(SamplingParams.parse({name: value}), name)
    assert result == parsed
    assert type(result) is type(parsed)


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_null_means_absent(name):
    assert SamplingParams.parse({name: None}) == SamplingParams.parse({})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("presence_penalty", 2.1, "less than or equal to 2"),
        ("frequency_penalty", -2.1, "greater than or equal to -2"),
        ("frequency_penalty", True, "number, not a boolean"),
        ("repetition_penalty", 0, "greater than or equal to 0.01"),
        ("repetition_penalty", 1e-300, "greater than or equal to 0.01"),
        ("logit_bias", [1], "valid dictionary"),
        ("allowed_token_ids", [], "at least 1 item"),
        ("allowed_token_ids", 5, "valid list"),
        ("bad_words", {"a": 1}, "valid list"),
        ("truncate_prompt_tokens", -2, "greater than or equal to -1"),
        ("priority", 2**31, "less than 2147483648"),
        ("priority", "high", "valid integer"),
        ("trim_blanks", "some", "valid boolean"),
        ("speculative", "5", "valid boolean"),
        ("lora_name", 5, "valid string"),
        ("n", 0, "greater than or equal to 1"),
        ("temperature", -0.1, "greater than or equal to 0"),
        ("temperature", 100.5, "less than or equal to 100"),
        ("temperature", "hot", "valid number"),
        ("temperature", float("nan"), "finite number"),
        ("temperature", float("inf"), "finite number"),
        ("temperature", "inf", "finite number"),
        ("temperature", True, "number, not a boolean"),
        ("temperature", [1], "valid number"),
        ("top_k", -2, "greater than or equal to -1"),
        ("top_k", 1.5, "valid integer"),
        ("top_p", 0, "greater than 0"),
        ("top_p", 1.01, "less than or equal to 1"),
        ("min_p", -0.01, "greater than or equal to 0"),
        ("min_p", 1.01, "less than or equal to 1"),
        ("seed", 2**64, "less than 1844674407370955"),
        ("seed", -(2**63) - 1, "greater than or equal to -9223372036854775808"),
        ("seed", "x", "valid integer"),
        ("max_tokens", 0, "greater than or equal to 1"),
        ("max_tokens", -1, "greater than or equal to 1"),
        ("max_tokens", "many", "valid integer"),
        ("max_tokens", False, "number, not a boolean"),
        ("max_tokens", 2.5, "valid integer"),
        ("max_tokens", {}, "valid integer"),
        ("min_tokens", -1, "greater than or equal to 0"),
        ("stop", 5, "valid string"),
        ("stop", {"a": 1}, "valid list"),
        ("include_stop_str_in_output", "maybe", "valid boolean"),
        ("ignore_eos", 2, "valid boolean"),
        ("skip_special_tokens", [], "valid boolean"),
        ("logprobs", -1, "greater than or equal to 0"),
        ("logprobs", 21, "less than or equal to 20"),
        ("logprobs", True, "number, not a boolean"),
    ],
)
def test_error_names_the_bad_value_and_what_is_allowed(name, value, allowed):
    message = refusal(**{name: value})
    assert message.startswith(f"sampling parameter '{name}': {value!r} is not allowed. ")
    assert allowed in message


@pytest.mark.parametrize(
    ("name", "values", "wrong"),
    [
        ("stop", ["a", 5], "5"),
        ("stop_token_ids", [1, "a"], "'a'"),
        ("stop_token_ids", [1, True], "True"),
        ("allowed_token_ids", [1, "a"], "'a'"),
        ("logit_bias", {"5": "much"}, "'much'"),
        ("logit_bias", {"five": 1}, "'five'"),
        ("repetition_detection", {"max_pattern_size": -1}, "-1"),
        ("repetition_detection", {"max_pattern_size": 4, "min_count": 1}, "1"),
        ("repetition_detection", {"size": 4}, "4"),
    ],
)
def test_error_names_the_bad_list_element(name, values, wrong):
    assert refusal(**{name: values}).startswith(
        f"sampling parameter '{name}': {wrong} is not allowed. "
    )


def test_empty_bad_word_is_refused():
    assert refusal(bad_words=["a", " "]) == "sampling parameter 'bad_words': a word can't be empty"


def test_truncating_to_nothing_is_refused():
    assert refusal(truncate_prompt_tokens=0) == (
        "sampling parameter 'truncate_prompt_tokens': 0 is not allowed; it is -1 or at least 1"
    )


def test_repetition_detection():
    given = {"max_pattern_size": 8, "min_count": "3"}
    parsed = SamplingParams.parse({"repetition_detection": given}).repetition_detection
    assert parsed == RepetitionDetection(max_pattern_size=8, min_pattern_size=1, min_count=3)
    wrong = {"max_pattern_size": 2, "min_pattern_size": 3}
    assert "min_pattern_size (3) should be at most" in refusal(repetition_detection=wrong)


def test_empty_stop_string_is_refused():
    assert refusal(stop=["a", ""]) == "sampling parameter 'stop': a stop string can't be empty"


def test_min_tokens_beyond_max_tokens_is_refused():
    assert refusal(min_tokens=5, max_tokens=4) == (
        "sampling parameter 'min_tokens': 5 is more than max_tokens 4"
    )
    assert SamplingParams.parse({"min_tokens": 4, "max_tokens": 4}).min_tokens == 4


def test_error_for_an_unknown_parameter_lists_the_known_ones():
    assert refusal(max_token=5) == (
        "unknown sampling parameter 'max_token'; known are: allowed_token_ids, bad_words, "
        "frequency_penalty, ignore_eos, include_stop_str_in_output, logit_bias, logprobs, "
        "lora_name, max_tokens, min_p, min_tokens, n, presence_penalty, priority, "
        "prompt_logprobs, repetition_detection, repetition_penalty, seed, skip_special_tokens, "
        "speculative, stop, stop_token_ids, structured_outputs, temperature, top_k, top_p, "
        "trim_blanks, truncate_prompt_tokens"
    )


def test_huge_value_is_shortened_in_the_message():
    assert len(refusal(max_tokens="9" * 5000)) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
    ],
)
def test_unsupported_parameters_of_vllm(name, value):
    with pytest.raises(Unsupported) as refused:
        SamplingParams.parse({name: value})
    assert str(refused.value) == f"sampling parameter '{name}' is not supported yet"
    assert refused.value.code == "UNSUPPORTED"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0),
        ("frequency_penalty", "0.0"),
        ("repetition_penalty", 1.0),
        ("best_of", 1),
        ("logit_bias", None),
        ("guided_decoding", None),
    ],
)
def test_unsupported_parameters_with_no_effect_are_accepted(name, value):
    assert SamplingParams.parse({name: value, "seed": 3}).seed == 3


# -- hostile clients --


def test_penalty_too_large_for_a_float_is_refused():
    with pytest.raises((InvalidArgument, Unsupported), match="frequency_penalty"):
        SamplingParams.parse({"frequency_penalty": 10**400})


def test_unknown_parameter_with_a_lone_surrogate_is_refused():
    message = refusal(**{"\ud800": 1})
    assert "sampling parameter" in message
    message.encode()  # it is sent as UTF-8
