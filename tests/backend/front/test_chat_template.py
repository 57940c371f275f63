"""What conversations look like for the model, and what is refused."""

import json

import pytest

from tritium.backend.errors import InvalidArgument
from tritium.backend.front.chat import Chat
from tritium.backend.front.chat_template import after_answer, inside_answer, render

BOS, EOS = "<|im_start|>", "<|im_end|>"
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
HI = [{"role": "user", "content": "Hi"}]
HI_HELLO = [*HI, {"role": "assistant", "content": "Hello, "}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

CHATML = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = (
    "{% for message in messages %}{{ message.role }}:"
    "{% for part in message['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
)
PARTS_OR_STRING = (
    "{% set rest = messages[0:] %}{% for m in rest %}{% set content = m.content %}"
    "{% if content is string %}{{ content }}{% else %}"
    "{% for part in content | list %}[{{ part['text'] }}]{% endfor %}{% endif %}{% endfor %}"
)


def chat(messages, template_kwargs=None, starts=True, continues=False) -> Chat:
    return Chat(messages, template_kwargs or {}, starts, continues)


def text(template, messages=HI, tools=None, **options) -> str:
    return render(template, {"bos_token": "<s>"}, chat(messages, **options), tools)


def refusal(template, messages=HI, tools=None, **options) -> str:
    with pytest.raises(InvalidArgument) as refused:
        text(template, messages, tools, **options)
    return str(refused.value)


# -- SmolLM2's template --


def test_chat_template_of_a_conversation(tokenizer):
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "你好"},
    ]
    assert text(tokenizer.chat_template, conversation) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\n你好<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chat_template_adds_its_system_message(tokenizer):
    assert text(tokenizer.chat_template) == (
        f"{BOS}system\n{DEFAULT_SYSTEM}{EOS}\n{BOS}user\nHi{EOS}\n{BOS}assistant\n"
    )


def test_template_that_ignores_tools(tokenizer):
    """SmolLM2's template does."""
    message = refusal(tokenizer.chat_template, tools=[TOOL])
    assert message == "tools: this model's chat template does not support them"


# -- what a template gets --


def test_template_that_lists_tools():
    template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    assert text(template, tools=[TOOL]) == f"{json.dumps(TOOL)}\nHi"
    assert text(template) == "Hi"


def test_template_that_is_only_for_tools():
    """Some models have two templates, one of them named tool_use."""
    templates = {"default": "plain", "tool_use": "{{ tools | length }} tools"}
    assert text(templates, tools=[TOOL]) == "1 tools"
    assert text(templates) == "plain"
    assert text("{{ tools | length }}", tools=[TOOL]) == "1"
    message = refusal({"rag": "x"})
    assert message == (
        "messages: none of this model's chat templates is named 'default'; it has rag"
    )


@pytest.mark.parametrize(
    ("template", "right"),
    [
        ("{{ bos_token }}", "<s>"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("a{% generation %}b{% set c = 1 %}{% endgeneration %}{{ c }}", "ab"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x ~ none }}", "2None"),
        ("{{ documents }} {{ tools }} {{ missing }}", "None None "),
        ("{% for m in messages %}{{ loop.length }}{{ loop.last }}{% endfor %}", "1True"),
        ("{{ '%d of %d' % (128000, 9) }}{{ '%s in 20240' | format(1) }}", "128000 of 91 in 20240"),
        ("{% macro m(x) %}{{ x }}!{% endmacro %}{{ m('a') * 2 }}", "a!a!"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ messages[0].content is string }} {{ messages[0].other is defined }}", "True False"),
    ],
)
def test_what_templates_can_use(template, right):
    assert text(template) == right


def test_fields_that_are_null_are_missing():
    message = {"role": "assistant", "content": None, "reasoning": "so"}
    template = "{{ messages[0].content is defined }} {{ messages[0].reasoning_content }}"
    assert text(template, [message]) == "False so"


def test_template_raises_an_error():
    message = refusal("{{ raise_exception('roles must alternate') }}")
    assert message == "messages: the chat template refuses them: roles must alternate"
    assert len(refusal("{{ raise_exception('x' * 10000) }}")) < 400
    assert refusal("{% for %}").startswith("messages: the chat template refuses them: ")
    assert refusal(None) == "messages: this model has no chat template; send text_input"
    refusal("{{ messages.append(1) }}")
    refusal("{{ ''.__class__.__mro__ }}")


