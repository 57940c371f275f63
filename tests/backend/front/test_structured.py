"""Answers of random tokens that their grammar allows: each satisfies its constraint."""

import gc
import itertools
import json
import re
import threading
import time
import weakref
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

import jsonschema
import numpy as np
import pytest
import torch

from tests.helpers import Collector, make_config, make_request, make_sequence
from tritium.backend.accounts.billing import Billing
from tritium.backend.engine.engine import Engine
from tritium.backend.engine.request import FinishReason
from tritium.backend.errors import InvalidArgument, RequestError, Unsupported
from tritium.backend.front import structured
from tritium.backend.front.front import Front
from tritium.backend.front.structured import Grammar, GrammarCompiler, GrammarState
from tritium.backend.front.structured_params import read_structured_outputs
from tritium.backend.front.vocabulary import Vocabulary
from tritium.backend.runner.sampler import Sampler, grammar_masks
from tritium.loadtests.harness import until

VOCAB_SIZE = 49152
EOS = 2  # <|im_end|>
SPECIAL = range(17)  # SmolLM2's special tokens
NUM_WORDS = VOCAB_SIZE // 32
STRNG = {"type": "strng"}


@pytest.fixture(scope="module")
def compiler(tokenizer):
    compiler = GrammarCompiler(tokenizer.to_json(), VOCAB_SIZE, [EOS])
    yield compiler
    compiler.close()


def compile_form(compiler, **demand) -> Grammar:
    return compiler.compile(read_structured_outputs("form", demand)).result(timeout=60)


def refusal(compiler, **demand) -> str:
    with pytest.raises(InvalidArgument) as refused:
        compile_form(compiler, **demand)
    return str(refused.value)


def text_of(tokenizer, token_ids: list[int]) -> str:
    """The text that a client gets."""
    detokenizer = tokenizer.detokenizer(tokenizer.encode("Answer:"), skip_special_tokens=True)
    return "".join(map(detokenizer.add, token_ids))


def allowed(state: GrammarState) -> np.ndarray:
    """Token ids that may come next."""
    masks = np.zeros((1, NUM_WORDS), dtype=np.int32)
    state.fill_masks([state], masks, [0])
    return np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))


@pytest.fixture(scope="module")
def closers(tokenizer) -> list[int]:
    """Tokens that lead an answer to its end."""
    pieces = ['"', '"}', '"]', "}", "]", "]}", "}}", '"}}', ")", "0", ".", "a", "true", ","]
    return [EOS, *(tokenizer.encode(piece)[0] for piece in pieces)]


def random_answer(grammar: Grammar, seed: int, closers: list[int], max_tokens=300) -> list[int]:
    """The tokens of a random answer, without the token that ends it."""
    rng = np.random.default_rng(seed)
    state = grammar.start()
    token_ids: list[int] = []
    while not state.is_complete:
        assert len(token_ids) < max_tokens
        choices = allowed(state)
        closing = [EOS] if EOS in choices else np.intersect1d(choices, closers)
        # Any token at first, later mostly tokens that lead to an end.
        if len(closing) and rng.random() < len(token_ids) / 20:
            choices = closing
        token_id = int(rng.choice(choices))
        assert state.accept(token_id), state.error
        if token_id != EOS:
            token_ids.append(token_id)
    return token_ids


def follow(tokenizer, grammar: Grammar, text: str) -> GrammarState | None:
    """The state after a text; None if the grammar rejects the text."""
    state = grammar.start()
    fits = all(state.accept(i) for i in tokenizer.encode(text))
    return state if fits else None


