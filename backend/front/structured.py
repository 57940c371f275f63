"""Structured outputs: which tokens may continue an answer, so that it satisfies its constraint.

Compiles constraints with llguidance on threads of its own. The engine sees the results as `Grammar`
and `GrammarState` (backend/engine/request.py), and knows nothing of JSON or regular expressions.
"""

import json
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from tritium.backend.errors import InvalidArgument, Unsupported
from tritium.backend.front.structured_params import StructuredOutputs

_NUM_THREADS = 2
_MAX_GRAMMARS = 32  # in the cache; the largest take 40 MiB each, most compile in 5 ms
# Whitespace between JSON's tokens: bounded, as some models would write it until max_tokens. Enough
# for ten levels of indentation.
_BLANKS = r"[ \t\r\n]{1,41}"
_LIMITS = LLParserLimits(verbose_errors=False)  # messages without parser states

# llguidance bounds the work per constraint, except for these: far beyond the limits here, it takes
# minutes or gigabytes.
_MAX_INTERSECTIONS = 16  # of regular expressions
_MAX_PATTERN_PROPERTIES = 100
_MAX_MULTIPLE_OF = 100_000

_SUBSCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SUBSCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
_REFERRING = {"$ref", "anyOf", "oneOf", "allOf"}
_REFINING = {*_SUBSCHEMAS_BY_NAME[:2], *_SUBSCHEMAS[:3], "pattern", "multipleOf"}


class _Sizes(NamedTuple):
    """How many tokens the model has, and how many the tokenizer knows: one may exceed the other."""

    model: int
    tokenizer: int


