"""What is remembered of answers, for whom, and how much."""

from pathlib import Path

import pytest

from radixserve.engine.answer import Answer
from radixserve.engine.answer_memory import AnswerMemory, AnswerRecorder
from radixserve.protocol import Delta
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.byte_tokenizer import END, PAD, write_byte_tokenizer

PROMPT = [1, 2, 3]


def answer(text: str, token_ids: list[int] | None = None) -> Answer:
    ids = [*text.encode(), END] if token_ids is None else token_ids
    return Answer(0, text_pieces=[text], token_ids=ids, finish_reason="stop")


def test_the_ids_of_a_text_come_back_without_the_end_token(tokenizer: Tokenizer) -> None:
    memory = AnswerMemory(tokenizer)
    memory.remember(b"", PROMPT, answer("hello"))
    find = memory.lookup(b"")
    assert list(find("hello") or ()) == list(b"hello")
    assert [find(text) for text in ("hell", "hello ", "", "Hello")] == [None] * 4


def test_a_namespace_does_not_see_the_answers_of_another(tokenizer: Tokenizer) -> None:
    memory = AnswerMemory(tokenizer)
    memory.remember(b"a", PROMPT, answer("hello"))
    assert memory.lookup(b"a")("hello") is not None
    assert memory.lookup(b"")("hello") is None
    assert memory.lookup(b"b")("hello") is None


@pytest.mark.parametrize(
    ("text", "token_ids"),
    [
        ("ab", [97, PAD, 98, END]),  # a special token that the text does not show
        ("a<|pad|>b", [97, PAD, 98, END]),  # one that it does
        ("ab", [97, 99, END]),  # ids of another text
        ("abc", [97, 98]),  # or of a part of it
        ("", [END]),
        ("", []),
        ("é", [0xC3, END]),
    ],
)
def test_an_answer_that_is_not_plainly_its_ids_is_not_remembered(
    tokenizer: Tokenizer, text: str, token_ids: list[int]
) -> None:
    memory = AnswerMemory(tokenizer)
    memory.remember(b"", PROMPT, answer(text, token_ids))
    assert memory.lookup(b"")(text) is None
    assert memory.num_bytes == 0


def test_a_text_cut_at_a_stop_string_has_the_ids_before_it(tokenizer: Tokenizer) -> None:
    memory = AnswerMemory(tokenizer)
    memory.remember(b"", PROMPT, answer("ab", list(b"abSTOP")))
    assert list(memory.lookup(b"")("ab") or ()) == list(b"ab")


def test_a_text_that_ends_inside_a_character_has_all_its_ids(tokenizer: Tokenizer) -> None:
    memory = AnswerMemory(tokenizer)
    memory.remember(b"", PROMPT, answer("a\ufffd", [97, 0xC3]))
    assert list(memory.lookup(b"")("a\ufffd") or ()) == [97, 0xC3]


def test_control_tokens_that_are_not_marked_special_are_refused_too(tmp_path: Path) -> None:
    directory = write_byte_tokenizer(tmp_path)
    tokens = directory / "tokenizer.json"
    tokens.write_text(
        tokens.read_text().replace('"special":true', '"special":false').replace('"special": true', '"special": false')
    )
    plain = Tokenizer.load(directory)
    memory = AnswerMemory(plain)
    memory.remember(b"", PROMPT, answer("a<|pad|>", [97, PAD]))
    assert memory.lookup(b"")("a<|pad|>") is None


def test_of_two_answers_with_one_text_the_later_counts(tokenizer: Tokenizer) -> None:
    memory = AnswerMemory(tokenizer)
    memory.remember(b"", PROMPT, answer("a\ufffd", [97, 0xC3]))
    size = memory.num_bytes
    memory.remember(b"", PROMPT, answer("a\ufffd", [97, 0xC4]))
    assert list(memory.lookup(b"")("a\ufffd") or ()) == [97, 0xC4]
    assert memory.num_bytes == size


def test_the_least_recently_used_answer_goes_first(tokenizer: Tokenizer) -> None:
    memory = AnswerMemory(tokenizer, max_answers=2)
    find = memory.lookup(b"")
    for text in ("one", "two"):
        memory.remember(b"", PROMPT, answer(text))
    find("one")
    memory.remember(b"", PROMPT, answer("three"))
    assert [find(text) is not None for text in ("one", "two", "three")] == [True, False, True]


def test_the_least_recently_used_namespace_goes_first(tokenizer: Tokenizer) -> None:
    memory = AnswerMemory(tokenizer, max_namespaces=2)
    for namespace in (b"a", b"b"):
        memory.remember(namespace, PROMPT, answer("x"))
    memory.lookup(b"a")("x")
    memory.remember(b"c", PROMPT, answer("x"))
    assert [memory.lookup(namespace)("x") is not None for namespace in (b"a", b"b", b"c")] == [True, False, True]


def test_a_namespace_that_is_full_takes_nothing_from_the_others(tokenizer: Tokenizer) -> None:
    memory = AnswerMemory(tokenizer, max_bytes=4096)
    memory.remember(b"quiet", PROMPT, answer("x"))
    for number in range(200):
        memory.remember(b"busy", PROMPT, answer(f"answer {number}"))
        assert memory.num_bytes <= 2 * 4096
    assert memory.lookup(b"quiet")("x") is not None
    assert memory.lookup(b"busy")("answer 0") is None
    assert memory.lookup(b"busy")("answer 199") is not None


def test_an_answer_over_the_bound_is_not_kept(tokenizer: Tokenizer) -> None:
    memory = AnswerMemory(tokenizer, max_bytes=4096)
    memory.remember(b"", PROMPT, answer("x" * 4096))
    assert memory.num_bytes == 0


def test_an_answer_over_the_bound_drives_out_no_other(tokenizer: Tokenizer) -> None:
    memory = AnswerMemory(tokenizer, max_bytes=4096, max_namespaces=1)
    memory.remember(b"", PROMPT, answer("small"))
    memory.remember(b"", PROMPT, answer("x" * 4096))
    memory.remember(b"other", PROMPT, answer("x" * 4096))
    assert memory.lookup(b"")("small") is not None


def test_looking_up_makes_no_namespace(tokenizer: Tokenizer) -> None:
    memory = AnswerMemory(tokenizer, max_namespaces=1)
    memory.remember(b"", PROMPT, answer("x"))
    for number in range(10):
        memory.lookup(bytes([number]))("x")
    assert memory.lookup(b"")("x") is not None


def test_a_recorder_waits_for_the_end_of_each_answer(tokenizer: Tokenizer) -> None:
    memory = AnswerMemory(tokenizer)
    recorder = AnswerRecorder(memory, b"", PROMPT)
    find = memory.lookup(b"")
    for index, letter in ((0, "a"), (1, "b"), (0, "c")):
        recorder.add(Delta("r", index, letter, [ord(letter)]))
    assert find("ac") is None
    recorder.add(Delta("r", 0, "", [END], finish_reason="stop"))
    recorder.add(Delta("r", 1, "d", [ord("d")], finish_reason="length"))
    assert list(find("ac") or ()) == list(b"ac")
    assert list(find("bd") or ()) == list(b"bd")
