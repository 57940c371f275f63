"""A conversation as the model's chat template writes it.

The template gets what transformers gives it. Content in parts reaches it as in vLLM: as a list if
the template iterates over a message's content, else as one text, joined by line breaks.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes

from tritium.backend.errors import InvalidArgument
from tritium.backend.front.bounded_jinja import BoundedEnvironment
from tritium.backend.front.chat import Chat

Templates = str | dict[str, str] | None  # one, or several by name; None: the model has none

# Names that a template gets here, or that choose how it is applied.
_OWN_NAMES = {
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
}
# Older and newer names of an answer's reasoning; templates read different ones.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MARKED = "CONTINUE_FROM_HERE"
_MARK = f"{_MARKED} "
_MAX_ERROR = 300


def render(
    templates: Templates,
    special_tokens: Mapping[str, str],
    chat: Chat,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """The prompt's text.

    Args:
        special_tokens: Texts by role, such as bos_token.
        tools: Functions that the model may call.

    Raises:
        InvalidArgument: the model has no chat template, or the template refuses these messages,
            ignores tools, takes too long or grows too large.
    """
    if not templates:
        raise InvalidArgument("messages: this model has no chat template; send text_input")
    own = _OWN_NAMES | special_tokens.keys() | _environment().globals.keys()
    if taken := sorted(own & chat.template_kwargs.keys()):
        raise InvalidArgument(
            f"chat_template_kwargs: {taken[0]!r} is not allowed; the server gives it to the "
            "template itself"
        )
    try:
        text = _render(_choose(templates, bool(tools)), special_tokens, chat, tools)
        text.encode()
    except InvalidArgument:
        raise
    except Exception as error:  # noqa: BLE001 -- a template may raise anything
        raise InvalidArgument(
            f"messages: the chat template refuses them: {str(error) or repr(error):.{_MAX_ERROR}}"
        ) from None
    if tools and text == _without_tools(templates, special_tokens, chat):
        raise InvalidArgument("tools: this model's chat template does not support them")
    return text


def _without_tools(
    templates: str | dict[str, str], special_tokens: Mapping[str, str], chat: Chat
) -> str | None:
    """The text of the same conversation; None if the template can't do without tools."""
    try:
        return _render(_choose(templates, False), special_tokens, chat, None)
    except Exception:  # noqa: BLE001 -- a template may raise anything
        return None


def after_answer(templates: Templates, special_tokens: Mapping[str, str]) -> str:
    """What the template writes after an answer that ends a conversation; "" if it is unknown."""
    return _around_marks(templates, special_tokens, {"content": _MARKED})[-1]


def inside_answer(templates: Templates, special_tokens: Mapping[str, str]) -> str:
    """What the template writes between an answer's reasoning, its text and its calls of tools."""
    call = {"name": _MARKED, "arguments": {}}
    reasoning = {"reasoning": _MARKED}
    calls = {"tool_calls": [{"type": "function", "id": "000000000", "function": call}]}
    text = {"content": _MARKED}
    shapes = (reasoning | text, text | calls, reasoning | calls | {"content": ""})
    return "".join(
        part
        for message in shapes
        for part in _around_marks(templates, special_tokens, message)[1:-1]
    )


def _around_marks(
    templates: Templates, special_tokens: Mapping[str, str], answer: dict[str, Any]
) -> list[str]:
    """The text before, between and after the marks of an answer; one "" if it is unknown."""
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", **answer}]
    try:
        text = render(templates, special_tokens, Chat(messages, {}, False, False))
    except InvalidArgument:
        return [""]
    return text.split(_MARKED) if _MARKED in text else [""]


def _choose(templates: str | dict[str, str], has_tools: bool) -> str:
    if isinstance(templates, str):
        return templates
    name = "tool_use" if has_tools and "tool_use" in templates else "default"
    if name not in templates:
        raise InvalidArgument(
            f"messages: none of this model's chat templates is named {name!r}; it has "
            f"{', '.join(templates):.{_MAX_ERROR}}"
        )
    return templates[name]


@lru_cache(1)
def _environment() -> BoundedEnvironment:
    return BoundedEnvironment()


