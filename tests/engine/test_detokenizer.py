from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixserve.engine.detokenizer import Detokenizer
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.byte_tokenizer import END, START, load_byte_tokenizer
from tests.tokenizer.builders import WordPieces, write_word_pieces


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> WordPieces:
    return write_word_pieces(
        tmp_path_factory.mktemp("pieces"), ["ab", "st", "op-", "he", "re", "zz", "a", "b", "c", "d", "x", "EN", "D"]
    )


def deltas(tokenizer: Tokenizer, chunks: list[list[int]], prompt: tuple[int, ...] = (), **params: object) -> list[str]:
    """Text of each push, and of the flush at the end."""
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(**params))
    texts = [detokenizer.push(chunk) for chunk in chunks]
    return [*texts, detokenizer.flush()]


def cut(data: bytes, *lengths: int) -> list[list[int]]:
    chunks, start = [], 0
    for length in lengths:
        chunks.append(list(data[start : start + length]))
        start += length
    assert start == len(data)
    return chunks


@pytest.mark.parametrize("lengths", [(1, 1, 1, 1), (2, 2), (3, 1), (4,)])
def test_st_1_a_character_split_over_tokens_arrives_whole(tokenizer: Tokenizer, lengths: tuple[int, ...]) -> None:
    texts = deltas(tokenizer, cut("😊".encode(), *lengths))
    assert texts == [""] * (len(lengths) - 1) + ["😊", ""]


@pytest.mark.parametrize("text", ["\u4f60", "é", "👨\u200d👩\u200d👧\u200d👦", "a😊b\u4f60c"])
def test_st_1_joined_deltas_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = list(text.encode())
    texts = deltas(tokenizer, [[i] for i in ids])
    assert "".join(texts) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in delta for delta in texts)


def test_st_1_a_bad_byte_is_one_replacement_mark_and_later_text_is_intact(tokenizer: Tokenizer) -> None:
    ids = [*"é".encode(), 0xFF, *"ok 😊".encode()]
    assert "".join(deltas(tokenizer, [[i] for i in ids])) == tokenizer.decode(ids) == "é\ufffdok 😊"


def test_st_1_a_cut_inside_a_character_reads_the_same_streamed_and_whole(tokenizer: Tokenizer) -> None:
    ids = list("ab😊".encode())[:-1]
    texts = deltas(tokenizer, [[i] for i in ids])
    assert texts == ["a", "b", "", "", "", "\ufffd"]
    assert "".join(texts) == tokenizer.decode(ids)


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (("stop-here",), "ab"),
        (("op-h",), "abst"),
        (("stop-here", "stop"), "ab"),
        (("stop", "stop-here"), "ab"),
        (("stop-hers", "op"), "abst"),
        (("absent",), "abstop-herezz"),
    ],
)
def test_st_2_a_stop_string_across_tokens_is_cut(
    pieces: WordPieces, stop: tuple[str, ...], text: str, is_streamed: bool
) -> None:
    ids = pieces.ids("ab", "st", "op-", "he", "re", "zz")
    chunks = [[i] for i in ids] if is_streamed else [ids]
    assert "".join(deltas(pieces.tokenizer, chunks, stop=stop)) == text


def test_st_2_only_a_possible_beginning_of_a_stop_string_is_held_back(pieces: WordPieces) -> None:
    chunks = [pieces.ids(piece) for piece in ("ab", "st", "zz", "st", "op-", "zz", "st")]
    assert deltas(pieces.tokenizer, chunks, stop=("stop-here",)) == ["ab", "", "stzz", "", "", "stop-zz", "", "st"]


def test_of_several_stop_strings_the_first_complete_wins_then_the_longest(pieces: WordPieces) -> None:
    for pushed in (("a", "b", "c", "d"), ("ab", "c", "d")):
        for stop, stopped_by in ((("abcd", "bc"), "bc"), (("bc", "abc", "c"), "abc"), (("d", "abcde"), "d")):
            detokenizer = Detokenizer(pieces.tokenizer, (), SamplingParams(stop=stop))
            text = "".join(detokenizer.push(pieces.ids(piece)) for piece in pushed)
            assert detokenizer.stopped_by == stopped_by
            assert text == "abcd"[: "abcd".index(stopped_by)]


