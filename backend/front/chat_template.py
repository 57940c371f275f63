"""Renders conversations by a model's chat template, within bounds of time and size.

The template comes with the model and runs in Jinja's sandbox, with the extensions that transformers
gives to templates. Knows nothing of tokens.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from tritium.backend.errors import InvalidArgument

_MAX_SECONDS = 5.0
_MAX_CHARS = 2**24  # of a text, and of any text on the way to it
_MAX_MADE = 2**28  # characters of all texts on the way together
_MAX_EXPONENT = 64
_DIGITS = re.compile("[0-9]{8,}")
# Names that the renderer itself gives to a template, or that would replace the template.
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
    }
)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation is rendered."""

    add_generation_prompt: bool = True  # whether the assistant's turn is begun
    continue_final_message: bool = False  # whether the last message's turn is left open
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables


class ChatTemplate:
    """A model's chat template.

    Args:
        template: Jinja; or templates by name, of which `default` and `tool_use` are used.
        special_tokens: Texts by role, such as bos_token.

    Raises:
        ValueError: the template is not valid.
    """

    def __init__(
        self, template: str | Mapping[str, str], special_tokens: Mapping[str, str]
    ) -> None:
        sources = {"default": template} if isinstance(template, str) else dict(template)
        try:
            trees = {name: _ENVIRONMENT.parse(source) for name, source in sources.items()}
            self._templates = {
                name: _ENVIRONMENT.from_string(source) for name, source in sources.items()
            }
        except TemplateError as error:
            raise ValueError(f"The chat template is not valid: {error}") from None
        self._reads_parts = {name: _reads_parts(tree) for name, tree in trees.items()}
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        options: ChatOptions | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: At least one; a content that is a list has parts of type text.
            tools: Tools that the model may call.

        Raises:
            InvalidArgument: the template rejects these messages or ignores tools, or takes too
                long; names the field.
        """
        options = options or ChatOptions()
        try:
            text = self._render(messages, tools, options)
            if tools and text == self._render(messages, None, options):
                raise InvalidArgument("tools: this model's chat template does not support them")
            return _up_to_last_message(text, messages) if options.continue_final_message else text
        except InvalidArgument:
            raise
        except Exception as error:  # noqa: BLE001 -- a template may raise anything
            reason = str(error) or type(error).__name__
            raise InvalidArgument(
                f"messages: the chat template refuses them: {reason:.500}"
            ) from None

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: ChatOptions,
    ) -> str:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ValueError(f"the model has only the templates {', '.join(self._templates)}")
        if not self._reads_parts[name]:
            messages = [_with_joined_text(message) for message in messages]
        variables = {
            **self._special_tokens,
            **options.template_kwargs,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": options.add_generation_prompt,
        }
        _BUDGET.begin()
        return _bounded_concat(self._templates[name].generate(variables))


def _with_joined_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message for a template that expects text: parts are joined by line breaks, as by vLLM."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _up_to_last_message(text: str, messages: list[dict[str, Any]]) -> str:
    """The rendered text without what ends the last message's turn."""
    content = messages[-1].get("content")
    if isinstance(content, list):
        content = content[-1]["text"]
    last = content.strip() if isinstance(content, str) else ""
    start = text.rfind(last)
    if not last or start < 0:
        raise InvalidArgument(
            "continue_final_message: the last message's content is empty, or the chat template "
            "does not show it as it is"
        )
    whole = str(content).lstrip()  # with the blanks at its end, if the template keeps them
    return text[:start] + (whole if text.startswith(whole, start) else last)


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether a template goes through the parts of a message's content, as vLLM decides it."""
    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, set())
    }
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Whether this is `x.content`, `x["content"]`, or a variable that was set to it."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    return isinstance(node, nodes.Name) and node.name in names


# -- bounds: everything that could go on or grow for ever asks `_check` --


class _TooMuch(Exception):
    pass


class _Budget(threading.local):
    """What is left of the time and size of the rendering on this thread."""

    deadline = 0.0
    chars = 0

    def begin(self) -> None:
        self.deadline, self.chars = time.monotonic() + _MAX_SECONDS, _MAX_MADE

    def check(self, made: int = 0) -> None:
        """Pay for a step, and for a text of so many characters."""
        self.chars -= made
        if time.monotonic() > self.deadline:
            raise _TooMuch(f"it takes longer than {_MAX_SECONDS:g} s")
        _check_size(made if self.chars >= 0 else _MAX_CHARS + 1)


_BUDGET = _Budget()


def _check_size(size: int) -> None:
    if size > _MAX_CHARS:
        raise _TooMuch(f"it makes more than {_MAX_CHARS} characters")


def _counted(iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        _BUDGET.check()
        yield item


def _bounded(value: Any) -> Any:
    if hasattr(value, "__len__"):
        _BUDGET.check(len(value))
    return value


def _bounded_concat(pieces: Iterable[str]) -> str:
    size, kept = 0, []
    for piece in pieces:
        size += len(piece)
        _check_size(size)
        kept.append(piece)
    return "".join(kept)


def _check_numbers(arguments: Iterable[Any]) -> None:
    """Numbers may be sizes, as in "a".center(n)."""
    for argument in arguments:
        if isinstance(argument, int):
            _check_size(abs(argument))


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        _BUDGET.check()
        _check_numbers((*arguments, *named.values()))
        return function(*arguments, **named)

    return call


class _Bounds(NodeTransformer):
    """Puts the checks into a template: into its loops and its concatenations."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node, "bounded", [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks what a model is trained on: just the text."""

    tags = {"generation"}  # noqa: RUF012 -- as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _generate(self, source: nodes.Template, *arguments: Any, **named: Any) -> Any:
        return super()._generate(_Bounds().visit(source), *arguments, **named)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped:  # a string's `format`
            _check_widths(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _BUDGET.check()
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(times, int):
                    _check_size(len(sequence) * max(times, 0))
        if operator == "**" and not -_MAX_EXPONENT <= right <= _MAX_EXPONENT:
            raise _TooMuch(f"it raises to the power {right}")
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *arguments: Any, **named: Any) -> Any:
        _BUDGET.check()
        _check_numbers((*arguments, *named.values()))
        return super().call(context, function, *arguments, **named)


def _check_widths(text: str) -> None:
    """Runs of digits in a format string may be widths."""
    for digits in _DIGITS.findall(text):
        _check_size(int(digits[:20]))


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As transformers has it: Jinja's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.concat = _bounded_concat  # type: ignore[method-assign]
    environment.filters["tojson"] = _to_json
    environment.filters = {name: _checked(f) for name, f in environment.filters.items()}
    environment.filters |= {"counted": _counted, "bounded": _bounded}
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    del environment.globals["lipsum"]
    return environment


_ENVIRONMENT = _environment()