def takes(tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether this text is a complete answer."""
    state = follow(tokenizer, grammar, text)
    return state is not None and (state.is_complete or EOS in allowed(state))


# -- answers satisfy their constraint --

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "日本", "🚀"]}, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
        },
    },
    "required": ["name", "age", "home"],
}
SCHEMAS = {
    "nested objects": PERSON,
    "any object": {"type": "object", "maxProperties": 3},
    "enum": {"enum": ["red", "grün", 3, None, {"a": [1]}]},
    "const": {"const": 'quote " and \\ backslash'},
    "string lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "number": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 4}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "union": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 8}]},
    "disjoint oneOf": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
            for kind in ("a", "b")
        ]
    },
    "merged": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    "recursive": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "date": {"type": "string", "format": "date"},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": {"type": "integer"}},
        "maxProperties": 2,
    },
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_json_answers_are_valid(compiler, tokenizer, closers, schema):
    grammar = compile_form(compiler, json=schema)
    for seed in range(5):
        text = text_of(tokenizer, random_answer(grammar, seed, closers))
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


def test_json_object(compiler, tokenizer, closers):
    grammar = compile_form(compiler, json_object=True)
    for seed in range(5):
        answer = json.loads(text_of(tokenizer, random_answer(grammar, seed, closers)))
        assert isinstance(answer, dict)


REGEXES = [
    r"[A-Z][a-z]+, \d{4}-\d{2}-\d{2}",
    r"^(yes|no|\w{3})$",
    r"(a|bc)*d?",
    r"[^\"/]{2,6}/x",
    r"日?本+|🚀{2}",
    r"(?i:hi)!?",
    r"\s[\d.]{3}\W",
]


@pytest.mark.parametrize("regex", REGEXES)
def test_answers_match_the_regex(compiler, tokenizer, closers, regex):
    grammar = compile_form(compiler, regex=regex)
    for seed in range(8):
        text = text_of(tokenizer, random_answer(grammar, seed, closers))
        assert re.fullmatch(regex, text, re.ASCII), text


CHOICES = [
    "positive",
    "pos",
    "日本語",
    "🚀👩🏽‍🚀",
    'a "quoted" one',
    "two\nlines",
    "back\\slash",
    "<b>/",
]


def test_answer_is_one_of_the_choices(compiler, tokenizer, closers):
    grammar = compile_form(compiler, choice=CHOICES)
    seen = {text_of(tokenizer, random_answer(grammar, seed, closers)) for seed in range(60)}
    assert seen <= set(CHOICES)
    assert len(seen) > 3


@pytest.mark.parametrize("choice", CHOICES)
def test_each_choice_is_possible(compiler, tokenizer, choice):
    assert takes(tokenizer, compile_form(compiler, choice=CHOICES), choice)


def test_thousands_of_choices(compiler, tokenizer, closers):
    choices = [f"item {i * 7919 % 10007}" for i in range(4000)]
    grammar = compile_form(compiler, choice=choices)
    assert all(
        text_of(tokenizer, random_answer(grammar, seed, closers)) in choices for seed in range(5)
    )


GRAMMARS = {
    "GBNF": """
        root ::= "SELECT " columns " FROM " name (" WHERE " name " = " number)?

        columns ::= name ("," name)* | "*"
        name ::= [a-z]+   # one
        number ::= [0-9]+
    """,
    "Lark": """
        start: "SELECT " columns " FROM " NAME (" WHERE " NAME " = " NUMBER)?
        columns: NAME ("," NAME)* | "*"
        NAME: /[a-z]+/
        NUMBER: /[0-9]+/
    """,
}
SQL = r"SELECT ([a-z]+(,[a-z]+)*|\*) FROM [a-z]+( WHERE [a-z]+ = [0-9]+)?"


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_answers_follow_the_grammar(compiler, tokenizer, closers, grammar):
    grammar = compile_form(compiler, grammar=grammar)
    [space] = tokenizer.encode(" ")
    for seed in range(8):
        text = text_of(tokenizer, random_answer(grammar, seed, [*closers, space]))
        assert re.fullmatch(SQL, text), text
    assert takes(tokenizer, grammar, "SELECT a,b FROM c WHERE d = 42")
    assert not takes(tokenizer, grammar, "SELECT a FROM c WHERE d = ")


def test_grammar_may_nest_without_limit(compiler, tokenizer):
    grammar = compile_form(compiler, grammar='root ::= "(" root ")" | [0-9]\n')
    assert takes(tokenizer, grammar, "(" * 50 + "7" + ")" * 50)
    assert not takes(tokenizer, grammar, "((7)")


# -- the end --


@pytest.mark.parametrize(
    ("regex", "text", "can_end", "is_complete"),
    [
        ("ab?", "", False, False),
        ("ab?", "a", True, False),
        ("ab?", "ab", True, True),
        ("", "", True, False),  # the end needs a token
    ],
)
def test_answer_may_end_exactly_where_it_is_complete(
    compiler, tokenizer, regex, text, can_end, is_complete
):
    state = follow(tokenizer, compile_form(compiler, regex=regex), text)
    assert (EOS in allowed(state), state.is_complete) == (can_end, is_complete)


def test_eos_token_ends_the_answer(compiler, tokenizer):
    state = follow(tokenizer, compile_form(compiler, regex="a+"), "aa")
    assert not state.is_complete
    assert state.accept(EOS)
    assert state.is_complete
    assert list(allowed(state)) == [EOS]


def test_one_of_several_eos_tokens(tokenizer):
    compiler = GrammarCompiler(tokenizer.to_json(), VOCAB_SIZE, [0, EOS])
    state = follow(tokenizer, compile_form(compiler, regex="a+"), "a")
    assert {0, EOS} <= set(allowed(state))
    assert state.accept(0)
    assert state.is_complete
    compiler.close()


def test_no_other_special_token_is_allowed(compiler):
    for demand in ({"json_object": True}, {"regex": r"(?s:.*)"}):
        assert set(allowed(compile_form(compiler, **demand).start())) & set(SPECIAL) <= {EOS}


def test_logits_beyond_the_tokenizer_s_vocabulary(tokenizer):
    compiler = GrammarCompiler(tokenizer.to_json(), VOCAB_SIZE + 100, [EOS])
    state = compile_form(compiler, regex=r"(?s:.*)").start()
    masks = np.full((1, (VOCAB_SIZE + 100 + 31) // 32), -1, dtype=np.int32)
    state.fill_masks([state], masks, [0])
    assert not masks[0, NUM_WORDS:].any()
    compiler.close()


def test_tokenizer_that_knows_more_tokens_than_the_model(tokenizer):
    """The answer uses the model's tokens only; so does the end, whatever the configuration says."""
    size = 1000
    compiler = GrammarCompiler(tokenizer.to_json(), size, [EOS, 49151, 60000], VOCAB_SIZE)
    state = compile_form(compiler, regex=r"(?s:.*)").start()
    masks = np.full((3, 32), -1, dtype=np.int32)
    state.fill_masks([state], masks, [1])
    assert (masks[[0, 2]] == -1).all()
    bits = np.unpackbits(masks[1].view(np.uint8), bitorder="little")
    assert bits[EOS]
    assert bits[tokenizer.encode(" a")[0]]
    assert not bits[size:].any()
    compiler.close()


# -- states --


def test_answers_of_one_grammar_are_independent(compiler, tokenizer):
    grammar = compile_form(compiler, choice=["ab", "cd"])
    first, second = grammar.start(), grammar.start()
    assert first.accept(tokenizer.encode("ab")[0])
    assert tokenizer.encode("cd")[0] in allowed(second)
    assert second.accept(tokenizer.encode("cd")[0])


def test_masks_of_several_answers_at_once(compiler, tokenizer):
    states = [compile_form(compiler, regex=text).start() for text in ("a", "b", "c")]
    masks = np.full((5, NUM_WORDS), -1, dtype=np.int32)
    GrammarState.fill_masks(states, masks, [4, 0, 2])
    assert (masks[[1, 3]] == -1).all()
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    found = [np.flatnonzero(bits[row]).tolist() for row in (4, 0, 2)]
    assert found == [tokenizer.encode(text) for text in ("a", "b", "c")]


def test_token_that_the_grammar_rejects(compiler, tokenizer):
    state = compile_form(compiler, regex="a+").start()
    assert not state.accept(tokenizer.encode("z")[0])
    assert '"z"' in state.error
    assert "\n" not in state.error
    assert not state.is_complete
    assert not state.accept(tokenizer.encode("a")[0])


def test_grammar_that_reaches_a_limit_during_the_answer(compiler):
    state = compile_form(compiler, regex="(([a-z]{1,1000}){1,1000}){1,1000}").start()
    for _ in range(100):
        if not state.accept(int(allowed(state)[-1])):
            break
    assert "too many" in state.error


# -- JSON: where a schema is not explicit --


def test_no_properties_are_invented(compiler, tokenizer):
    grammar = compile_form(compiler, json={"properties": {"a": {"type": "integer"}}})
    assert takes(tokenizer, grammar, '{"a":1}')
    assert not takes(tokenizer, grammar, '{"a":1,"b":2}')


def test_schema_with_properties_means_an_object(compiler, tokenizer):
    listed = {"properties": {"a": {"type": "integer"}}}
    grammar = compile_form(compiler, json={"properties": {"b": listed}, "required": ["b"]})
    assert takes(tokenizer, grammar, '{"b":{"a":1}}')
    assert not any(takes(tokenizer, grammar, text) for text in ("1", "null", '{"b":1}'))
    grammar = compile_form(compiler, json={**listed, "type": ["object", "null"]})
    assert takes(tokenizer, grammar, "null")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {"a": {"type": "integer"}}, "additionalProperties": True},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"required": ["a"]}]},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
    ],
)
def test_additional_properties_where_the_schema_allows_them(compiler, tokenizer, schema):
    assert takes(tokenizer, compile_form(compiler, json=schema), '{"a":1,"b":2}')