def test_nothing_follows_a_stop_string(pieces: WordPieces) -> None:
    detokenizer = Detokenizer(pieces.tokenizer, (), SamplingParams(stop=("END",)))
    assert [detokenizer.push(pieces.ids(piece)) for piece in ("x", "EN", "D", "zz")] == ["x", "", "", ""]
    assert detokenizer.stopped_by == "END"
    assert detokenizer.flush() == ""


def test_a_stop_string_may_be_kept_in_the_output(pieces: WordPieces) -> None:
    detokenizer = Detokenizer(pieces.tokenizer, (), SamplingParams(stop=("op-h",), include_stop_str_in_output=True))
    assert "".join(detokenizer.push(pieces.ids(piece)) for piece in ("ab", "st", "op-", "he", "re")) == "abstop-h"
    assert detokenizer.stopped_by == "op-h"


def test_a_stop_string_complete_before_min_tokens_is_text(pieces: WordPieces) -> None:
    chunks = [pieces.ids(piece) for piece in ("a", "b", "c", "a", "b", "d")]
    for min_tokens, text in ((0, ""), (2, ""), (3, "abc"), (5, "abc"), (6, "abcabd")):
        assert "".join(deltas(pieces.tokenizer, chunks, stop=("ab",), min_tokens=min_tokens)) == text


def test_a_stop_string_may_begin_before_min_tokens(pieces: WordPieces) -> None:
    chunks = [pieces.ids(piece) for piece in ("x", "a", "b", "c")]
    assert "".join(deltas(pieces.tokenizer, chunks, stop=("ab",), min_tokens=3)) == "x"
    chunks = [pieces.ids(piece) for piece in ("a", "b", "a", "b", "a", "c")]
    assert "".join(deltas(pieces.tokenizer, chunks, stop=("aba",), min_tokens=4)) == "ab"


@pytest.mark.parametrize(
    ("end", "params", "text"),
    [
        (END, {}, "hi"),
        (END, {"skip_special_tokens": False}, "hi"),
        (END, {"include_stop_str_in_output": True}, "hi"),
        (END, {"include_stop_str_in_output": True, "skip_special_tokens": False}, "hi<|end|>"),
        (ord("!"), {}, "hi"),
        (ord("!"), {"include_stop_str_in_output": True}, "hi!"),
    ],
)
def test_an_end_token_adds_no_text_unless_asked(
    tokenizer: Tokenizer, end: int, params: dict[str, bool], text: str
) -> None:
    detokenizer = Detokenizer(tokenizer, (), SamplingParams(**params))
    assert detokenizer.push([*b"hi", end], is_end_token=True) + detokenizer.flush() == text


def test_an_end_token_gives_out_what_was_held_back(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, (), SamplingParams(stop=("hit",)))
    assert detokenizer.push(list(b"hi")) == ""
    assert detokenizer.push([END], is_end_token=True) == "hi"
    assert detokenizer.flush() == ""
    assert detokenizer.stopped_by is None


def test_st_7_special_tokens_are_shown_only_if_asked(tokenizer: Tokenizer) -> None:
    chunks = [[*b"a"], [START], [*b"<|end|>"]]
    assert "".join(deltas(tokenizer, chunks)) == "a<|end|>"
    assert "".join(deltas(tokenizer, chunks, skip_special_tokens=False)) == "a<|start|><|end|>"


def test_an_answer_may_complete_the_prompts_last_character(tokenizer: Tokenizer) -> None:
    data = "😊".encode()
    assert deltas(tokenizer, [list(data[2:]), [*b"!"]], prompt=(*b"x", *data[:2])) == ["😊", "!", ""]


