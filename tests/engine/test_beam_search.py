"""Beam search over tables of probabilities, where the right answers can be worked out by hand."""

import math
from collections.abc import Callable, Mapping, Sequence

import pytest

from radixserve.engine.answer import GenerationResult
from tests.byte_tokenizer import END
from tests.engine.harness import MakeHarness, ids
from tests.stub import Table


def after(prompt_length: int, table: Callable[[str], Mapping[str, float]]) -> Table:
    """A table over the text of the answer so far; "." stands for the end token."""

    def probabilities(context: Sequence[int]) -> dict[int, float]:
        answer = bytes(token for token in context[prompt_length:] if token < 256).decode()
        return {END if text == "." else ord(text): share for text, share in table(answer).items()}

    return probabilities


def texts(result: GenerationResult) -> list[str]:
    return [answer.text for answer in result.answers]


def sums(result: GenerationResult) -> list[float]:
    return [answer.beam.cumulative_logprob for answer in result.answers]


def log(*probabilities: float) -> float:
    return sum(map(math.log, probabilities))


@pytest.mark.parametrize("prompt_length", [1, 7, 8, 64])
def test_bs_1_the_length_penalty_counts_generated_tokens_only(make_harness: MakeHarness, prompt_length: int) -> None:
    answers = {"": {"a": 0.55, "b": 0.45}, "a": {".": 1.0}, "b": {"c": 1.0}, "bc": {"c": 1.0}, "bcc": {"c": 1.0}}
    harness = make_harness(table=after(prompt_length, lambda answer: answers.get(answer, {".": 1.0})))
    prompt = ids(1, prompt_length)
    normal = harness.search(prompt, beam_width=2, max_tokens=8)
    assert texts(normal) == ["bccc", "a"]
    assert sums(normal) == pytest.approx([-0.7985, -0.5978], abs=1e-4)
    # The end token counts: 5 and 2 tokens.
    assert [answer.beam.score for answer in normal.answers] == pytest.approx([-0.7985 / 5, -0.5978 / 2], abs=1e-4)
    assert texts(harness.search(prompt, beam_width=2, max_tokens=8, length_penalty=0.0)) == ["a", "bccc"]


def test_bs_2_a_stop_string_across_tokens_finishes_a_hypothesis(make_harness: MakeHarness) -> None:
    def table(answer: str) -> dict[str, float]:
        spelled = "xENDy"
        if answer == "":
            return {"x": 0.6, "z": 0.4}
        return {spelled[len(answer)] if spelled.startswith(answer) and answer != spelled else "z": 1.0}

    harness = make_harness(table=after(5, table))
    result = harness.search(ids(1, 5), beam_width=2, max_tokens=8, stop=("END",), early_stopping="never")
    by_text = {answer.text: answer for answer in result.answers}
    assert by_text["x"].finish_reason == "stop"
    assert by_text["x"].stop_reason == "END"
    assert bytes(by_text["x"].token_ids) == b"xEND"
    assert by_text["x"].beam.cumulative_logprob == pytest.approx(log(0.6))
    assert by_text["zzzzzzzz"].finish_reason == "length"
    kept = harness.search(ids(1, 5), beam_width=2, max_tokens=8, stop=("END",), include_stop_str_in_output=True)
    assert "xEND" in texts(kept)


def test_bs_3_a_hypothesis_that_ends_takes_no_live_ones_place(make_harness: MakeHarness) -> None:
    def table(answer: str) -> dict[str, float]:
        if answer == "":
            return {".": 0.5, "a": 0.3, "b": 0.2}
        return {".": 1.0} if answer == "b" else {".": 0.1, "a": 0.3, "b": 0.3, "c": 0.3}

    harness = make_harness(table=after(5, table))
    result = harness.search(ids(1, 5), beam_width=2, length_penalty=0.0)
    assert texts(result) == ["", "b"]
    assert sums(result) == pytest.approx([-0.6931, -1.6094], abs=1e-4)
    assert [answer.token_ids[-1] for answer in result.answers] == [END, END]


