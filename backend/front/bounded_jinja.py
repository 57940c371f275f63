"""Chat templates as Jinja runs them, within bounds of time and size.

Templates come with models and get values from clients. Jinja's sandbox keeps them from the rest of
the process, but not from running for ever or filling the memory. Here every loop, call and filter
looks at the clock of the thread's own computing time, and what makes text or lists longer looks at
its size before it does.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateError, ext, nodes, pass_context
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 1.0  # of the thread's computing time
MAX_CHARS = 2**24  # of all text put out, and of each text on the way to it
_MAX_WIDTH = 1000  # of what is padded or indented
_MAX_BITS = 2**16  # of a whole number
_CHARS_PER_ITEM = 16  # what an item of a list counts, besides its own text
# Functions and filters that make their input as wide as a number says.
_WIDENING = "batch center expandtabs indent ljust rjust slice tojson wordwrap zfill"
# Filters that don't turn lists into text.
_TAKES_LISTS = (
    "attr batch count d default dictsort first groupby items last length list map max min random "
    "reject rejectattr reverse select selectattr slice sort unique"
)
_WIDE_FORM = re.compile(r"%[^a-zA-Z%]*(\d{4,}|\*)|\{[^{}]*(\d{4,}|\{)")


class Exceeded(Exception):
    """A template takes more time or space than it may."""


class _GenerationTag(ext.Extension):
    """`{% generation %}`, which marks answers for training, leaves its content as it is."""

    tags = {"generation"}  # noqa: RUF012 -- as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        scope = nodes.Scope(lineno=next(parser.stream).lineno)
        scope.body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return scope


class _Instrument(NodeTransformer):
    """Makes bodies report what they cost, and `~` a call that can look at its size."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        tilde = nodes.EnvironmentAttribute("tilde", lineno=node.lineno)
        return nodes.Call(tilde, node.nodes, [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_step(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_step(node)

    def _with_step(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        step = nodes.EnvironmentAttribute("step", lineno=node.lineno)
        size = nodes.Const(sum(map(_text_size, node.body)), lineno=node.lineno)
        call = nodes.Call(step, [size], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node  # type: ignore[no-any-return]


def _text_size(node: nodes.Node) -> int:
    """Characters of plain text in a body, without those of bodies that report for themselves."""
    if isinstance(node, nodes.TemplateData):
        return len(node.data)
    if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
        return 0
    return sum(map(_text_size, node.iter_child_nodes()))


class _Use(threading.local):
    """What the rendering on this thread has used."""

    end = 0.0  # of time.thread_time()
    chars = 0


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """What transformers gives to chat templates, within bounds."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        self._use = _Use()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # would compute constants while it compiles
            extensions=[_GenerationTag, ext.loopcontrols],
            finalize=self._finalize,
        )
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters["tojson"] = _to_json
        self.filters = {name: self._bounded(name, f) for name, f in self.filters.items()}

    def render(self, template: Template, values: Mapping[str, Any]) -> str:
        """The text of a template.

        Raises:
            Exceeded: it takes too long or grows too large.
            Exception: what the template raises.
        """
        self._use.end = time.thread_time() + MAX_SECONDS
        self._use.chars = 0
        pieces, size = [], 0
        for piece in template.generate(values):
            pieces.append(piece)
            size += len(piece)
            self._check_size(size)
        return "".join(pieces)

    # -- what templates reach --

    def step(self, size: int) -> None:
        """A body runs once more, which has `size` characters of plain text."""
        if time.thread_time() > self._use.end:
            raise Exceeded(f"it takes more than {MAX_SECONDS:g} s")
        self._use.chars += size
        self._check_size(self._use.chars)

    def tilde(self, *parts: Any) -> str:
        """What `~` makes of its operands."""
        self._check_size(sum(map(_size, parts)))
        texts = [str(part) for part in parts]
        return "".join(texts)

    @pass_context  # so that Jinja does not call it while it compiles
    def _finalize(self, _context: Context, value: Any) -> str:
        if isinstance(value, str):
            self.step(len(value))
            return value
        self.step(_size(value))
        return str(value)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        name, owner = getattr(obj, "__name__", ""), getattr(obj, "__self__", None)
        self.step(0)
        if name == "join" and args:
            self._check_join(args[0], owner)
        elif isinstance(owner, str):
            self._check_text(name, owner, args, kwargs)
        return self._checked(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped:
            self._check_form(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.step(0)
        if operator == "%" and isinstance(left, str):
            self._check_form(left)
            self._check_size(len(left) + _size(right))
        elif operator == "+":
            self._check_size(_length(left) + _length(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() * max(right, 0))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() + right.bit_length())
        elif operator == "*":
            for number, other in ((left, right), (right, left)):
                if isinstance(number, int):
                    self._check_size(_length(other) * number)
        return super().call_binop(context, operator, left, right)

    # -- bounds --

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is checked before and after."""
        takes_lists = name in _TAKES_LISTS.split()
        start = int(hasattr(function, "jinja_pass_arg"))  # Jinja's own first argument

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.step(0)
            own, values = args[:start], list(args[start:])
            if values and isinstance(values[0], Iterator):
                values[0] = list(values[0])
            if not takes_lists:
                self._check_size(sum(map(_size, values)))
            if name == "join":
                self._check_join(values[0], (*values[1:2], kwargs.get("d", ""))[0])
            elif name == "format":
                self._check_form(values[0])
            else:
                self._check_text(name, values[0] if values else None, values[1:], kwargs)
            return self._checked(function(*own, *values, **kwargs))

        return bounded

    def _check_text(self, name: str, text: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Before a function with this name makes a longer text of `text`."""
        if name in _WIDENING.split():
            for value in (*args, *kwargs.values()):
                if isinstance(value, int) and value > _MAX_WIDTH:
                    raise Exceeded(f"it asks for a width of more than {_MAX_WIDTH}")
        elif name == "replace" and len(args) > 1:
            text, old, new = map(str, (text, *args[:2]))
            self._check_size(len(text) + text.count(old) * len(new))

    def _check_join(self, texts: Any, separator: Any) -> None:
        length = len(texts) if isinstance(texts, Sized) else 0
        self._check_size(_size(texts) + length * _size(separator))

    def _check_form(self, form: Any) -> None:
        if isinstance(form, str) and _WIDE_FORM.search(form):
            raise Exceeded(f"it asks for a width of more than {_MAX_WIDTH}")

    def _check_bits(self, bits: int) -> None:
        if bits > _MAX_BITS:
            raise Exceeded("a number gets too large")

    def _checked(self, value: Any) -> Any:
        self._check_size(_length(value))
        return value

    def _check_size(self, size: int) -> None:
        if size > MAX_CHARS:
            raise Exceeded(f"its text gets longer than {MAX_CHARS} characters")

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Instrument().visit(source), *args, **kwargs)


def _length(value: Any) -> int:
    """What a text or list counts, without looking into it."""
    if isinstance(value, str):
        return len(value)
    return len(value) * _CHARS_PER_ITEM if isinstance(value, list | tuple) else 0


def _size(value: Any) -> int:
    """What a value counts with all that it holds, each time; stops above the bound."""
    size, stack = 0, [value]
    while stack and size <= MAX_CHARS:
        value = stack.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, list | tuple | dict):
            size += len(value) * _CHARS_PER_ITEM
            stack += [*value, *value.values()] if isinstance(value, dict) else value
        else:
            size += 1
    return size


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # local time, as in transformers


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: Jinja's own escapes what is special in HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