@pytest.mark.parametrize(
    "message", [{"role": "user", "content": "Hi \ud800"}, {"role": "\ud800", "content": "Hi"}]
)
def test_lone_surrogate_in_a_message_is_refused(message):
    """JSON can contain a lone surrogate, UTF-8 can't."""
    refused = refusal(CHATML, [message])
    assert refused.startswith("messages: ")
    refused.encode()


# -- chat_template_kwargs --


def test_chat_template_kwargs():
    template = (
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    assert text(template, template_kwargs={"enable_thinking": False}) == "<think></think>"
    assert text(template, template_kwargs={"other": 1}) == ""
    assert text("{{ documents[0] }}", template_kwargs={"documents": ["d"]}) == "d"


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "bos_token",
        "raise_exception",
    ],
)
def test_chat_template_kwargs_that_the_server_gives_itself(name):
    message = refusal(CHATML, template_kwargs={name: 1})
    assert message.startswith(f"chat_template_kwargs: '{name}' is not allowed")


# -- content in parts --

TWO = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]


@pytest.mark.parametrize(
    ("template", "messages", "right"),
    [
        (CHATML, TWO, f"{BOS}user\na\nb{EOS}\n{BOS}assistant\n"),
        (PARTS, TWO, "user:[a][b]"),
        (PARTS, HI, "user:[Hi]"),
        (PARTS_OR_STRING, TWO, "[a][b]"),
        (PARTS_OR_STRING, HI, "Hi"),
    ],
)
def test_parts_come_as_the_template_reads_them(template, messages, right):
    before = json.dumps(messages)
    assert text(template, messages) == right
    assert json.dumps(messages) == before


# -- add_generation_prompt and continue_final_message --


def test_no_generation_prompt():
    assert text(CHATML, starts=False) == f"{BOS}user\nHi{EOS}\n"


@pytest.mark.parametrize(
    ("template", "right"),
    [
        (CHATML, f"{BOS}user\nHi{EOS}\n{BOS}assistant\nHello, "),
        (CHATML.replace("['content']", "['content'] | trim"), "Hello,"),
        (PARTS, "user:[Hi]assistant:[Hello, "),
    ],
)
def test_the_last_message_goes_on(template, right):
    assert text(template, HI_HELLO, starts=False, continues=True).endswith(right)


def test_the_last_part_goes_on():
    last = {"role": "assistant", "content": TWO[0]["content"]}
    assert text(PARTS, [*HI, last], starts=False, continues=True).endswith("[a][b")
    assert text(CHATML, [*HI, last], starts=False, continues=True).endswith("assistant\na\nb")


@pytest.mark.parametrize(
    ("template", "last", "said"),
    [
        (CHATML, {"role": "assistant", "tool_calls": []}, "has no 'content'"),
        ("{{ messages }}", {"role": "assistant", "content": "x"}, "does not use 'content'"),
        ("{{ messages[0].content }}", {"role": "assistant", "content": "x"}, "as it is"),
        ("{{ messages[-1].content[:2] }}", {"role": "assistant", "content": "xyz"}, "as it is"),
    ],
)
def test_message_that_cannot_go_on(template, last, said):
    message = refusal(template, [*HI, last], starts=False, continues=True)
    assert message.startswith("continue_final_message: true is not allowed; ")
    assert said in message


# -- what ends an answer --


@pytest.mark.parametrize(
    ("template", "right"),
    [
        (CHATML, f"{EOS}\n"),
        (PARTS, "]"),
        ("{{ raise_exception('no') }}", ""),
        ("nothing", ""),
        (None, ""),
    ],
)
def test_text_after_an_answer(template, right):
    assert after_answer(template, {}) == right


SEVERAL_MESSAGES = (
    "{% set m = messages[1] %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}<|end|>{% endif %}"
    "{% if m.content %}<text>{{ m.content }}<|end|>{% endif %}"
    "{% for call in m.tool_calls %}<call>{{ call.function.name }}<|end|>{% endfor %}"
)


def test_text_inside_an_answer():
    inside = inside_answer(SEVERAL_MESSAGES, {})
    assert inside == "<|end|><text>" + "<|end|><call>" * 2
    assert inside_answer(CHATML, {}) == ""