class GrammarState:
    """The position of one answer in its grammar."""

    __slots__ = ("_matcher", "_sizes")

    def __init__(self, matcher: LLMatcher, sizes: _Sizes) -> None:
        self._matcher = matcher
        self._sizes = sizes

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete and no token can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        """Why the last token was rejected; "" if it was accepted."""
        return _reason(self._matcher.get_error())

    def accept(self, token_id: int) -> bool:
        """Advance by the sampled token. False: the grammar rejects it; the answer must end."""
        return self._matcher.consume_token(token_id)

    @staticmethod
    def fill_masks(
        states: Sequence["GrammarState"],
        masks: NDArray[np.int32],  # [num_rows, ceil(vocab_size / 32)], changed in place
        rows: Sequence[int],  # one row of `masks` per state
    ) -> None:
        """Write each state's row: set the bits of the tokens that may come next, clear the others.

        Token t is bit t % 32 of word t // 32. EOS tokens are set where the answer is complete. If a
        limit of the library is reached, only they are set, and `accept()` then returns False.
        """
        assert masks.dtype == np.int32
        assert masks.flags.c_contiguous
        model, tokenizer = states[0]._sizes
        filled = masks
        if tokenizer > model:  # the library fills only rows for all of its tokens
            filled = np.zeros((len(masks), -(-tokenizer // 32)), dtype=np.int32)
        pairs = [(state._matcher, row) for state, row in zip(states, rows, strict=True)]
        _executor().unsafe_compute_mask_ptr(
            pairs, filled.ctypes.data, filled.strides[0], len(filled)
        )
        if tokenizer > model:
            masks[list(rows)] = filled[list(rows), : masks.shape[1]]
            if model % 32:
                masks[list(rows), -1] &= (1 << model % 32) - 1


class Grammar:
    """A constraint, compiled for one vocabulary. Immutable."""

    def __init__(self, matcher: LLMatcher, sizes: _Sizes) -> None:
        self._matcher = matcher
        self._sizes = sizes

    def start(self) -> GrammarState:
        """The state of a new, empty answer."""
        return GrammarState(self._matcher.deep_copy(), self._sizes)


class GrammarCompiler:
    """Compiles constraints on threads of its own, with a cache of the most recently used.

    Args:
        tokenizer_json: The model's tokenizer, as in tokenizer.json.
        vocab_size: Number of the model's logits.
        eos_token_ids: Tokens that end a complete answer.
        tokenizer_size: One more than the tokenizer's highest token id; None: `vocab_size`.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        tokenizer_size: int | None = None,
    ) -> None:
        self._sizes = _Sizes(vocab_size, tokenizer_size or vocab_size)
        _executor()  # created here, as its threads inherit this thread's CPU affinity
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._tokenizer = self._pool.submit(
            LLTokenizer,
            tokenizer_json,
            n_vocab=max(self._sizes),
            eos_token=[token_id for token_id in eos_token_ids if token_id < self._sizes.tokenizer],
        )
        self._grammars: dict[StructuredOutputs, Future[Grammar]] = {}  # least recently used first
        self._lock = threading.Lock()

    def compile(self, constraint: StructuredOutputs) -> Future[Grammar]:
        """The grammar of a constraint; already done if the cache has it.

        The future raises InvalidArgument, whose message starts with the field and its value, or
        Unsupported if llguidance can't use the model's tokenizer.
        """
        with self._lock:
            future = self._grammars.pop(constraint, None) or self._pool.submit(
                self._compile, constraint
            )
            self._grammars[constraint] = future
            if len(self._grammars) > _MAX_GRAMMARS:
                del self._grammars[next(iter(self._grammars))]
        return future

    def close(self) -> None:
        """Cancel compilations that have not started; running ones can't be stopped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, constraint: StructuredOutputs) -> Grammar:
        try:
            tokenizer = self._tokenizer.result()
        except Exception as error:  # noqa: BLE001 -- llguidance documents no exception types
            raise Unsupported(f"not supported with this tokenizer: {error}") from None
        try:
            matcher = LLMatcher(tokenizer, _source(constraint), log_level=0, limits=_LIMITS)
            trial = matcher.deep_copy()
            trial.compute_bitmask()  # some unsatisfiable constraints fail only here
            if trial.is_error():
                raise ValueError(_reason(trial.get_error()))
        except (ValueError, RecursionError) as error:
            name, value = constraint.given_field
            raise InvalidArgument(f"'{name}': {value!r:.100} is not allowed. {error}") from None
        return Grammar(matcher, self._sizes)


@cache
def _executor() -> LLExecutor:
    return LLExecutor()


def _reason(message: str) -> str:
    """The line of an error message that states the problem; the other lines show where it is."""
    lines = [line.strip() for line in message.splitlines()]
    marked = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = (marked or lines or [""])[0]
    if reason.startswith("NoExtension"):
        return "No answer can satisfy it"
    return reason[:300]


def _source(constraint: StructuredOutputs) -> str:
    """A constraint in llguidance's language.

    Raises:
        ValueError: states the problem.
    """
    if constraint.regex is not None:
        # \d, \w and \s match ASCII only, as in vLLM's default library and in JSON schemas.
        return LLMatcher.grammar_from_regex(regex_to_lark(constraint.regex, use_ascii="dws"))
    if constraint.choice is not None:
        # One terminal, as that is one automaton: as alternatives of a rule, 2,000 are too many.
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in constraint.choice)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}\n")
    if constraint.grammar is not None:
        return LLMatcher.grammar_from_lark(_lark(constraint.grammar))
    schema = (
        {"type": "object"} if constraint.json_schema is None else json.loads(constraint.json_schema)
    )
    objects = list(_objects(schema))
    merges = any(map(_merges, objects))
    _check_costs(objects, merges)
    if not merges:
        _close_objects(schema)
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema),
        defaults={"whitespace_flexible": False}
        if constraint.disable_any_whitespace
        else {"whitespace_pattern": constraint.whitespace_pattern or _BLANKS},
    )


def _lark(grammar: str) -> str:
    if "%json" in grammar:
        raise ValueError("%json is not allowed in a grammar; use 'json' instead")
    if grammar.count("&") > _MAX_INTERSECTIONS:
        raise ValueError(f"At most {_MAX_INTERSECTIONS} & are allowed in a grammar")
    try:
        return any_to_lark(grammar)
    except Exception as error:  # noqa: BLE001 -- the converter raises several unrelated types
        raise ValueError(
            f"It is neither Lark, which has a rule 'start:', nor GBNF, which has a rule "
            f"'root ::=': {error!s:.200}"
        ) from None


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects inside a JSON value, since a reference can turn any of them into a schema."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            yield value
            stack += value.values()
        elif isinstance(value, list):
            stack += value


def _merges(schema: dict[str, Any]) -> bool:
    """Whether a value must satisfy several schemas at once here."""
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
    """The digits of a number, without its decimal point; 1 for anything else."""
    if isinstance(number, bool | int):
        return abs(number)
    if not isinstance(number, float) or not math.isfinite(number):
        return 1
    return int("".join(map(str, Decimal(repr(number)).as_tuple().digits)))


def _close_objects(schema: Any) -> None:
    """Where a schema lists properties: require an object, and allow no others unless it says so.

    By the standard, such a schema accepts any number, too, and other properties, which models do
    invent. vLLM's default library does the same. Not for merged schemas, each of which would forbid
    the properties of the others.
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