def test_property_named_properties(compiler, tokenizer):
    schema = {"properties": {"properties": {"type": "null"}, "default": {"enum": [{"allOf": 1}]}}}
    grammar = compile_form(compiler, json=schema)
    assert takes(tokenizer, grammar, '{"properties":null,"default":{"allOf":1}}')


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":1}', True),
        ('{ "a": 1 }', True),
        ('{\n        "a": 1\n}', True),
        ("{" + " " * 42 + '"a":1}', False),
        (' {"a":1}', False),
        ('{"a":1}\n', False),
    ],
)
def test_blanks_between_json_tokens(compiler, tokenizer, text, fits):
    grammar = compile_form(compiler, json={"properties": {"a": {"type": "integer"}}})
    assert takes(tokenizer, grammar, text) == fits


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"disable_any_whitespace": True}, ['{"a":1}']),
        ({"whitespace_pattern": "[ ]"}, ['{"a":1}', '{"a": 1}', '{ "a" : 1 }']),
        ({}, ['{"a":1}', '{"a": 1}', '{ "a" : 1 }', '{"a":\t1}']),
    ],
)
def test_whitespace_options(compiler, tokenizer, options, texts):
    schema = {"properties": {"a": {"type": "integer"}}}
    grammar = compile_form(compiler, json=schema, **options)
    tried = ['{"a":1}', '{"a": 1}', '{ "a" : 1 }', '{"a":\t1}']
    assert [text for text in tried if takes(tokenizer, grammar, text)] == texts


