"""Grammars as masks over a vocabulary of bytes."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from radixserve.engine.grammar_compiler import MAX_GRAMMAR_LENGTH, GrammarCompiler, GrammarConstraint
from radixserve.errors import InvalidRequest
from radixserve.grammar import Grammar, GrammarKind
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.byte_tokenizer import END, PAD, START
from tests.tokenizer.builders import sentencepiece_backend, unigram_backend, write_tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.eos_token_ids)


def allowed(constraint: GrammarConstraint) -> set[int]:
    bits = np.unpackbits(np.frombuffer(constraint.allowed_tokens(), dtype=np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def schema(**keywords: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(keywords))


def accept_all(constraint: GrammarConstraint, text: bytes) -> None:
    for byte in text:
        constraint.accept(byte)


def is_accepted(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether text is one that may end: each byte allowed in turn, then the end token or nothing but it."""
    constraint = compiler.compile(grammar)
    for byte in text.encode():
        if byte not in allowed(constraint):
            return False
        constraint.accept(byte)
    return END in allowed(constraint)


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("regex", "a|bc+", ["a", "bc", "bccc"], ["", "b", "ab"]),
        ("regex", "^a{2}$", ["aa"], ["a", "aaa"]),
        ("lark", 'start: "x" tail?\ntail: "(" tail? ")"', ["x", "x()", "x(())"], ["", "x(", "x())"]),
        ("json_schema", "{}", ["1", "null", '"a"', "[1, 2]", '{"a":{"b": []}}'], ["", "01", "{a:1}", "[1"]),
        ("json_schema", '{"enum": ["é", 7]}', ['"é"', "7"], ["é", "8"]),
    ],
)
def test_exactly_the_texts_of_a_grammar_may_end(
    compiler: GrammarCompiler, kind: GrammarKind, source: str, good: list[str], bad: list[str]
) -> None:
    grammar = Grammar(kind, source)
    assert [text for text in good if not is_accepted(compiler, grammar, text)] == []
    assert [text for text in bad if is_accepted(compiler, grammar, text)] == []


def test_json_may_have_one_blank_behind_a_comma_or_colon_and_no_others(compiler: GrammarCompiler) -> None:
    grammar = schema(type="object")
    for text in ('{"a":1,"b":2}', '{"a": 1, "b": [2,3, 4]}'):
        assert is_accepted(compiler, grammar, text)
    for text in ('{"a":  1}', '{ "a":1}', '{"a" :1}', '{"a":1 }', '{"a":\n1}', ' {"a":1}'):
        assert not is_accepted(compiler, grammar, text)


def test_a_schema_may_ask_for_another_layout(compiler: GrammarCompiler) -> None:
    grammar = schema(type="object", **{"x-guidance": {"whitespace_flexible": True}})
    assert is_accepted(compiler, grammar, '{ "a" :\n1 }')


def test_a_text_that_can_only_end_is_complete(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Grammar("regex", "ab?c?"))
    assert not constraint.is_complete
    constraint.accept(ord("a"))
    assert END in allowed(constraint)
    assert not constraint.is_complete
    constraint.accept(ord("c"))
    assert constraint.is_complete


def test_a_fork_goes_on_by_itself(compiler: GrammarCompiler) -> None:
    first = compiler.compile(Grammar("regex", "a(b|c)d"))
    first.accept(ord("a"))
    second = first.fork()
    first.accept(ord("b"))
    assert allowed(first) == {ord("d")}
    assert allowed(second) == {ord("b"), ord("c")}
    second.accept(ord("c"))
    assert allowed(second) == {ord("d")}


def test_two_texts_of_one_grammar_do_not_meet(compiler: GrammarCompiler) -> None:
    grammar = Grammar("regex", "ab")
    compiler.compile(grammar).accept(ord("a"))
    assert allowed(compiler.compile(grammar)) == {ord("a")}


def test_threads_may_share_a_compiler(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, tokenizer.eos_token_ids)
    grammars = [Grammar("regex", f"{chr(97 + i % 26)}x") for i in range(200)]
    with ThreadPoolExecutor(8) as threads:
        firsts = [allowed(constraint) for constraint in threads.map(compiler.compile, grammars)]
    assert firsts == [{ord(grammar.source[0])} for grammar in grammars]


def test_every_end_token_may_end_a_text(tokenizer: Tokenizer) -> None:
    constraint = GrammarCompiler(tokenizer, {END, PAD}).compile(Grammar("regex", "a"))
    constraint.accept(ord("a"))
    assert allowed(constraint) == {END, PAD}
    assert constraint.is_complete


def test_without_an_end_token_a_text_is_complete_all_the_same(tokenizer: Tokenizer) -> None:
    constraint = GrammarCompiler(tokenizer, ()).compile(Grammar("regex", "a"))
    assert allowed(constraint) == {ord("a")}
    constraint.accept(ord("a"))
    assert constraint.is_complete
    assert not allowed(constraint) & set(range(tokenizer.vocab_size))


