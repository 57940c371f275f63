"""The text side of a request: which text is sent, when, and with which numbers."""

import pytest

from tritium.backend.accounts.request_usage import AnswerUsage
from tritium.backend.engine.request import EngineOutput, FinishReason, SampledToken, TokenLogprobs
from tritium.backend.front.output import RequestOutput

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class FakeDetokenizer:
    """A detokenizer whose token i is the i-th piece."""

    def __init__(self, pieces: list[str], at_end: str = "") -> None:
        self._pieces = pieces
        self._at_end = at_end

    def add(self, token_id: int) -> str:
        return self._pieces[token_id]

    def finish(self) -> str:
        return self._at_end


def make_output(pieces, **changes) -> RequestOutput:
    fields = dict(
        stop=[],
        stop_tokens={},
        include_stop=False,
        min_tokens=0,
        stream=True,
        prefix="",
        num_prompt_tokens=3,
    )
    return RequestOutput(FakeDetokenizer(pieces), **{**fields, **changes})


def tokens(*token_ids: int) -> list[SampledToken]:
    return [SampledToken(i, None) for i in token_ids]


def deltas(pieces: list[str], reason=LENGTH, **changes) -> list[tuple[str, int, str | None]]:
    """(text, number of tokens, finish reason) of each delta, with one piece per step."""
    output = make_output(pieces, **changes)
    taken = []
    for i in range(len(pieces)):
        output.add(EngineOutput(0, tokens(i), reason if i == len(pieces) - 1 else None))
        if output.is_ready:
            delta = output.take()
            taken.append((delta.text, len(delta.tokens), delta.finish_reason))
            if delta.finish_reason:
                break
    return taken


# -- deltas --


def deltas_with_end(pieces, at_end, reason=LENGTH, **changes) -> list[str]:
    output = make_output(pieces, **changes)
    output._detokenizer = FakeDetokenizer(pieces, at_end)
    texts = []
    for i in range(len(pieces)):
        output.add(EngineOutput(0, tokens(i), reason if i == len(pieces) - 1 else None))
        if output.is_ready:
            texts.append(output.take().text)
    return texts


@pytest.mark.parametrize("reason", [LENGTH, STOP])
def test_what_the_detokenizer_held_back_comes_at_the_end(reason):
    assert deltas_with_end(["a", "b"], "\ufffd", reason, include_stop=True) == ["a", "b\ufffd"]
    assert deltas_with_end(["a", "b"], "\ufffd", reason) == (
        ["a", "b\ufffd"] if reason is LENGTH else ["a", "\ufffd"]
    )


def test_a_stop_string_may_end_with_what_was_held_back():
    assert deltas_with_end(["a", "b"], "c", stop=["bc"]) == ["a", ""]
    assert deltas_with_end(["a", "b"], "c", stop=["bcd"]) == ["a", "bc"]


def test_deltas_know_the_tokens_before_theirs():
    output = make_output(list("abcdefg"))
    contexts = []
    for steps in ([0], [1, 2], [3, 4, 5], [6]):
        output.add(EngineOutput(0, tokens(*steps), LENGTH if steps == [6] else None))
        contexts.append(output.take().context)
    assert contexts == [(), (0,), (0, 1, 2), (2, 3, 4, 5)]


def test_text_is_sent_with_its_token():
    assert deltas(["Hel", "lo", "!"]) == [("Hel", 1, None), ("lo", 1, None), ("!", 1, LENGTH)]


def test_tokens_without_text_are_sent_with_the_next_text():
    assert deltas(["a", "", "", "b", ""]) == [("a", 1, None), ("b", 3, None), ("", 1, LENGTH)]


def test_without_stream_everything_comes_at_the_end():
    assert deltas(["a", "b", "c"], stream=False) == [("abc", 3, LENGTH)]


def test_echoed_prompt_comes_first():
    assert deltas(["a", "b"], stream=False, prefix="Say: ") == [("Say: ab", 2, LENGTH)]


def test_outputs_between_two_takes_are_merged():
    output = make_output(["a", "b", "c"])
    output.add(EngineOutput(0, tokens(0)))
    output.add(EngineOutput(0, tokens(1, 2)))
    delta = output.take()
    assert (delta.text, delta.tokens, delta.finish_reason) == ("abc", tokens(0, 1, 2), None)
    assert not output.is_ready


def test_finish_reason_without_a_token_gives_a_delta():
    output = make_output([])
    output.add(EngineOutput(0, [], FinishReason.CANCELLED))
    delta = output.take()
    assert (delta.text, delta.tokens, delta.finish_reason) == ("", [], "cancelled")


