"""An answer keeps to the tokens that it is limited to."""

import pytest

from radixserve import SamplingParams
from radixserve.core.constraint import token_mask
from radixserve.errors import InvalidRequest
from radixserve.grammar import Grammar
from tests.byte_tokenizer import END
from tests.engine.harness import MakeHarness, ids

PROMPT = ids(1, 20)
LETTERS = {ord("a"): 0.6, ord("b"): 0.2, ord("c"): 0.15, END: 0.05}


def test_a_mask_has_a_bit_for_each_token() -> None:
    assert token_mask([0, 9, 9]) == bytes([1, 2])
    assert token_mask([7, 23]) == bytes([128, 0, 128])


@pytest.mark.parametrize(
    ("allowed", "text"),
    [(b"abc", "aaaa"), (b"bc", "bbbb"), (b"c", "cccc"), (b"zy", "yyyy"), (None, "aaaa")],
)
def test_the_best_of_the_allowed_tokens_is_drawn(make_harness: MakeHarness, allowed: bytes | None, text: str) -> None:
    harness = make_harness(table=lambda _: LETTERS)
    for _ in ("cold", "on a hit"):
        answer = harness.ask(PROMPT, allowed_token_ids=None if allowed is None else tuple(allowed)).answers[0]
        assert (answer.text, answer.finish_reason) == (text, "length")


def test_an_allowed_end_token_ends_the_answer(make_harness: MakeHarness) -> None:
    answer = make_harness(table=lambda _: LETTERS).ask(PROMPT, allowed_token_ids=(END, ord("z"))).answers[0]
    assert (answer.token_ids, answer.finish_reason) == ([END], "stop")


def test_answers_that_are_sampled_and_neighbours(make_harness: MakeHarness) -> None:
    harness = make_harness(table=lambda _: LETTERS)
    sampling = {"temperature": 2.0, "seed": 1, "max_tokens": 20, "ignore_eos": True}
    limited = harness.add(PROMPT, n=3, allowed_token_ids=tuple(b"bc"), **sampling)
    free = harness.add(PROMPT, **sampling)
    harness.run()
    for answer in harness.results[limited].answers:
        assert set(answer.text) == {"b", "c"}
    assert "a" in harness.results[free].answers[0].text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"bad_words": ("b",)}, "cccc"),
        ({"min_tokens": 2}, "bbbb"),
        ({"logit_bias": {ord("c"): 10.0, ord("a"): 100.0}}, "cccc"),
        # Something has to be drawn: what is allowed goes before what is not wanted.
        ({"bad_words": ("b", "c")}, "bbbb"),
    ],
)
def test_other_limits_choose_among_what_is_allowed(make_harness: MakeHarness, settings: dict, text: str) -> None:
    harness = make_harness(table=lambda _: LETTERS)
    assert harness.ask(PROMPT, allowed_token_ids=tuple(b"bc"), **settings).answers[0].text == text


@pytest.mark.parametrize("wrong", [{"allowed_token_ids": ()}, {"allowed_token_ids": (5, -1)}])
def test_what_limits_nothing_is_refused(wrong: dict) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**wrong)
    assert caught.value.param == "allowed_token_ids"


def test_a_grammar_is_a_limit_of_its_own() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(allowed_token_ids=(1,), grammar=Grammar("regex", "a"))
    assert caught.value.param == "allowed_token_ids"
