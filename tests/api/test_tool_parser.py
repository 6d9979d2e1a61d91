"""Calls are read out of an answer's text, the same however it is cut."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixserve.api.tool_parser import HermesParser
from radixserve.protocol import FinishReason


@dataclass
class Read:
    """What a client puts together from all that a parser returned; ids are counted, as they differ each time."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    finish_reason: str | None = None


def read(pieces: list[str], finish_reason: FinishReason = "stop", **settings: Any) -> Read:
    parser = HermesParser(**settings)
    whole = Read()
    for piece, reason in [*((piece, None) for piece in pieces), ("", finish_reason)]:
        parsed = parser.push(piece, reason)
        whole.content += parsed.content
        whole.finish_reason = parsed.finish_reason
        for call in parsed.calls:
            if call.index == len(whole.calls):
                assert call.id is not None
                assert call.name is not None
                whole.ids.append(call.id)
                whole.calls.append((call.name, call.arguments))
            else:
                # Only the last call grows, and it is named once.
                assert (call.index, call.id, call.name) == (len(whole.calls) - 1, None, None)
                name, arguments = whole.calls[-1]
                whole.calls[-1] = (name, arguments + call.arguments)
    return whole


def without_ids(found: Read) -> tuple[object, ...]:
    return found.content, found.calls, found.finish_reason