# -- stop strings --


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, ("ab <", 3, STOP)),
        ({"stream": False}, ("ab <", 3, STOP)),
        ({"include_stop": True}, ("ab <<|im_end|>", 3, STOP)),
        ({"min_tokens": 2}, ("ab <", 3, STOP)),
        ({"min_tokens": 3}, ("ab < c", 4, LENGTH)),
        ({"trim_blanks": True, "pieces": ["a", "b ", "", " c"]}, ("ab", 3, STOP)),
        ({"pieces": ["a", "<|im_end|>", "", "c"]}, ("a", 2, STOP)),
    ],
)
def test_stop_string_is_a_token_that_the_text_hides(changes, right):
    """Each token's id is its position; the hidden one is the third."""
    options = {"stop": ["<|im_end|>"], "stop_tokens": {2: "<|im_end|>"}, **changes}
    found = deltas(options.pop("pieces", ["a", "b <", "", " c"]), **options)
    texts, sizes, reasons = zip(*found, strict=True)
    assert ("".join(texts), sum(sizes), reasons[-1]) == right


def test_stop_string_that_is_a_visible_token_is_found_as_text():
    stops = {"stop": ["x<t>", "<t>"], "stop_tokens": {1: "<t>"}}
    assert deltas(["ax", "<t>", "c"], **stops) == [("a", 1, None), ("", 1, STOP)]


def test_end_token_that_is_a_stop_string():
    output = make_output(["a", ""], stop=["<e>"], stop_tokens={1: "<e>"}, include_stop=True)
    output.add(EngineOutput(0, tokens(0)))
    output.add(EngineOutput(0, tokens(1), STOP))
    delta = output.take()
    assert (delta.text, delta.finish_reason) == ("a<e>", STOP)


def test_stop_string_in_one_token():
    assert deltas(["a", "b.c", "d"], stop=["."]) == [("a", 1, None), ("b", 1, STOP)]


def test_stop_string_across_tokens_is_held_back():
    assert deltas(["one ", "<e", "n", "d> two"], stop=["<end>"]) == [
        ("one ", 1, None),
        ("", 3, STOP),
    ]


def test_partial_stop_string_that_does_not_continue_is_released():
    assert deltas(["a<", "e", "x"], stop=["<end>"]) == [("a", 1, None), ("<ex", 2, LENGTH)]


def test_held_back_text_is_released_at_the_end():
    assert deltas(["a", "<en"], stop=["<end>"]) == [("a", 1, None), ("<en", 1, LENGTH)]


def test_only_a_possible_stop_string_is_held_back():
    assert deltas(["aaa", "a", "b"], stop=["aab"]) == [
        ("a", 1, None),
        ("a", 1, None),
        ("", 1, STOP),
    ]


def test_stop_string_that_starts_inside_a_partial_one():
    assert deltas(["ab", "ac", "x"], stop=["abac!", "ac"]) == [("ab", 2, STOP)]


@pytest.mark.parametrize("stop", [["ab", "abc"], ["abc", "ab"]])
def test_stop_string_that_is_a_prefix_of_another_ends_the_text(stop):
    assert deltas(["xa", "b", "c"], stop=stop) == [("x", 1, None), ("", 1, STOP)]


@pytest.mark.parametrize("stop", [["ab", "abc"], ["abc", "ab"]])
def test_longer_of_two_stop_strings_at_one_place_is_kept(stop):
    assert deltas(["xabcd"], stop=stop, include_stop=True) == [("xabc", 1, STOP)]


def test_first_stop_string_ends_the_text():
    assert deltas(["one two three"], stop=["three", "two"]) == [("one ", 1, STOP)]


def test_include_stop_keeps_the_stop_string_and_nothing_after_it():
    assert deltas(["one ", "<e", "nd> two"], stop=["<end>"], include_stop=True) == [
        ("one ", 1, None),
        ("<end>", 2, STOP),
    ]


def test_stop_string_without_stream():
    assert deltas(["a", "b.", "c"], stop=["."], stream=False, prefix="P. ") == [("P. ab", 2, STOP)]


def test_stop_strings_in_other_scripts():
    assert deltas(["你好", "。再", "见"], stop=["。再见"]) == [("你好", 1, None), ("", 2, STOP)]


def test_stop_strings_are_ignored_before_min_tokens():
    assert deltas(["a.", "b.", "c.", "d"], stop=["."], min_tokens=2) == [
        ("a.", 1, None),
        ("b.", 1, None),
        ("c", 1, STOP),
    ]


def test_output_after_a_stop_string_is_ignored():
    output = make_output(["a.", "b"], stop=["."])
    output.add(EngineOutput(0, tokens(0, 1)))
    output.add(EngineOutput(0, tokens(1), LENGTH))
    delta = output.take()
    assert (delta.text, delta.tokens, delta.finish_reason) == ("a", tokens(0), STOP)
    assert output.usage().output_tokens == 1