class _Compiled:
    """A template, and in which form it reads contents."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        tree = environment.parse(source)
        self.takes_parts = any(_content_loops(tree))
        tests = {test.name for test in tree.find_all(nodes.Test)}
        self.takes_text = not self.takes_parts or "string" in tests
        self.template: Template = environment.from_string(source)


_compiled = lru_cache(16)(_Compiled)


def _render(
    source: str, special_tokens: Mapping[str, str], chat: Chat, tools: list[Any] | None
) -> str:
    compiled = _compiled(source)
    messages = [_message(message, compiled) for message in chat.messages]
    final = ""
    if chat.continue_final_message:
        final = _mark(messages[-1], source)
    text = _environment().render(
        compiled.template,
        {
            "documents": None,
            **chat.template_kwargs,
            **special_tokens,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": chat.add_generation_prompt,
        },
    )
    return _cut(text, final) if chat.continue_final_message else text


def _message(message: dict[str, Any], compiled: _Compiled) -> dict[str, Any]:
    """A message as the template gets it; a copy, down to the parts of its content."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    content = message.get("content")
    if isinstance(content, list):
        if compiled.takes_parts:
            message["content"] = [dict(part) for part in content]
        else:
            message["content"] = "\n".join(part["text"] for part in content)
    elif isinstance(content, str) and not compiled.takes_text:
        message["content"] = [{"type": "text", "text": content}]
    return message


# -- continue_final_message --


def _mark(message: dict[str, Any], source: str) -> str:
    """Mark the end of the message's last text, and return this text."""
    content = message.get("content")
    if content is None or content == []:
        _refuse_to_continue("the last message has no 'content' to continue")
    if "content" not in source:
        _refuse_to_continue("the chat template does not use 'content'")
    if isinstance(content, list):
        text = str(content[-1]["text"])
        content[-1]["text"] = text + _MARK
    else:
        text = str(content)
        message["content"] = text + _MARK
    return text


def _cut(text: str, final: str) -> str:
    """A conversation up to the mark. A template that strips contents also strips before it."""
    end = text.rfind(_MARKED)
    if end < 0 or final.strip() not in text:
        _refuse_to_continue("the chat template does not write the last message as it is")
    keeps_blanks = text.startswith(_MARK, end)
    return text[:end] if keeps_blanks else text[:end].rstrip()


def _refuse_to_continue(reason: str) -> None:
    raise InvalidArgument(f"continue_final_message: true is not allowed; {reason}")


# -- which templates iterate over contents --


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    """Loops over a message's content, by vLLM's rule: whatever name the message has by then."""
    conversations = _aliases(tree, {"messages"})
    loops = list(tree.find_all(nodes.For))
    messages = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, nodes.Name) and _named(loop.iter) in conversations
    }
    messages = _aliases(tree, messages)
    contents = {
        assignment.target.name
        for assignment in tree.find_all(nodes.Assign)
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, messages)
    }
    contents = _aliases(tree, contents)
    for loop in loops:
        if _is_content(loop.iter, messages) or _named(loop.iter) in contents:
            yield loop


def _aliases(tree: nodes.Template, names: set[str]) -> set[str]:
    """These variables, and those that are set to one of them or to a slice of it."""
    while True:
        more = {
            assignment.target.name
            for assignment in tree.find_all(nodes.Assign)
            if isinstance(assignment.target, nodes.Name) and _named(assignment.node) in names
        }
        if more <= names:
            return names
        names = names | more


def _inner(node: nodes.Node | None) -> nodes.Node | None:
    """An expression without filters, tests and slices around it."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _named(node: nodes.Node) -> str | None:
    inner = _inner(node)
    return inner.name if isinstance(inner, nodes.Name) else None


def _is_content(node: nodes.Node, messages: set[str]) -> bool:
    """Whether an expression is message.content or message['content']."""
    inner = _inner(node)
    if isinstance(inner, nodes.Getattr):
        name: Any = inner.attr
    elif isinstance(inner, nodes.Getitem) and isinstance(inner.arg, nodes.Const):
        name = inner.arg.value
    else:
        return False
    return name == "content" and _named(inner.node) in messages