def test_without_an_end_token_the_empty_text_alone_cannot_be_said(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="only the empty text"):
        GrammarCompiler(tokenizer, ()).compile(Grammar("regex", ""))
    assert allowed(GrammarCompiler(tokenizer, ()).compile(Grammar("regex", "a?"))) >= {ord("a")}


def test_a_lark_grammar_may_name_special_tokens_and_hold_json(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Grammar("lark", 'start: <|start|> %json {"const": 1} <|end|>'))
    assert allowed(constraint) == {START}
    constraint.accept(START)
    assert allowed(constraint) == {ord("1")}
    constraint.accept(ord("1"))
    assert constraint.is_complete


@pytest.mark.parametrize("text", ["<|end|>", "a<|start|>b", '"<|pad|>"'])
def test_the_string_of_a_special_token_is_text_in_a_grammar(compiler: GrammarCompiler, text: str) -> None:
    assert is_accepted(compiler, schema(const=text), json.dumps(text))
    assert is_accepted(compiler, Grammar("lark", f"start: {json.dumps(text)}"), text)


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "object", "properties": {"a": {"if": {}, "then": {}}}}, "if"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"contains": {"type": "string"}}, "contains"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"type": "string", "format": "hovercraft"}, "hovercraft"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"$ref": "http://example.com/schema"}, "http://example.com/schema"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ({"properties": {"foo": "bar"}}, "schema must be an object"),
        ({"type": "strnig"}, "strnig"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"enum": []}, "empty"),
    ],
)
def test_a_schema_that_would_not_be_followed_in_full_is_refused_by_name(
    compiler: GrammarCompiler, keywords: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named) as error:
        compiler.compile(schema(**keywords))
    assert error.value.param == "grammar"
    assert len(error.value.message) < 1000


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "[]"),
        Grammar("json_schema", "{"),
        Grammar("regex", "("),
        Grammar("regex", r"(a)\1"),
        Grammar("lark", 'start: "a'),
        Grammar("lark", "start: <|nobody|>"),
        Grammar("lark", "start: A\nA: /a/ & /b/"),
        Grammar("lark", ""),
    ],
)
def test_what_is_no_grammar_is_refused(compiler: GrammarCompiler, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest, match=f"the {grammar.kind} cannot be used: ."):
        compiler.compile(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"$ref": "#"}'),
        Grammar("lark", "start: start"),
        Grammar("regex", r"[^\s\S]"),
    ],
)
def test_a_grammar_that_no_text_fits_says_so(compiler: GrammarCompiler, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest, match="cannot be used: no text fits it"):
        compiler.compile(grammar)


def nested(depth: int, width: int) -> dict[str, Any]:
    result: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        result = {"anyOf": [{"type": "object", "properties": {name: result}} for name in "abcdefgh"[:width]]}
    return result


@pytest.mark.parametrize(
    "grammar",
    [
        schema(type="object", properties={f"p{i}": {"type": "string"} for i in range(5000)}),
        schema(**nested(10, 2)),
        schema(**nested(150, 1)),
        Grammar("regex", "|".join(f"word{i}" for i in range(20_000))),
        Grammar("regex", "a" * (MAX_GRAMMAR_LENGTH + 1)),
    ],
)
def test_a_grammar_that_would_take_long_is_refused(compiler: GrammarCompiler, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest):
        compiler.compile(grammar)


def test_an_object_of_a_thousand_optional_properties_is_not_too_large(compiler: GrammarCompiler) -> None:
    grammar = schema(type="object", properties={f"p{i}": {"type": "integer"} for i in range(1000)})
    assert is_accepted(compiler, grammar, '{"p1": 5, "p2":6, "p999": 7}')


def test_a_grammar_that_grows_too_complex_says_so_when_it_happens(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Grammar("regex", "a{1000000}"))
    with pytest.raises(InvalidRequest, match="cannot go on within the grammar") as error:
        accept_all(constraint, b"aaa")
    assert error.value.param == "grammar"


@pytest.mark.parametrize("text", ["hello Paris", "x</s>y"])
@pytest.mark.parametrize("backend", [sentencepiece_backend(prepends_per_segment=True), unigram_backend()])
def test_a_vocabulary_that_puts_a_space_before_texts_spells_what_a_grammar_forces(
    tmp_path: Path, backend: tokenizers.Tokenizer, text: str
) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend, eos_token="</s>"))
    constraint = GrammarCompiler(tokenizer, tokenizer.eos_token_ids).compile(schema(const=text))
    spelled = b""
    while not constraint.is_complete:
        token_id = max(allowed(constraint))
        assert token_id not in tokenizer.special_token_ids
        spelled += tokenizer.token_bytes(token_id)
        constraint.accept(token_id)
    assert spelled == json.dumps(text).encode()