CHUNKS = st.lists(st.lists(st.sampled_from(list(range(256)) + [END] * 8)), max_size=12)


@given(chunks=CHUNKS, skip=st.booleans())
@settings(deadline=None, derandomize=True)
def test_joined_deltas_of_any_tokens_are_their_text(tokenizer: Tokenizer, chunks: list[list[int]], skip: bool) -> None:
    whole = tokenizer.decode([i for chunk in chunks for i in chunk], skip_special_tokens=skip)
    assert "".join(deltas(tokenizer, chunks, skip_special_tokens=skip)) == whole


@given(text=st.text(), data=st.data())
@settings(deadline=None, derandomize=True)
def test_valid_text_cut_anywhere_shows_no_replacement_mark(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)))))
    bounds = zip([0, *cuts], [*cuts, len(encoded)], strict=True)
    texts = deltas(tokenizer, [list(encoded[start:end]) for start, end in bounds])
    assert "".join(texts) == text
    assert sum(delta.count("\ufffd") for delta in texts) == text.count("\ufffd")


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where and by what a text stops, by trying every end: the definition, without any cleverness."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


@given(
    text=st.text(alphabet="aé", max_size=40),
    stops=st.lists(st.text(alphabet="aé", min_size=1, max_size=5), min_size=1, max_size=4),
    data=st.data(),
)
@settings(deadline=None, derandomize=True, max_examples=400)
def test_stop_strings_are_found_alike_however_the_text_arrives(
    tokenizer: Tokenizer, text: str, stops: list[str], data: st.DataObject
) -> None:
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=10)))
    detokenizer = Detokenizer(tokenizer, (), SamplingParams(stop=tuple(stops)))
    bounds = zip([0, *cuts], [*cuts, len(encoded)], strict=True)
    streamed = ""
    for start, end in bounds:
        streamed += detokenizer.push(list(encoded[start:end]))
        so_far = encoded[:end].decode(errors="ignore")
        if (stop := first_stop(so_far, stops)) is None:
            # Nothing is sent that a stop string could still take back, and nothing else is kept.
            held = max(n for s in stops for n in range(len(s)) if so_far.endswith(s[:n]))
            assert streamed == so_far[: len(so_far) - held]
        else:
            assert (streamed, detokenizer.stopped_by) == (so_far[: stop[0]], stop[1])
    if detokenizer.stopped_by is None:
        assert streamed + detokenizer.flush() == text


def test_a_stop_string_that_begins_inside_a_false_beginning_is_found(tokenizer: Tokenizer) -> None:
    for stop in map("".join, product("ab", repeat=4)):
        for text in map("".join, product("ab", repeat=7)):
            assert "".join(deltas(tokenizer, [[i] for i in text.encode()], stop=(stop,))) == text.partition(stop)[0]


def test_st_3_a_leading_space_of_the_answer_is_kept(tmp_path: Path) -> None:
    tokenizer = load_byte_tokenizer(tmp_path)
    assert deltas(tokenizer, [[*b" "], [*b" a"]], prompt=(*b"hi",)) == [" ", " a", ""]


def test_a_fork_goes_on_by_itself_from_inside_a_character_and_a_stop_string(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=("😊END",))
    trunk = Detokenizer(tokenizer, (), params)
    begun, rest = "a😊".encode()[:3], "a😊".encode()[3:]
    assert trunk.push(list(begun)) == "a"
    stopped, other, cut_off = trunk.fork(), trunk.fork(), trunk.fork()
    assert stopped.push([*rest, *b"EN"]) == ""
    late = stopped.fork()
    assert stopped.push(list(b"D!")) == ""
    assert stopped.stopped_by == "😊END"
    assert late.push(list(b"x")) == "😊ENx"
    assert late.stopped_by is None
    assert other.push([*rest, *b"?"]) == "😊?"
    assert cut_off.flush() == "\ufffd"
    assert trunk.push([*rest, *b"ENDx"]) == ""
    assert trunk.stopped_by == "😊END"