@pytest.mark.parametrize(("beam_width", "max_tokens"), [(3, 4), (16, 4), (3, 1)])
def test_bs_4_a_search_without_end_token_ends_at_max_tokens(
    make_harness: MakeHarness, beam_width: int, max_tokens: int
) -> None:
    harness = make_harness(table=after(5, lambda _: {"a": 0.6, "b": 0.4}), max_num_seqs=20)
    request = harness.add_beams(ids(1, 5), beam_width=beam_width, max_tokens=max_tokens)
    neighbour = harness.add(ids(1, 5), max_tokens=9)
    for num_tokens in range(1, 10):
        assert not harness.results[request].answers[0].token_ids
        harness.step()
        assert len(harness.results[neighbour].answers[0].token_ids) == num_tokens
        if num_tokens == max_tokens:
            break
    answers = harness.results[request].answers
    assert all(len(answer.token_ids) == max_tokens and answer.finish_reason == "length" for answer in answers)
    assert len({tuple(answer.token_ids) for answer in answers}) == beam_width
    assert answers[0].text == "a" * max_tokens
    assert answers[0].beam.cumulative_logprob == pytest.approx(log(0.6) * max_tokens, abs=1e-4)
    harness.run()


@pytest.mark.parametrize("beam_width", [1, 2, 10, 11, 16])
def test_bs_5_every_width_up_to_the_limit_works(make_harness: MakeHarness, beam_width: int) -> None:
    harness = make_harness(max_num_seqs=16)
    result = harness.search(ids(1, 20), beam_width=beam_width, max_tokens=5)
    assert len({tuple(answer.token_ids) for answer in result.answers}) == beam_width
    assert result.answers[0].token_ids == harness.ask(ids(1, 20), max_tokens=5).answers[0].token_ids


def test_bs_5_a_width_above_the_limit_is_refused_by_name(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=16)
    request = harness.add_beams(ids(1, 20), beam_width=17)
    harness.run()
    assert harness.failures[request].param == "beam_width"
    assert "16" in harness.failures[request].message


