"""Chat templates: what they get, what they give, and that none goes on for ever."""

import json
import time

import pytest

from tritium.backend.errors import InvalidArgument
from tritium.backend.front import chat_template
from tritium.backend.front.chat_template import ChatOptions, ChatTemplate

USER = [{"role": "user", "content": "hi"}]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def render(template, messages=None, tools=None, **options) -> str:
    chat = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    return chat.render(messages or USER, tools, ChatOptions(**options))


def refusal(template, messages=None, tools=None, **options) -> str:
    with pytest.raises(InvalidArgument) as refused:
        render(template, messages, tools, **options)
    return str(refused.value)


# -- what templates get --


def test_what_transformers_gives_to_templates():
    assert render("{{ bos_token }}{{ eos_token }}{{ messages[0]['content'] }}") == "<s></s>hi"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ {'a': 1} | tojson(indent=1) }}") == '{\n "a": 1\n}'
    assert render("{% generation %}x{% endgeneration %}y") == "xy"
    assert (
        render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert render("  {% if true %}\n  a\n  {% endif %}\n") == "  a\n"
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert refusal("{{ raise_exception('no system message') }}").endswith("them: no system message")


def test_loops_know_where_they_are():
    letters = "{% for m in messages %}{{ loop.index }}{{ loop.length }}{{ loop.last }}{% endfor %}"
    assert render(letters, USER * 2) == "12False22True"


def test_the_assistant_turn_is_begun():
    template = "{% if add_generation_prompt %}<assistant>{% endif %}"
    assert render(template) == "<assistant>"
    assert render(template, add_generation_prompt=False) == ""


def test_template_kwargs():
    template = "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}"
    assert render(template) == ""
    assert render(template, template_kwargs={"enable_thinking": False}) == "off"
    # They come before what the renderer sets, and may replace special tokens.
    assert render("{{ messages | length }}", template_kwargs={"messages": []}) == "1"


def test_tools():
    tools = [{"function": {"name": "f"}}]
    template = "{{ messages[0].content }}{% if tools %}{{ tools | length }}{% endif %}"
    assert render(template, tools=tools) == "hi1"
    assert refusal(TURNS, tools=tools) == "tools: this model's chat template does not support them"
    by_name = {"default": "plain", "tool_use": "with tools"}
    assert render(by_name) == "plain"
    assert render(by_name, tools=tools) == "with tools"
    assert "only the templates rag" in refusal({"rag": "x"})


def test_parts_of_a_content():
    message = [{"role": "user", "content": PARTS}]
    assert render("{{ messages[0].content }}", message) == "a\nb"
    loop = "{% for m in messages %}{% for p in m['content'] %}{{ p.text }}|{% endfor %}{% endfor %}"
    assert render(loop, message) == "a|b|"
    named = "{% set c = messages[0].content %}{% for p in c %}{{ p.type }} {% endfor %}"
    assert render(named, message) == "text text "


def test_the_final_message_goes_on():
    answer = [*USER, {"role": "assistant", "content": "Sure "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(TURNS, answer, **options) == "<user>hi<end><assistant>Sure "
    trimmed = TURNS.replace("m.content", "m.content | trim")
    assert render(trimmed, answer, **options) == "<user>hi<end><assistant>Sure"
    parts = [*USER, {"role": "assistant", "content": PARTS}]
    assert render(TURNS, parts, **options) == "<user>hi<end><assistant>a\nb"
    assert refusal("nothing", answer, **options).startswith("continue_final_message: ")
    empty = [{"role": "assistant", "content": " "}]
    assert refusal(TURNS, empty, **options).startswith("continue_final_message: ")


def test_a_template_that_is_not_valid():
    with pytest.raises(ValueError, match=r"chat template is not valid: .*endfor"):
        ChatTemplate("{% for a in b %}", {})


def test_python_is_out_of_reach():
    assert "unsafe" in refusal("{{ messages.__class__.__mro__ }}")
    assert "unsafe" in refusal("{{ messages.append(1) }}")


# -- bounds --


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    ],
    ids=["loops", "recursion", "lists"],
)
def test_a_template_that_does_not_end(template, monkeypatch):
    monkeypatch.setattr(chat_template, "_MAX_SECONDS", 0.2)
    start = time.monotonic()
    assert "takes longer than 0.2 s" in refusal(template)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{% for i in range(9999) %}{{ 'a' * 9999999 }}{% endfor %}",
        "{% set x %}{% for i in range(9999) %}{{ 'a' * 9999999 }}{% endfor %}{% endset %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
        "{% endfor %}",
        "{{ 'a' | center(10**10) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '%10000000000d' % 1 }}",
    ],
)
def test_a_template_that_makes_too_much(template):
    start = time.monotonic()
    assert "makes more than 16777216 characters" in refusal(template)
    assert time.monotonic() - start < 2


def test_endless_recursion_and_powers():
    assert "recursion" in refusal("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    assert "to the power 100" in refusal("{{ messages | length ** 100 }}")


def test_the_next_one_has_all_its_time(monkeypatch):
    monkeypatch.setattr(chat_template, "_MAX_SECONDS", 0.2)
    chat = ChatTemplate("{{ messages | tojson }}", {})
    for _ in range(3):
        time.sleep(0.1)
        assert json.loads(chat.render(USER)) == USER
