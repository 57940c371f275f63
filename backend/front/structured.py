"""Structured outputs: which tokens an answer may go on with, so that it has the form demanded.

Compiles forms with llguidance, off everybody's critical path. The engine knows the results as
`Grammar` and `GrammarState` of `backend/engine`, and nothing of JSON or regular expressions.
"""

import json
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from tritium.backend.errors import InvalidArgument, Unsupported
from tritium.backend.front.structured_params import StructuredOutputs

_NUM_THREADS = 2
_MAX_GRAMMARS = 32  # kept compiled; the worst take 40 MiB each, most are compiled in 5 ms
# A model that likes blanks would else write them until max_tokens. Enough for ten levels.
_BLANKS = r"[ \t\r\n]{1,41}"
_LIMITS = LLParserLimits(verbose_errors=False)  # no parser states in messages

# llguidance bounds the work on a form, but for these: far beyond, it takes minutes or gigabytes.
_MAX_INTERSECTIONS = 16  # of regular expressions
_MAX_PATTERN_PROPERTIES = 100
_MAX_MULTIPLE_OF = 100_000

_SUBSCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SUBSCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
_REFERRING = {"$ref", "anyOf", "oneOf", "allOf"}
_REFINING = {*_SUBSCHEMAS_BY_NAME[:2], *_SUBSCHEMAS[:3], "pattern", "multipleOf"}


class GrammarState:
    """How far one answer has got in its grammar."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        """Why the last token was not accepted; "" where it was."""
        return _reason(self._matcher.get_error())

    def accept(self, token_id: int) -> bool:
        """Go on by the token that was sampled. False: it does not fit, nor will any other."""
        return self._matcher.consume_token(token_id)

    @staticmethod
    def fill_masks(
        states: Sequence["GrammarState"],
        masks: np.ndarray,  # [num_rows, ceil(vocab_size / 32)] int32, changed in place
        rows: Sequence[int],  # one for each state
    ) -> None:
        """Set the bits (token % 32 of word token // 32) of the tokens that may come next, and of
        no others, in each state's row.

        Those that end the answer are among them where it is whole. Where a limit of the library
        is reached they are the only ones; then `accept()` says False.
        """
        assert masks.dtype == np.int32
        assert masks.flags.c_contiguous
        pairs = [(state._matcher, row) for state, row in zip(states, rows, strict=True)]
        _executor().unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.strides[0], len(masks))


class Grammar:
    """A form, compiled for one vocabulary. Never changes."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> GrammarState:
        """For a new answer."""
        return GrammarState(self._matcher.deep_copy())


class GrammarCompiler:
    """Compiles forms on threads of its own and keeps those that were asked for last.

    Args:
        tokenizer_json: The model's tokenizer, as in tokenizer.json.
        vocab_size: How many logits the model has.
        eos_token_ids: End an answer that is whole.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        _executor()  # here: its threads may run on the cores that this one may
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._tokenizer = self._pool.submit(
            LLTokenizer, tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        self._grammars: dict[StructuredOutputs, Future[Grammar]] = {}  # the latest used last
        self._lock = threading.Lock()

    def compile(self, form: StructuredOutputs) -> Future[Grammar]:
        """The grammar of a form, done at once where it is known.

        It raises InvalidArgument, which starts with the form's field, its value and what is wrong,
        or Unsupported, where llguidance does not take the model's tokenizer.
        """
        with self._lock:
            future = self._grammars.pop(form, None) or self._pool.submit(self._compile, form)
            self._grammars[form] = future
            if len(self._grammars) > _MAX_GRAMMARS:
                del self._grammars[next(iter(self._grammars))]
        return future

    def close(self) -> None:
        """Cancel what has not been started; what is being compiled can't be stopped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, form: StructuredOutputs) -> Grammar:
        try:
            tokenizer = self._tokenizer.result()
        except Exception as error:
            raise Unsupported(f"not supported with this tokenizer: {error}") from None
        try:
            matcher = LLMatcher(tokenizer, _source(form), log_level=0, limits=_LIMITS)
            trial = matcher.deep_copy()
            trial.compute_bitmask()  # some dead ends show only here
            if trial.is_error():
                raise ValueError(_reason(trial.get_error()))
        except (ValueError, RecursionError) as error:
            name, value = form.demand
            raise InvalidArgument(f"'{name}': {value!r:.100} is not allowed. {error}") from None
        return Grammar(matcher)


@cache
def _executor() -> LLExecutor:
    return LLExecutor()


def _reason(message: str) -> str:
    """The line of an error that says what is wrong; others show where, at length."""
    lines = [line.strip() for line in message.splitlines()]
    marked = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = (marked or lines or [""])[0]
    if reason.startswith("NoExtension"):
        return "No answer can have this form"
    return reason[:300]


def _source(form: StructuredOutputs) -> str:
    """A form in llguidance's language.

    Raises:
        ValueError: says what is wrong.
    """
    if form.regex is not None:
        # \d, \w and \s of ASCII, as in vLLM's default library and in patterns of JSON schemas.
        return LLMatcher.grammar_from_regex(regex_to_lark(form.regex, use_ascii="dws"))
    if form.choice is not None:
        # One terminal is one automaton. As alternatives of a rule, 2,000 are too many.
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in form.choice)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}\n")
    if form.grammar is not None:
        return LLMatcher.grammar_from_lark(_lark(form.grammar))
    schema = {"type": "object"} if form.json_schema is None else json.loads(form.json_schema)
    objects = list(_objects(schema))
    merges = any(map(_merges, objects))
    _check_costs(objects, merges)
    if not merges:
        _close_objects(schema)
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema),
        defaults={"whitespace_flexible": False}
        if form.disable_any_whitespace
        else {"whitespace_pattern": form.whitespace_pattern or _BLANKS},
    )