def test_bs_6_nothing_is_told_before_the_search_is_over(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.add_beams(ids(1, 20), beam_width=3, max_tokens=6)
    deltas = [harness.core.step().deltas for _ in range(6)]
    assert [len(step) for step in deltas] == [0, 0, 0, 0, 0, 3]
    assert [delta.index for delta in deltas[-1]] == [0, 1, 2]
    assert not harness.core.has_work


def test_bs_8_results_differ_and_nothing_follows_an_end_token(make_harness: MakeHarness) -> None:
    table = {"": {"a": 0.9, "b": 0.1}, "a": {".": 0.9, "b": 0.1}, "b": {".": 0.9, "a": 0.1}}
    harness = make_harness(table=after(5, lambda answer: table.get(answer, {".": 1.0})))
    result = harness.search(ids(1, 5), beam_width=3, length_penalty=0.0)
    assert texts(result)[0] == "a"
    assert sorted(texts(result)[1:]) == ["ab", "b"]
    assert sums(result) == pytest.approx([-0.2107, -2.4079, -2.4079], abs=1e-4)
    assert all(answer.token_ids.index(END) == len(answer.token_ids) - 1 for answer in result.answers)


@pytest.mark.parametrize("bias", [{ord("a"): -100.0}, {ord("c"): 100.0}])
def test_api_18_a_bias_forbids_or_forces_a_token_in_every_beam(make_harness: MakeHarness, bias: dict) -> None:
    harness = make_harness(table=after(5, lambda _: {"a": 0.6, "b": 0.3, "c": 0.1}))
    neighbour = harness.add_beams(ids(1, 5), beam_width=3, max_tokens=5)
    request = harness.add_beams(ids(1, 5), beam_width=3, max_tokens=5, logit_bias=bias)
    harness.run()
    assert texts(harness.results[neighbour])[0] == "aaaaa"
    best = texts(harness.results[request])[0]
    assert best == ("ccccc" if ord("c") in bias else "bbbbb")
    again = harness.search(ids(1, 5), beam_width=3, max_tokens=5, logit_bias=bias)
    assert again.num_cached_tokens > 0
    assert texts(again) == texts(harness.results[request])


def test_biases_change_log_probabilities_that_are_not_normalised_again(make_harness: MakeHarness) -> None:
    harness = make_harness(table=after(5, lambda _: {"a": 0.6, "b": 0.4}))
    result = harness.search(ids(1, 5), beam_width=2, max_tokens=2, logit_bias={ord("b"): 1.0})
    assert texts(result)[0] == "bb"
    assert sums(result)[0] == pytest.approx(2 * (log(0.4) + 1))


def test_penalties_count_what_the_beam_itself_has_generated(make_harness: MakeHarness) -> None:
    harness = make_harness(table=after(5, lambda _: {"a": 0.5, "b": 0.3, "c": 0.2}))
    result = harness.search(ids(1, 5), beam_width=3, max_tokens=3, presence_penalty=2.0)
    assert {frozenset(text) for text in texts(result)} == {frozenset("abc")}
    assert sums(result) == pytest.approx([log(0.5, 0.3, 0.2)] * 3)


def test_a_stop_token_ends_a_hypothesis_and_is_told(make_harness: MakeHarness) -> None:
    harness = make_harness(table=after(5, lambda answer: {"b": 0.6, "a": 0.4} if answer else {"a": 0.9, "b": 0.1}))
    result = harness.search(ids(1, 5), beam_width=2, max_tokens=4, stop_token_ids=(ord("b"),), length_penalty=0.0)
    assert texts(result) == ["a", "aa"]
    assert [bytes(answer.token_ids) for answer in result.answers] == [b"ab", b"aab"]
    assert [(answer.finish_reason, answer.stop_reason) for answer in result.answers] == [("stop", ord("b"))] * 2


def test_no_end_comes_before_min_tokens(make_harness: MakeHarness) -> None:
    harness = make_harness(table=after(5, lambda _: {".": 0.5, "E": 0.3, "b": 0.2}))
    result = harness.search(ids(1, 5), beam_width=3, max_tokens=6, min_tokens=3, stop=("E",), length_penalty=0.0)
    assert all(len(answer.token_ids) >= 3 for answer in result.answers)
    assert all(answer.finish_reason == "stop" for answer in result.answers)
    # An E among the first two is ordinary text.
    assert texts(result)[0] == "EE"


def test_ignore_eos_goes_on_over_end_tokens(make_harness: MakeHarness) -> None:
    harness = make_harness(table=after(5, lambda _: {".": 0.6, "b": 0.4}))
    result = harness.search(ids(1, 5), beam_width=2, max_tokens=3, ignore_eos=True)
    assert result.answers[0].token_ids == [END] * 3
    assert {answer.finish_reason for answer in result.answers} == {"length"}


def test_a_single_beam_ends_with_its_first_end_token(make_harness: MakeHarness) -> None:
    # A long answer would score better; greedy decoding does not look for it.
    harness = make_harness(table=after(5, lambda answer: {"b": 1.0} if answer else {".": 0.6, "b": 0.4}))
    assert texts(harness.search(ids(1, 5), beam_width=1, max_tokens=9)) == [""]
    assert texts(harness.search(ids(1, 5), beam_width=2, max_tokens=9))[0] == "b" * 9


@pytest.mark.parametrize(
    ("early_stopping", "num_steps"),
    # The live beam is worth log(0.1) now, per token half of that, and at 8 tokens an eighth.
    [(True, 2), (False, 2), ("never", 8)],
)
def test_early_stopping_says_how_long_live_beams_are_waited_for(
    make_harness: MakeHarness, early_stopping: bool | str, num_steps: int
) -> None:
    def table(answer: str) -> dict[str, float]:
        if answer == "":
            return {".": 0.45, "a": 0.45, "b": 0.1}
        return {".": 1.0} if answer == "a" else {"c": 1.0}

    harness = make_harness(table=after(5, table))
    result = harness.search(ids(1, 5), beam_width=2, max_tokens=8, early_stopping=early_stopping)
    assert harness.stats.num_steps == num_steps
    assert (texts(result)[0] == "bccccccc") == (early_stopping == "never")


@pytest.mark.parametrize("length_penalty", [100.0, -100.0])
def test_no_length_penalty_leaves_the_range_of_floats(make_harness: MakeHarness, length_penalty: float) -> None:
    harness = make_harness(num_blocks=80)
    result = harness.search(ids(1, 5), beam_width=2, max_tokens=400, length_penalty=length_penalty)
    assert all(math.isfinite(answer.beam.score) for answer in result.answers)


def test_a_character_of_several_tokens_survives_forks(make_harness: MakeHarness) -> None:
    smile, other = "😊".encode(), "😎".encode()

    def table(context: Sequence[int]) -> dict[int, float]:
        answer = bytes(context[5:])
        nexts = {text[len(answer)] for text in (smile, other) if text.startswith(answer) and text != answer}
        return {token_id: 1 / len(nexts) for token_id in nexts} or {END: 1.0}

    harness = make_harness(table=table)
    result = harness.search(ids(1, 5), beam_width=2, max_tokens=8, stop=("x",))
    assert set(texts(result)) == {"😊", "😎"}
    stopped = harness.search(ids(1, 5), beam_width=2, max_tokens=8, stop=("😊",), length_penalty=0.0)
    assert set(texts(stopped)) == {"", "😎"}


def test_a_width_that_the_vocabulary_cannot_fill_is_refused(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=300, max_num_batched_tokens=300, num_blocks=600)
    stops = tuple(range(140))
    request = harness.add_beams(ids(1, 5), beam_width=128, max_tokens=1, stop_token_ids=stops)
    harness.run()
    assert harness.failures[request].param == "beam_width"