# -- refusals --


def many(n: int, schema: dict) -> dict:
    return {f"^{i}$": schema for i in range(n)}


@pytest.mark.parametrize(
    ("demand", "said"),
    [
        ({"regex": "(?=a)b"}, ["'regex'", "(?=a)b", "look-around"]),
        ({"regex": r"(a)\1"}, ["backreferences"]),
        ({"regex": "[a-"}, ["'[a-'", "unclosed character class"]),
        ({"regex": r"[^\s\S]"}, ["No answer can satisfy it"]),
        ({"json": {"type": "strng"}}, ["'json'", "strng"]),
        ({"json": {"type": "array", "uniqueItems": True}}, ["uniqueItems"]),
        ({"json": {"not": {"type": "string"}}}, ["not"]),
        ({"json": {"oneOf": [{"minimum": 1}, {"maximum": 9}]}}, ["oneOf"]),
        ({"json": {"type": "string", "format": "klingon"}}, ["format", "klingon"]),
        ({"json": {"$ref": "https://example.com/schema"}}, ["example.com"]),
        ({"json": {"$ref": "#"}}, ["No answer"]),
        ({"json": {"allOf": [{"type": "string"}, {"type": "null"}]}}, ["nsatisfiable"]),
        ({"json": {"properties": 5}}, ["properties"]),
        ({"json": {"patternProperties": 5, "multipleOf": "x", "allOf": 1}}, ["'json'"]),
        ({"json": {}, "whitespace_pattern": "("}, ["unclosed group"]),
        ({"grammar": "hello"}, ["'grammar'", "'hello'", "Lark", "GBNF"]),
        ({"grammar": "root ::= other"}, ["other"]),
        ({"grammar": "start: other"}, ["other"]),
        ({"grammar": "root ::= root"}, ["No answer"]),
        ({"grammar": 'start: %json {"type": "null"}'}, ["%json", "'json'"]),
        # Without limits, these would take minutes or all memory.
        ({"grammar": "start: A\nA: " + " & ".join(["/.*a.*/"] * 18)}, ["16 &"]),
        ({"json": {"patternProperties": many(101, {})}}, ["100 patternProperties", "101"]),
        ({"json": {"allOf": [{"pattern": f"a{i}"} for i in range(17)]}}, ["16 patterns", "17"]),
        ({"json": {"type": "integer", "multipleOf": 10**9}}, ["multipleOf", "100000"]),
        ({"json": {"type": "number", "multipleOf": 0.123456789}}, ["multipleOf"]),
        ({"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}}, ["multipleOf"]),
        ({"json": {"$ref": "#/x", "x": {"type": "integer", "multipleOf": 10**9}}}, ["multipleOf"]),
    ],
)
def test_constraints_that_are_refused(compiler, demand, said):
    message = refusal(compiler, **demand)
    assert message.startswith(f"'{next(iter(demand))}': ")
    assert all(part in message for part in said), message
    assert len(message) < 600


def test_tokenizer_that_llguidance_does_not_support():
    compiler = GrammarCompiler('{"model": {}}', VOCAB_SIZE, [EOS])
    with pytest.raises(Unsupported, match="tokenizer"):
        compile_form(compiler, regex="a")
    compiler.close()


# -- compiling --


def constraint(**demand):
    return read_structured_outputs("form", demand)


def test_equal_constraints_are_compiled_once(compiler):
    text = '{"type": "integer",   "minimum": 17}'
    first = compiler.compile(constraint(json=text))
    assert compiler.compile(constraint(json=json.loads(text))) is first
    assert compiler.compile(constraint(json={"minimum": 17, "type": "integer"})) is not first


def test_most_recently_used_grammars_are_cached(tokenizer, monkeypatch):
    monkeypatch.setattr("tritium.backend.front.structured._MAX_GRAMMARS", 2)
    compiler = GrammarCompiler(tokenizer.to_json(), VOCAB_SIZE, [EOS])
    a, _ = (compiler.compile(constraint(regex=regex)) for regex in "ab")
    assert compiler.compile(constraint(regex="a")) is a
    c = compiler.compile(constraint(regex="c"))
    assert compiler.compile(constraint(regex="a")) is a
    assert compiler.compile(constraint(regex="c")) is c
    assert len(compiler._grammars) == 2
    compiler.close()


def test_compilation_blocks_no_other_request(tokenizer, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(
        "tritium.backend.front.structured._source",
        lambda constraint: go_on.wait(20) and "start: /a/",
    )
    compiler = GrammarCompiler(tokenizer.to_json(), VOCAB_SIZE, [EOS])
    futures = [compiler.compile(constraint(regex=f"a{i}")) for i in range(5)]
    assert not any(future.done() for future in futures)
    done = []
    for future in futures:
        future.add_done_callback(done.append)
    compiler.close()
    assert len(done) < 5  # running compilations are not waited for
    go_on.set()
    until(lambda: len(done) == 5)
    assert not futures[0].cancelled()
    with pytest.raises(CancelledError):
        futures[-1].result()


# -- in the engine --


@dataclass
class RandomRunner:
    """A runner with random logits, masked and sampled like a model's."""

    favoured: list[int]  # tokens that are more likely
    num_blocks: int = 64
    overlaps: bool = True
    sampler: Sampler = field(default_factory=Sampler)
    steps: itertools.count = field(default_factory=itertools.count)

    def start(self):
        pass

    def launch(self, batch):
        sequences = [scheduled.sequence for scheduled in batch if scheduled.samples]
        if not sequences:
            return list
        assert not any(s.num_pending_tokens for s in sequences if s.grammar)
        generator = torch.Generator().manual_seed(next(self.steps))
        logits = torch.randn(len(sequences), VOCAB_SIZE, generator=generator)
        logits[:, self.favoured] += 8
        masks = grammar_masks(sequences, VOCAB_SIZE)
        masks = None if masks is None else torch.from_numpy(masks)
        positions = [sequence.num_tokens for sequence in sequences]
        return self.sampler.sample(logits, sequences, positions, masks).read


def run_engine(runner, requests, **config) -> Collector:
    collector = Collector()
    engine = Engine(make_config(**config), runner, collector)
    for request in requests:
        engine.reserve()
        engine.submit(request)
    in_flight = None
    for _ in range(2000):
        in_flight = engine.step(in_flight)
        engine.scheduler.check_integrity()
        if len(collector.reasons) == len(requests):
            return collector
    raise AssertionError("not all requests end")


def guided(request_id: int, grammar: Grammar, **fields):
    fields = dict(stop_token_ids=frozenset([EOS]), temperature=1.0, max_tokens=200) | fields
    return make_request((1, 2, 3), request_id=request_id, grammar=grammar, **fields)


def test_constrained_and_free_answers_in_one_batch(compiler, tokenizer, closers):
    person = compile_form(compiler, json=PERSON)
    yes_or_no = compile_form(compiler, choice=["yes", "no"])
    requests = [
        guided(0, person, seed=1),
        make_request((1, 2), max_tokens=30, request_id=1, temperature=1.0, seed=2),
        guided(2, yes_or_no, seed=3),
        guided(3, person, seed=4, temperature=0.0),
    ]
    collector = run_engine(RandomRunner(closers), requests)
    for request_id in (0, 3):
        jsonschema.validate(json.loads(text_of(tokenizer, collector.token_ids(request_id))), PERSON)
    assert text_of(tokenizer, collector.token_ids(2)) in ("yes", "no")
    assert len(collector.token_ids(1)) == 30
    reasons = {request_id: reason for request_id, [reason] in collector.reasons.items()}
    stop = FinishReason.STOP
    assert reasons == {0: stop, 1: FinishReason.LENGTH, 2: stop, 3: stop}


def test_preempted_answers_continue_where_they_were(compiler, tokenizer, closers):
    grammar = compile_form(compiler, json=PERSON)
    requests = [guided(i, grammar, seed=i, max_tokens=100) for i in range(4)]
    runner = RandomRunner(closers, num_blocks=27)  # of 4 tokens each: too few for all sequences
    collector = Collector()
    engine = Engine(make_config(), runner, collector)
    for request in requests:
        engine.reserve()
        engine.submit(request)
    in_flight = None
    while len(collector.reasons) < 4:
        in_flight = engine.step(in_flight)
    assert engine.stats().num_preemptions
    for i in range(4):
        if collector.reasons[i] == [FinishReason.STOP]:
            jsonschema.validate(json.loads(text_of(tokenizer, collector.token_ids(i))), PERSON)
        else:
            state = compile_form(compiler, json=PERSON).start()
            assert all(state.accept(token_id) for token_id in collector.token_ids(i))


def test_complete_answer_needs_no_stop_token(compiler, tokenizer, closers):
    collector = run_engine(RandomRunner(closers), [guided(0, compile_form(compiler, choice=["a"]))])
    assert collector.token_ids(0) == tokenizer.encode("a")
    assert collector.reasons == {0: [FinishReason.STOP]}
    assert collector.outputs[-1].is_whole


def test_deeply_nested_schemas(compiler):
    """Whichever limit is reached first."""
    for depth in (127, *range(900, 1000, 5), 5000, 50_000):
        said = refusal(compiler, json='{"items": ' * depth + "{}" + "}" * depth)
        assert "nested" in said or "recursion" in said, said


def test_stop_token_is_not_part_of_the_answer(compiler, closers):
    collector = run_engine(RandomRunner([EOS]), [guided(0, compile_form(compiler, regex="a*"))])
    assert collector.token_ids(0) == [EOS]
    assert not collector.outputs[-1].is_whole


def test_min_tokens_holds_as_far_as_the_constraint_allows(compiler, tokenizer, closers):
    requests = [
        guided(0, compile_form(compiler, regex="(a|b|c|d)*"), min_tokens=12),
        guided(1, compile_form(compiler, choice=["ab"]), min_tokens=12),
        guided(2, compile_form(compiler, regex="a?"), min_tokens=12),
    ]
    collector = run_engine(RandomRunner([EOS]), requests)
    assert len(collector.token_ids(0)) >= 12
    assert [text_of(tokenizer, collector.token_ids(i)) for i in (1, 2)] == ["ab", "a"]
    assert all(reason == [FinishReason.STOP] for reason in collector.reasons.values())


def test_max_tokens_cuts_a_constrained_answer(compiler, closers):
    grammar = compile_form(compiler, json=PERSON)
    collector = run_engine(RandomRunner(closers), [guided(0, grammar, max_tokens=3)])
    assert collector.reasons == {0: [FinishReason.LENGTH]}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraint_that_no_allowed_token_satisfies(compiler, tokenizer, closers, temperature):
    digits = compile_form(compiler, regex="[0-9]+x")
    letters = tuple(tokenizer.encode("a") + tokenizer.encode("b"))
    requests = [
        guided(0, digits, allowed_token_ids=letters, temperature=temperature),
        guided(1, compile_form(compiler, choice=["yes"]), temperature=temperature),
    ]
    collector = run_engine(RandomRunner(closers), requests)
    assert collector.reasons == {0: [FinishReason.INVALID], 1: [FinishReason.STOP]}
    [error] = [output.error for output in collector.outputs if output.error]
    assert "grammar" in error
    assert text_of(tokenizer, collector.token_ids(1)) == "yes"


def test_no_masks_without_grammars():
    assert grammar_masks([make_sequence(), make_sequence()], VOCAB_SIZE) is None


# -- through the front --


class Client:
    """A responder that collects a request's responses."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasons: list[str] = []
        self.error: RequestError | None = None
        self.ended = threading.Event()
        self.cancelled = False

    def send(self, tensors, final) -> None:
        self.texts += [text.decode() for text in tensors["text_output"]]
        self.reasons += [reason.decode() for reason in tensors["finish_reason"]]
        if final:
            self.ended.set()

    def fail(self, error) -> None:
        self.error = error
        self.ended.set()

    def is_cancelled(self) -> bool:
        assert not self.ended.is_set()
        return self.cancelled


class NoMetrics:
    def request_finished(self, *args, **kwargs) -> None: ...

    def count_totals(self, *args, **kwargs) -> None: ...

    def request_refused(self, *args, **kwargs) -> None: ...

    def prompt_tokenized(self) -> None: ...

    def update(self, *args, **kwargs) -> None: ...


@pytest.fixture
def front(tokenizer, closers):
    config = make_config(max_num_seqs=8, max_num_batched_tokens=512, max_queue_size=2)
    grammars = GrammarCompiler(tokenizer.to_json(), VOCAB_SIZE, [EOS])
    runner = RandomRunner(closers, num_blocks=2000)
    front = Front(
        config,
        tokenizer,
        runner,
        grammars,
        1000,
        Vocabulary(tokenizer, VOCAB_SIZE, (EOS,)),
        NoMetrics(),
        Billing(NoMetrics()),
    )
    yield front
    front.stop()


def ask(front: Front, inputs=None, **parameters) -> Client:
    client = Client()
    texts = {"text_input": "Hi", **(inputs or {})}
    tensors = {
        name: np.array([text.encode()], dtype=object) for name, text in texts.items() if text
    }
    tensors |= {"return_finish_reason": np.array([True])}
    tensors |= {"exclude_input_in_output": np.array([True])}
    front.handle(tensors, json.dumps({"max_tokens": 200, "seed": 1, **parameters}), client)
    return client


def answer(client: Client) -> str:
    assert client.ended.wait(30)
    assert client.error is None, client.error
    assert set(client.reasons) == {"stop"}
    [text] = client.texts
    return text


@pytest.mark.parametrize(
    ("parameters", "regex"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": '{"regex": "[0-9]{4}"}'}, "[0-9]{4}"),
        ({"guided_decoding": {"regex": "a{3}", "backend": "xgrammar"}}, "aaa"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"regex": "[a-c]{2,9}"}, "ignore_eos": True}, "[a-c]{2,9}"),
        ({"structured_outputs": {"regex": "[a-c]+"}, "skip_special_tokens": False}, "[a-c]+"),
        ({"structured_outputs": {"regex": "[a-c]+"}, "include_stop_str_in_output": True}, "[a-c]+"),
    ],
)
def test_constraint_as_a_sampling_parameter(front, parameters, regex):
    assert re.fullmatch(regex, answer(ask(front, **parameters)))


def test_response_format(front):
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    jsonschema.validate(json.loads(answer(ask(front, response_format=schema))), PERSON)


def test_stop_string_ends_a_constrained_answer(front):
    client = ask(front, structured_outputs={"choice": ["yes and no"]}, stop=" and")
    assert answer(client) == "yes"


def test_each_of_n_answers_satisfies_the_constraint(front):
    client = ask(front, structured_outputs={"regex": "[a-z]{4}"}, n=4, temperature=2)
    assert client.ended.wait(30)
    assert len(set(client.texts)) > 1
    assert all(re.fullmatch("[a-z]{4}", text) for text in client.texts)


def test_call_of_a_named_tool(front, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools }}{{ messages }}")
    parameters = {"properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    inputs = {
        "text_input": "",
        "messages": json.dumps([{"role": "user", "content": "Hi"}]),
        "tools": json.dumps([tool]),
        "tool_choice": json.dumps({"type": "function", "function": {"name": "add"}}),
    }
    assert json.loads(answer(ask(front, inputs))) in ({"x": 1}, {"x": 2})


def test_refused_constraint_releases_its_slot(front):
    for i in range(30):  # more than there are slots
        client = ask(front, structured_outputs={"regex": f"[{i}-"})
        assert client.ended.wait(30)
        assert client.error
        assert client.error.code == "INVALID_ARG"
        assert f"'[{i}-'" in str(client.error)
    assert answer(ask(front, structured_outputs={"choice": ["yes"]})) == "yes"


def test_unsatisfiable_constraint_is_an_invalid_argument(front):
    client = ask(front, structured_outputs={"regex": "[0-9]+"}, allowed_token_ids=[400])
    assert client.ended.wait(30)
    assert client.error
    assert client.error.code == "INVALID_ARG"
    assert str(client.error).startswith("sampling parameter 'structured_outputs': the answer")


def test_error_says_where_the_constraint_comes_from(front, tokenizer, monkeypatch):
    client = ask(front, response_format={"type": "json_schema", "json_schema": {"schema": STRNG}})
    assert client.ended.wait(30)
    assert str(client.error).startswith("sampling parameter 'structured_outputs': 'json': ")
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools }}{{ messages }}")
    tool = {
        "type": "function",
        "function": {"name": "a", "parameters": {"properties": {"b": STRNG}}},
    }
    inputs = {
        "text_input": "",
        "messages": json.dumps([{"role": "user", "content": "Hi"}]),
        "tools": json.dumps([tool]),
        "tool_choice": "required",
    }
    client = ask(front, inputs)
    assert client.ended.wait(30)
    assert str(client.error).startswith("tools: 'json': ")


@pytest.mark.parametrize("demand", [{"regex": "[0-3]{9}"}, {"regex": "[0-3{9}"}])
def test_ended_requests_are_not_kept_alive(front, monkeypatch, demand):
    """Triton Server does not unload a model while one of its requests is alive."""
    source = structured._source
    # Slow, so that the request waits for its grammar.
    monkeypatch.setattr(
        structured, "_source", lambda constraint: time.sleep(0.3) or source(constraint)
    )
    held = []
    for _ in range(3):
        client = ask(front, structured_outputs=demand)
        assert client.ended.wait(30)
        held.append(weakref.ref(client))
    del client
    assert ask(front, max_tokens=1).ended.wait(30)
    gc.collect()
    assert not any(client() for client in held)


def test_request_waiting_for_the_compiler_can_be_cancelled(front, monkeypatch):
    go_on = threading.Event()
    source = structured._source
    monkeypatch.setattr(
        structured, "_source", lambda constraint: go_on.wait(20) and source(constraint)
    )
    clients = [ask(front, structured_outputs={"regex": f"a{i}"}) for i in range(10)]  # all slots
    assert ask(front).error.code == "UNAVAILABLE"
    for client in clients[1:]:
        client.cancelled = True
    assert all(client.ended.wait(5) for client in clients[1:])
    assert {client.error.code for client in clients[1:]} == {"CANCELLED"}
    others = [ask(front, max_tokens=2) for _ in range(9)]  # use the released slots
    assert all(client.ended.wait(20) and client.error is None for client in others)
    assert not clients[0].ended.is_set()
    go_on.set()
    assert answer(clients[0]) == "a0"


def test_request_waiting_for_the_compiler_keeps_its_deadline(front, monkeypatch):
    go_on = threading.Event()
    source = structured._source
    monkeypatch.setattr(
        structured, "_source", lambda constraint: go_on.wait(20) and source(constraint)
    )
    late = [ask(front, structured_outputs={"regex": f"a{i}"}, deadline_ms=50) for i in range(10)]
    assert all(client.ended.wait(5) for client in late)
    assert {str(client.error) for client in late} == {
        "deadline_ms: the answer was not complete within 50 ms"
    }
    others = [ask(front, max_tokens=2) for _ in range(10)]  # use the released slots
    assert all(client.ended.wait(20) and client.error is None for client in others)
    go_on.set()


LONG = {"text_input": "word " * 4000}


def test_long_prompts_are_tokenised_on_threads_of_their_own(front, monkeypatch):
    threads, encode = [], front._inputs.encode

    def encode_noting(request):
        threads.append(threading.current_thread().name)
        return encode(request)

    monkeypatch.setattr(front._inputs, "encode", encode_noting)
    parameters = {"truncate_prompt_tokens": 20, "max_tokens": 5}
    short = {"text_input": " word" * 30}
    answers = [ask(front, inputs, **parameters) for inputs in (short, LONG)]
    assert all(client.ended.wait(20) and client.error is None for client in answers)
    assert sorted(threads) == ["MainThread", "long prompts_0"]


def test_long_prompts_that_wait_end_by_deadline_cancellation_and_stop(front, monkeypatch):
    go_on, encode = threading.Event(), front._inputs.encode
    monkeypatch.setattr(front._inputs, "encode", lambda request: go_on.wait(20) and encode(request))
    parameters = {"truncate_prompt_tokens": 20, "max_tokens": 5}
    first = [ask(front, LONG, **parameters) for _ in range(2)]  # the threads are busy with them
    late = ask(front, LONG, deadline_ms=50, **parameters)
    cancelled, stopped = (ask(front, LONG, **parameters) for _ in range(2))
    cancelled.cancelled = True
    assert late.ended.wait(5)
    assert cancelled.ended.wait(5)
    assert (late.error.code, cancelled.error.code) == ("UNAVAILABLE", "CANCELLED")
    front._drain_seconds = 0.1
    stopping = threading.Thread(target=front.stop)
    stopping.start()
    assert stopped.ended.wait(5)
    go_on.set()
    stopping.join(20)
    assert not stopping.is_alive()
    assert {client.error.code for client in (*first, stopped)} == {"UNAVAILABLE"}


def test_requests_waiting_for_the_compiler_end_with_the_server(tokenizer, closers, monkeypatch):
    go_on, compiled = threading.Event(), []

    def compile_slowly(constraint):
        go_on.wait(20)
        compiled.append(constraint)
        return "start: /a/"

    monkeypatch.setattr("tritium.backend.front.structured._source", compile_slowly)
    config = make_config(max_num_batched_tokens=512, drain_seconds=0.1)
    grammars = GrammarCompiler(tokenizer.to_json(), VOCAB_SIZE, [EOS])
    front = Front(
        config,
        tokenizer,
        RandomRunner(closers),
        grammars,
        1000,
        Vocabulary(tokenizer, VOCAB_SIZE, (EOS,)),
        NoMetrics(),
        Billing(NoMetrics()),
    )
    clients = [ask(front, structured_outputs={"regex": f"a{i}"}) for i in range(5)]
    front.stop()
    assert not compiled  # the compilation is not waited for
    assert all(client.ended.is_set() for client in clients)
    assert {client.error.code for client in clients} == {"UNAVAILABLE"}
    go_on.set()
