"""Answers that follow a grammar, seen from outside the engine."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from radixserve.grammar import Grammar
from tests.byte_tokenizer import END, START
from tests.engine.harness import BLOCK_SIZE as B
from tests.engine.harness import Harness, MakeHarness, ids
from tests.stub import always, counting

OBJECT = Grammar("json_schema", '{"type": "object"}')
LETTERS = Grammar("regex", "[a-z]*")


def likes(text: str, then: int = END) -> Any:
    """A model that says text, byte by byte, then a token for ever; others are possible where that is not allowed."""
    said = text.encode()

    def table(context: Sequence[int]) -> Mapping[int, float]:
        spoken = len(context) - PROMPT_LENGTH
        wanted = said[spoken] if spoken < len(said) else then
        return dict.fromkeys(range(258), 1e-06) | {wanted: 0.9}

    return table


PROMPT_LENGTH = 20
PROMPT = ids(1, PROMPT_LENGTH)


def text_of(harness: Harness, **params: Any) -> tuple[str, str | None]:
    answer = harness.ask(PROMPT, **{"max_tokens": 64, **params}).answers[0]
    return answer.text, answer.finish_reason


def test_what_the_model_wants_is_kept_where_the_grammar_has_it(make_harness: MakeHarness) -> None:
    harness = make_harness(table=likes('{"a": [1, 2]}'))
    assert text_of(harness, grammar=OBJECT) == ('{"a": [1, 2]}', "stop")


def test_what_the_model_wants_gives_way_where_the_grammar_has_it_not(make_harness: MakeHarness) -> None:
    harness = make_harness(table=likes("Pinguin"))
    assert text_of(harness, grammar=Grammar("regex", "(Paris|London)")) == ("Paris", "stop")


def test_a_complete_text_ends_the_answer_without_an_end_token(make_harness: MakeHarness) -> None:
    harness = make_harness(table=likes("{}"))
    answer = harness.ask(PROMPT, grammar=OBJECT, max_tokens=2).answers[0]
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("{}", list(b"{}"), "stop")


def test_where_the_text_may_end_or_go_on_the_model_decides(make_harness: MakeHarness) -> None:
    answer = make_harness(table=likes("abc")).ask(PROMPT, grammar=LETTERS, max_tokens=64).answers[0]
    assert (answer.text, answer.token_ids[-1], answer.finish_reason) == ("abc", END, "stop")
    assert text_of(make_harness(table=likes("abc", then=ord("x"))), grammar=LETTERS) == ("abc" + "x" * 61, "length")


def test_an_empty_text_may_be_all_that_a_grammar_has(make_harness: MakeHarness) -> None:
    for ignore_eos in (False, True):
        harness = make_harness(table=likes("abc"))
        settings = {"ignore_eos": ignore_eos, "skip_special_tokens": False}
        assert text_of(harness, grammar=Grammar("regex", ""), **settings) == ("", "stop")


@pytest.mark.parametrize(
    ("grammar", "said", "cut"),
    [
        (OBJECT, '{"a": "never the end of a string', '{"a": "never the end'),
        (Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}}'), "[1, " * 20, None),
        (Grammar("lark", 'start: "<call>" %json {} "</call>"'), '<call>{"x": {"y": 1', '<call>{"x": {"y": 11'),
    ],
)
def test_tc_7_cut_off_json_is_returned_as_it_is_and_says_length(
    make_harness: MakeHarness, grammar: Grammar, said: str, cut: str | None
) -> None:
    text, reason = text_of(make_harness(table=likes(said, then=ord("1"))), grammar=grammar, max_tokens=20)
    assert reason == "length"
    assert len(text) == 20
    assert cut is None or text == cut
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


def test_tc_7_a_model_that_only_wants_blanks_ends_at_the_limit(make_harness: MakeHarness) -> None:
    for grammar in (OBJECT, Grammar("json_schema", "{}"), Grammar("regex", "x *y")):
        text, reason = text_of(make_harness(table=likes("", then=ord(" "))), grammar=grammar, max_tokens=20)
        assert (len(text), reason) == (20, "length")


def test_every_choice_follows_the_grammar_on_its_own(make_harness: MakeHarness) -> None:
    def table(_: Sequence[int]) -> Mapping[int, float]:
        return dict.fromkeys(range(END + 1), 1.0)

    grammar = Grammar("regex", "(ab|ac|bc)d")
    answers = make_harness(table=table).ask(PROMPT, grammar=grammar, n=8, temperature=1.0, seed=1).answers
    assert {answer.text for answer in answers} == {"abd", "acd", "bcd"}


def test_sc_3_preemption_changes_no_constrained_answer(make_harness: MakeHarness) -> None:
    grammar = Grammar("regex", "[a-f]{3}(-[a-f]{3}){20}")
    answers = []
    for num_blocks in (64, 6):
        harness = make_harness(num_blocks=num_blocks, max_model_len=6 * B, table=counting(200))
        requests = [
            harness.add(ids(50 * i, 20), max_tokens=40, temperature=1.0, seed=i, grammar=grammar) for i in range(3)
        ]
        harness.run()
        answers.append([harness.results[request].answers for request in requests])
    assert harness.stats.num_preemptions > 0
    assert answers[0] == answers[1]


def test_requests_with_and_without_grammars_share_steps(make_harness: MakeHarness) -> None:
    harness = make_harness(table=always(ord("z")))
    requests = [harness.add(PROMPT, grammar=grammar) for grammar in (None, Grammar("regex", "[a-c]{4}"), LETTERS, None)]
    harness.run()
    texts = [harness.results[request].answers[0].text for request in requests]
    assert texts == ["zzzz", "aaaa", "zzzz", "zzzz"]


def test_a_complete_text_ends_before_min_tokens(make_harness: MakeHarness) -> None:
    harness = make_harness(table=likes("ab"))
    assert text_of(harness, grammar=Grammar("regex", "ab"), min_tokens=30) == ("ab", "stop")
    assert text_of(harness, grammar=Grammar("regex", ""), min_tokens=30) == ("", "stop")


def test_min_tokens_and_ignore_eos_keep_a_text_going_while_the_grammar_lets_it(make_harness: MakeHarness) -> None:
    harness = make_harness(table=likes("ab"))
    text, reason = text_of(harness, grammar=LETTERS, min_tokens=10)
    assert (len(text), reason) == (10, "stop")
    text, reason = text_of(harness, grammar=LETTERS, ignore_eos=True)
    assert (len(text), reason) == (64, "length")
    text, reason = text_of(harness, grammar=Grammar("regex", "[a-z]{7}"), ignore_eos=True)
    assert (len(text), reason) == (7, "stop")


def test_a_stop_string_or_token_ends_a_constrained_answer(make_harness: MakeHarness) -> None:
    harness = make_harness(table=likes("abcdef"))
    assert text_of(harness, grammar=LETTERS, stop=("cd",)) == ("ab", "stop")
    assert text_of(harness, grammar=LETTERS, stop_token_ids=(ord("d"),)) == ("abc", "stop")


def test_special_tokens_of_a_grammar_are_drawn_and_hidden(make_harness: MakeHarness) -> None:
    grammar = Grammar("lark", 'start: <|start|> "ab" <|end|>')
    answer = make_harness(table=likes("zzz")).ask(PROMPT, grammar=grammar, max_tokens=9).answers[0]
    assert answer.token_ids == [START, *b"ab"]
    assert (answer.text, answer.finish_reason) == ("ab", "stop")


def test_a_bad_grammar_is_refused_and_harms_no_one(make_harness: MakeHarness) -> None:
    harness = make_harness()
    bad = [harness.add(PROMPT, grammar=Grammar("regex", source)) for source in ("(", "a" * 200_000)]
    good = harness.add(PROMPT)
    harness.run()
    for request in bad:
        assert (harness.failures[request].kind, harness.failures[request].param) == ("invalid_request", "grammar")
    assert len(harness.results[good].answers[0].token_ids) == 4


def test_a_grammar_that_cannot_be_followed_further_ends_its_own_request_alone(make_harness: MakeHarness) -> None:
    harness = make_harness(table=always(ord("a")))
    endless = harness.add(PROMPT, grammar=Grammar("regex", "a{1000000}"), n=2, max_tokens=9)
    others = [harness.add(PROMPT, max_tokens=9), harness.add(PROMPT, max_tokens=9, grammar=LETTERS)]
    harness.run()
    failure = harness.failures[endless]
    assert (failure.kind, failure.param) == ("invalid_request", "grammar")
    assert "cannot go on within the grammar" in failure.message
    assert [harness.results[request].answers[0].text for request in others] == ["a" * 9] * 2