def test_error_after_a_stop_string_is_ignored():
    output = make_output(["a."], stop=["."])
    output.add(EngineOutput(0, tokens(0)))
    output.add(EngineOutput(0, [], FinishReason.CANCELLED))
    assert output.take().finish_reason is STOP


# -- stop tokens --


def test_stop_token_text_is_hidden():
    assert deltas(["a", "</s>"], reason=STOP) == [("a", 1, None), ("", 1, STOP)]


def test_include_stop_shows_the_stop_token_text():
    assert deltas(["a", "</s>"], reason=STOP, include_stop=True) == [
        ("a", 1, None),
        ("</s>", 1, STOP),
    ]


def test_only_the_last_token_of_a_merged_output_is_hidden():
    output = make_output(["a", "b", "</s>"])
    output.add(EngineOutput(0, tokens(0, 1, 2), STOP))
    assert output.take().text == "ab"


def test_held_back_text_is_released_before_a_stop_token():
    assert deltas(["a<", "</s>"], reason=STOP, stop=["<end>"]) == [("a", 1, None), ("<", 1, STOP)]


# -- numbers --


def test_cumulative_logprob():
    output = make_output(["a", "b", "c"])
    seen = []
    for i, logprob in enumerate([-0.5, -1.0, -0.25]):
        output.add(EngineOutput(0, [SampledToken(i, TokenLogprobs(logprob, 1, []))]))
        seen.append(output.take().cumulative_logprob)
    assert seen == [-0.5, -1.5, -1.75]


def test_cumulative_logprob_is_a_number_without_logprobs():
    output = make_output(["a"])
    output.add(EngineOutput(0, tokens(0), LENGTH))
    assert output.take().cumulative_logprob == 0.0


def test_cumulative_logprob_stops_at_a_stop_string():
    output = make_output([".", "b"], stop=["."])
    both = [SampledToken(i, TokenLogprobs(-1.0, 1, [])) for i in range(2)]
    output.add(EngineOutput(0, both))
    assert output.take().cumulative_logprob == -1.0


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_usage():
    clock = FakeClock()
    output = make_output(["a", "b"], num_prompt_tokens=7, clock=clock)
    common = dict(num_cached_tokens=4, scheduled_time=100.25)
    clock.now = 101.5
    output.add(EngineOutput(0, tokens(0), **common))
    clock.now = 102.0
    output.add(EngineOutput(0, tokens(1), LENGTH, **common))
    clock.now = 103.0
    assert output.usage() == AnswerUsage(
        prompt_tokens=7,
        cached_tokens=4,
        output_tokens=2,
        queue_ms=250.0,
        ttft_ms=1500.0,
        total_ms=3000.0,
    )


def test_usage_of_a_request_that_never_left_the_queue():
    clock = FakeClock()
    output = make_output([], clock=clock)
    clock.now = 100.5
    output.add(EngineOutput(0, [], FinishReason.SHUTDOWN))
    assert output.usage() == AnswerUsage(
        prompt_tokens=3, cached_tokens=0, output_tokens=0, queue_ms=0.0, ttft_ms=0.0, total_ms=500.0
    )


def test_times_count_from_arrival():
    """A request may arrive long before its text side is created."""
    output = make_output(["a"], clock=FakeClock(), arrival_time=98.0)
    output.add(EngineOutput(0, tokens(0), STOP, scheduled_time=99.0))
    usage = output.usage()
    assert (usage.queue_ms, usage.ttft_ms, usage.total_ms) == (1000.0, 2000.0, 2000.0)


def test_hidden_stop_token_counts_as_a_token():
    output = make_output(["a", "</s>"])
    output.add(EngineOutput(0, tokens(0, 1), STOP))
    delta = output.take()
    assert (len(delta.tokens), output.usage().output_tokens) == (2, 2)


def test_usage_of_several_answers():
    a, b = AnswerUsage(7, 4, 2, 1.0, 20.0, 30.0), AnswerUsage(7, 7, 5, 3.0, 25.0, 60.0)
    assert AnswerUsage.of_request([a, b]) == AnswerUsage(7, 4, 7, 1.0, 20.0, 60.0)


# -- blanks --


def test_trailing_blanks_are_trimmed():
    pieces = ["a", " b", "\n", " \n", "c", "  ", "\n"]
    assert deltas(pieces, trim_blanks=True) == [
        ("a", 1, None),
        (" b", 1, None),
        ("\n \nc", 3, None),
        ("", 2, LENGTH),
    ]


def test_blanks_that_may_start_a_stop_string():
    assert deltas(["a", " ", "\n", "b"], trim_blanks=True, stop=["\nc"])[-1] == (" \nb", 3, LENGTH)