def _lark(grammar: str) -> str:
    if "%json" in grammar:
        raise ValueError("%json is not allowed in a grammar; use 'json' instead")
    if grammar.count("&") > _MAX_INTERSECTIONS:
        raise ValueError(f"At most {_MAX_INTERSECTIONS} & are allowed in a grammar")
    try:
        return any_to_lark(grammar)
    except Exception as error:  # of no common kind
        raise ValueError(
            f"It is neither Lark, which has a rule 'start:', nor GBNF, which has a rule "
            f"'root ::=': {error!s:.200}"
        ) from None


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All of a JSON value: a reference may make a schema of any."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            yield value
            stack += value.values()
        elif isinstance(value, list):
            stack += value


def _merges(schema: dict[str, Any]) -> bool:
    """Whether a value has to obey several schemas at once here."""
    referring = _REFERRING & schema.keys()
    all_of = schema.get("allOf")
    return (
        len(referring) > 1
        or bool(referring and _REFINING & schema.keys())
        or (isinstance(all_of, list) and len(all_of) > 1)
    )


def _check_costs(objects: list[dict[str, Any]], merges: bool) -> None:
    named = [schema.get("patternProperties") for schema in objects]
    num_named = sum(len(patterns) for patterns in named if isinstance(patterns, dict))
    if num_named > _MAX_PATTERN_PROPERTIES:
        raise ValueError(
            f"At most {_MAX_PATTERN_PROPERTIES} patternProperties are allowed in a schema; "
            f"here are {num_named}"
        )
    num_patterns = sum("pattern" in schema for schema in objects)
    if merges and num_patterns > _MAX_INTERSECTIONS:
        raise ValueError(
            f"At most {_MAX_INTERSECTIONS} patterns are allowed in a schema that combines schemas; "
            f"here are {num_patterns}"
        )
    multiples = {_digits(schema.get("multipleOf")) for schema in objects}
    largest = math.prod(multiples) if merges else max(multiples, default=1)
    if largest > _MAX_MULTIPLE_OF:
        raise ValueError(f"multipleOf is too large; at most {_MAX_MULTIPLE_OF} is allowed")


def _digits(number: Any) -> int:
    """A number without its decimal point; 1 for anything else."""
    if isinstance(number, bool | int):
        return abs(number)
    if not isinstance(number, float) or not math.isfinite(number):
        return 1
    return int("".join(map(str, Decimal(repr(number)).as_tuple().digits)))


def _close_objects(schema: Any) -> None:
    """Where a schema lists properties: demand an object with no others, unless it says otherwise.

    Strictly, any number would do, too, and models invent properties. As in vLLM with its default
    library. Where schemas are merged, one would forbid what the other lists.
    """
    if not isinstance(schema, dict):
        return
    if "properties" in schema or "patternProperties" in schema:
        schema.setdefault("type", "object")
        schema.setdefault("additionalProperties", False)
    for key in _SUBSCHEMAS_BY_NAME:
        by_name = schema.get(key)
        for value in by_name.values() if isinstance(by_name, dict) else ():
            _close_objects(value)
    for key in _SUBSCHEMAS:
        value = schema.get(key)
        for item in value if isinstance(value, list) else [value]:
            _close_objects(item)
