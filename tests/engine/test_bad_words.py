"""An answer contains no bad word, whatever else is asked for."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from radixserve import SamplingParams
from radixserve.engine.bad_words import encode_bad_words
from radixserve.errors import InvalidRequest
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.engine.harness import BLOCK_SIZE as B
from tests.engine.harness import MakeHarness, ids
from tests.tokenizer.builders import byte_level_backend, write_tokenizer

A, X = ord("a"), ord("x")


def cycle(context: Sequence[int]) -> Mapping[int, float]:
    """a b c d a b c d …, and now and then x, behind which comes a."""
    return {A + (context[-1] + 1 - A) % 4: 0.9, X: 0.1}


@pytest.mark.parametrize(
    ("bad_words", "text"),
    [
        ((), "abcdabcd"),
        (("b",), "axaxaxax"),
        (("bc",), "abxabxab"),
        ((" bc",), "abxabxab"),
        (("bcd", "ab"), "axaxaxax"),
        (("dabc",), "abcdabxa"),
        (("zz", "cx"), "abcdabcd"),
    ],
)
def test_a_bad_word_is_never_completed(make_harness: MakeHarness, bad_words: tuple[str, ...], text: str) -> None:
    harness = make_harness(table=cycle)
    for _ in ("cold", "on a hit"):
        result = harness.ask([ord("d")] * 5, max_tokens=8, bad_words=bad_words)
        assert result.answers[0].text == text


def test_a_word_that_begins_in_the_prompt_is_no_bad_word(make_harness: MakeHarness) -> None:
    answer = make_harness(table=cycle).ask(list(b"dab"), max_tokens=6, bad_words=("bc",)).answers[0]
    assert answer.text == "cdabxa"


def test_sampled_answers_and_preempted_ones_keep_to_it(make_harness: MakeHarness) -> None:
    harness = make_harness(table=cycle, num_blocks=6, max_model_len=6 * B)
    requests = [
        harness.add(ids(50 * i, 20), n=2, max_tokens=40, temperature=1.0, seed=i, bad_words=("cd",)) for i in range(3)
    ]
    harness.run()
    assert harness.stats.num_preemptions > 0
    texts = [answer.text for request in requests for answer in harness.results[request].answers]
    assert all("cd" not in text for text in texts)
    assert all("bc" in text for text in texts)


def test_neighbours_are_not_touched(make_harness: MakeHarness) -> None:
    harness = make_harness(table=cycle)
    limited = harness.add([ord("d")], max_tokens=8, bad_words=("b",))
    free = harness.add([ord("d")], max_tokens=8)
    harness.run()
    assert [harness.results[request].answers[0].text for request in (limited, free)] == ["axaxaxax", "abcdabcd"]


def test_a_word_is_banned_behind_a_space_too(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_level_backend()))
    plain, spaced = (tokenizer.encode(text) for text in ("is", " is"))
    assert len(plain) == len(spaced) == 1
    assert encode_bad_words(["is", " is"], tokenizer) == (tuple(plain), tuple(spaced))


def test_a_space_that_is_its_own_token_adds_no_spelling(tokenizer: Tokenizer) -> None:
    assert encode_bad_words(["ab", "ab"], tokenizer) == (tuple(b"ab"),)


@pytest.mark.parametrize("words", [("",), ("a", " "), ("x" * 1025,), ("a",) * 257, "abc", (1,)])
def test_what_is_no_list_of_words_is_refused(words: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(bad_words=words)
    assert caught.value.param == "bad_words"


def test_a_word_that_no_tokenizer_takes_is_refused_and_the_engine_goes_on(make_harness: MakeHarness) -> None:
    harness = make_harness(table=cycle)
    refused = harness.add([ord("d")], bad_words=("\ud800",))
    assert harness.ask([ord("d")], max_tokens=2).answers[0].text == "ab"
    assert "surrogate" in harness.failures[refused].message