def tagged(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def cuts(text: str) -> Iterator[list[str]]:
    """The text in one piece, in two at every position, and in pieces of one to three characters."""
    yield [text]
    for position in range(1, len(text)):
        yield [text[:position], text[position:]]
    for size in (1, 2, 3):
        yield [text[start : start + size] for start in range(0, len(text), size)]


ARGUMENTS = [
    '{"id": 42}',
    '{"a":{"b":[1,null,true]}}',
    '{"text": "naïve \\"quoted\\" \\\\ \\u00e9 {[\\"", "emoji": "🦜"}',
    '{"price": 10.00, "tag": "</tool_call>", "open": "<tool_call>"}',
    "{}",
]


@pytest.mark.parametrize("is_constrained", [False, True])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_tc_2_no_cutting_loses_a_character_of_the_arguments(arguments: str, is_constrained: bool) -> None:
    json.loads(arguments)
    for pieces in cuts(tagged(arguments)):
        assert without_ids(read(pieces, is_constrained=is_constrained)) == ("", [("f", arguments)], "tool_calls")


def test_tc_2_a_call_without_spaces_is_read_too() -> None:
    for pieces in cuts('<tool_call>{"name":"f","arguments":{"id": 42}}</tool_call>'):
        assert without_ids(read(pieces)) == ("", [("f", '{"id": 42}')], "tool_calls")


@pytest.mark.parametrize("is_constrained", [False, True])
def test_tc_3_calls_of_one_answer_have_indices_and_ids_of_their_own(is_constrained: bool) -> None:
    text = "Let me look.\n" + tagged('{"a": 1}') + "\n" + tagged('{"a": 2}')
    for pieces in cuts(text):
        found = read(pieces, is_constrained=is_constrained)
        assert found.content == "Let me look."
        assert found.calls == [("f", '{"a": 1}'), ("f", '{"a": 2}')]
        assert len(set(found.ids)) == 2
        assert all(call_id.startswith("call_") for call_id in found.ids)


def test_tc_3_what_follows_the_last_call_that_is_allowed_is_dropped() -> None:
    for pieces in cuts(tagged("{}") + tagged("{}") + " and more"):
        assert without_ids(read(pieces, max_calls=1)) == ("", [("f", "{}")], "tool_calls")


@pytest.mark.parametrize("name", ["Answer", "other"])
def test_tc_4_a_named_tool_may_be_called_with_tags(name: str) -> None:
    found = read([tagged('{"number": 7}', name)], only_tool="Answer")
    assert found.calls == [(name, '{"number": 7}')]


@pytest.mark.parametrize("text", ['{"number": 7}', '\n{"name": "Answer", "arguments": {"number": 7}}\n'])
def test_tc_4_a_bare_object_is_the_call_that_was_asked_for(text: str) -> None:
    for pieces in cuts(text):
        assert without_ids(read(pieces, only_tool="Answer"))[1:] == ([("Answer", '{"number": 7}')], "tool_calls")
    assert without_ids(read([text])) == (text, [], "stop")


@pytest.mark.parametrize("text", ["It is 7.", "", '{"number": }', '"{}"', "[1]", "{", "7 {}"])
def test_tc_4_prose_is_no_call(text: str) -> None:
    for pieces in cuts(text):
        assert without_ids(read(pieces, only_tool="Answer")) == (text, [], "stop")


@pytest.mark.parametrize(
    "text",
    [
        tagged('{"a": nul}'),
        tagged('{"a": 1,}'),
        tagged('{"a": "\\q"}'),
        tagged('{"a": 1'),
        tagged('{"a": 1}}'),
        tagged("[1]"),
        tagged('"{}"'),
        tagged("{]"),
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        "<tool_call>f(1)</tool_call>",
        "<tool_call>\n",
        "say <tool_call> and </tool_call>, or <tool_cal",
        '<tool_call>{"name": "f", "arguments": {}} or so</tool_call>',
    ],
)
def test_wrong_json_is_content_and_no_call(text: str) -> None:
    for pieces in cuts(text):
        assert without_ids(read(pieces)) == (text, [], "stop")


@pytest.mark.parametrize("first", ["<tool_call>oops ", '<tool_call>\n{"name": "f", "arguments": {"a": ', "a < b "])
def test_a_call_is_found_after_something_that_is_none(first: str) -> None:
    for pieces in cuts(first + tagged("{}")):
        assert without_ids(read(pieces)) == (first.rstrip(), [("f", "{}")], "tool_calls")


@pytest.mark.parametrize("ending", ["", "\n", "</tool_", "\n</tool_call"])
def test_the_closing_tag_may_be_missing(ending: str) -> None:
    text = tagged('{"a": 1}').removesuffix("\n</tool_call>") + ending
    for pieces in cuts(text):
        assert without_ids(read(pieces)) == ("", [("f", '{"a": 1}')], "tool_calls")


def test_a_call_may_leave_out_its_arguments_or_put_them_first() -> None:
    assert read(['<tool_call>{"name": "f"}</tool_call>']).calls == [("f", "{}")]
    assert read(['<tool_call>{"arguments": {"a":  1}, "name": "f"}</tool_call>']).calls == [("f", '{"a":  1}')]


@pytest.mark.parametrize("is_constrained", [False, True])
def test_tc_7_a_call_that_is_cut_off_is_not_presented_as_finished(is_constrained: bool) -> None:
    text = tagged('{"city": "Paris", "n": [1, 2]}')
    begin, end = text.index('{"city"'), text.index("}\n<")
    for length in range(1, len(text) + 1):
        streamed = without_ids(read(list(text[:length]), "length", is_constrained=is_constrained))
        assert streamed == without_ids(read([text[:length]], "length", is_constrained=is_constrained))
        content, calls, finish_reason = streamed
        assert finish_reason == "length"
        # Without a grammar a part of a tag could be any text; before the arguments there is nothing to tell of.
        assert content == (text[:length] if length < len("<tool_call>") and not is_constrained else "")
        assert calls == ([("f", text[begin : min(length, end)])] if length > begin else [])


def test_tc_2_a_constrained_call_that_is_cut_off_leaves_no_markup_behind() -> None:
    text = tagged("{}") + "\n" + tagged('{"city": "Paris"}', name="g")
    for reason in ("length", "stop"):
        for length in range(1, len(text)):
            for pieces in ([text[:length]], list(text[:length])):
                assert read(pieces, reason, is_constrained=True).content == ""


def test_tc_7_a_whole_call_stays_beside_one_that_is_cut_off() -> None:
    found = read([tagged("{}") + '\n<tool_call>\n{"name": "g", "arguments": {"a'], "length")
    assert without_ids(found) == ("", [("f", "{}"), ("g", '{"a')], "length")


def test_tc_7_bare_arguments_that_are_cut_off_stay_so() -> None:
    assert without_ids(read(['{"number": '], "length", only_tool="Answer")) == (
        "",
        [("Answer", '{"number": ')],
        "length",
    )


def test_a_stop_string_inside_arguments_does_not_make_a_finished_call() -> None:
    cut = tagged('{"city": "Paris"}')[:50]
    assert without_ids(read([cut], "stop", is_constrained=True))[2] == "stop"


def test_arguments_are_passed_on_as_they_come_where_a_grammar_keeps_them_right() -> None:
    parser = HermesParser(is_constrained=True)
    deltas = [call for character in tagged('{"city": "Paris"}') for call in parser.push(character).calls]
    assert [call.name for call in deltas] == ["f", *[None] * (len(deltas) - 1)]
    assert [call.arguments for call in deltas] == list('{"city": "Paris"}')


PIECES = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool",
            "_call>",
            "\n",
            " ",
            "text",
            "é",
            "\\",
            '"',
            "{",
            "}",
            "[",
            "]",
            ",",
            "1",
        ),
        *('{"name": "f", "arguments": ', '{"a": "b"}', '"name"', tagged('{"a": [1, {}]}'), '<tool_call>{"name": "f"}'),
    ]
)


@given(st.lists(PIECES, max_size=12), st.sampled_from(["stop", "length"]), st.booleans(), st.booleans(), st.data())
def test_streamed_and_plain_answers_say_the_same(
    words: list[str], reason: FinishReason, is_constrained: bool, is_named: bool, data: st.DataObject
) -> None:
    text = "".join(words)
    borders = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:end] for start, end in zip([0, *borders], [*borders, len(text)], strict=True)]
    settings: dict[str, Any] = {"is_constrained": is_constrained, "only_tool": "f" if is_named else None}
    streamed, plain = read(pieces, reason, **settings), read([text], reason, **settings)
    assert without_ids(streamed) == without_ids(plain)
    if streamed.finish_reason == "tool_calls" and not is_constrained:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in streamed.calls)


def test_many_tags_take_no_long_time() -> None:
    for word in ("<tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>{"a": "'):
        text = word * 5000
        assert read([text]).content == text
