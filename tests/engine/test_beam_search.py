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
