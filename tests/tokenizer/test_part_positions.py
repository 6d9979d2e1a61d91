"""Where a place in a message has come to stand in the prompt: never behind it, and within one token of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixserve.errors import InvalidRequest
from radixserve.model_path import resolve_model_path
from radixserve.tokenizer.chat_encoder import ChatOptions
from radixserve.tokenizer.digit_marks import TextEnd
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.byte_tokenizer import load_byte_tokenizer
from tests.tokenizer.test_answer_turns import Answers, character_ids, load_family
from tests.tokenizer.test_chat import FAMILIES

DEMO = "demo model"
SENTINEL = "3535535"
OPTIONS = ChatOptions(tools=None, add_generation_prompt=True, continue_final_message=False, template_kwargs={})
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}

# No digits, which the sentinel is made of, and nothing that a normalizer composes: that has a test of its own.
pieces = st.sampled_from([*"abehlotw ,.\n<|>/", "ï", "é", "😀", "你", " the", "import ", "  ", "<|im_end|>", "</s>"])
words = st.lists(pieces, max_size=8).map("".join)
# Some templates trim a message, which has a test of its own too.
contents = st.lists(words, min_size=1, max_size=4).map(lambda parts: ["x" + parts[0], *parts[1:-1], parts[-1] + "x"])
conversations = st.lists(contents, min_size=1, max_size=4)


@pytest.fixture(scope="module", params=[*FAMILIES, DEMO])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == DEMO:
        return Tokenizer.load(resolve_model_path(None))
    return load_family(tmp_path_factory.mktemp("family"), request.param)


def message(index: int, content: str) -> dict[str, Any]:
    return {"role": ("user", "assistant")[index % 2], "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def positions_of(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], *ends: TextEnd, options: ChatOptions = OPTIONS
) -> list[int]:
    return tokenizer.encode_chat_with_ends(messages, options, ends).end_positions


def text_until(tokenizer: Tokenizer, messages: list[dict[str, Any]], end: TextEnd, **options: Any) -> str:
    """Return the prompt's text up to a place, as what stands there shows it."""
    shown = [dict(message) for message in messages]
    content = shown[end.message_index]["content"]
    shown[end.message_index]["content"] = content[: end.num_characters] + SENTINEL + content[end.num_characters :]
    before, found, _ = decoded(tokenizer, tokenizer.encode_chat(shown, **options)).partition(SENTINEL)
    assert found
    return before


def decoded(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def assert_ends_at(tokenizer: Tokenizer, token_ids: list[int], position: int, before: str) -> None:
    # A token may end inside a character, of which the next token holds the rest and more.
    kept = decoded(tokenizer, token_ids[:position]).rstrip("\ufffd")
    assert before.startswith(kept)
    if position < len(token_ids):
        assert len(decoded(tokenizer, token_ids[: position + 1])) > len(before)


@settings(max_examples=60, deadline=None)
@given(conversation=conversations, data=st.data())
def test_the_tokens_up_to_the_end_of_a_part_end_there_or_one_token_before(
    family: Tokenizer, conversation: list[list[str]], data: st.DataObject
) -> None:
    messages = [message(index, "".join(parts)) for index, parts in enumerate(conversation)]
    ends = [
        TextEnd(index, sum(map(len, parts[: part + 1])))
        for index, parts in enumerate(conversation)
        for part in range(len(parts))
        if data.draw(st.booleans())
    ]
    encoded = family.encode_chat_with_ends(messages, OPTIONS, ends)
    assert encoded.token_ids == family.encode_chat(messages)
    assert len(encoded.end_positions) == len(ends)
    for end, position in zip(ends, encoded.end_positions, strict=True):
        assert_ends_at(family, encoded.token_ids, position, text_until(family, messages, end))


@pytest.mark.parametrize("content", ["caf", "naïve ", "u", "\u1100"])
def test_a_character_that_is_composed_over_the_end_is_not_counted(content: str, family: Tokenizer) -> None:
    mark = "\u1161" if content == "\u1100" else "\u0301"
    messages = [user(content + mark)]
    [position] = positions_of(family, messages, TextEnd(0, len(content)))
    assert mark not in decoded(family, family.encode_chat(messages)[:position])
    plain = decoded(family, family.encode_chat([user(content)]))
    kept = decoded(family, family.encode_chat(messages)[:position]).rstrip("\ufffd")
    assert plain.startswith(kept)


def test_white_space_that_the_template_trims_is_no_part_of_the_prompt(tmp_path: Path) -> None:
    tokenizer = load_family(tmp_path, "llama3")
    messages = [user("hello  \n"), message(1, "yes"), user("and?")]
    [position] = positions_of(tokenizer, messages, TextEnd(0, len("hello  \n")))
    token_ids = tokenizer.encode_chat(messages)
    assert decoded(tokenizer, token_ids[:position]).endswith("\n\nhello")
    assert decoded(tokenizer, token_ids[position : position + 1]) == "<|eot_id|>"


SYSTEM_LATE = (
    "{% for message in messages %}{% if message.role != 'system' %}<|start|>{{ message.role }}\n"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{{ message.content }}<|end|>{% endif %}{% endfor %}"
)
LAST_ONLY = "<|start|>{{ messages[-1].content }}<|end|>"
SHOUTED = "{% for message in messages %}<|start|>{{ message.content | tojson | upper }}<|end|>{% endfor %}"
SYSTEM_TWICE = "{{ messages[0].content }}<|start|>{{ messages[0].content }}<|end|>{{ messages[1].content }}<|end|>"
LOOKS_AT_ENDS = (
    "{% for message in messages %}<|start|>{% if message.content.endswith('!') %}loud {% endif %}"
    "{{ message.content }}<|end|>{% endfor %}"
)


def of_template(directory: Path, template: str) -> Tokenizer:
    return load_byte_tokenizer(directory, chat_template=template)


@pytest.mark.parametrize(
    ("template", "kept"),
    [
        (SYSTEM_LATE, "<|start|>user\nq<|end|><|start|>assistant\na<|end|><|start|>user\nBe kind."),
        (SHOUTED, '<|start|>"BE KIND.'),
        (SYSTEM_TWICE, "Be kind."),
    ],
    ids=["moved", "rewritten", "repeated"],
)
def test_a_part_counts_where_the_template_first_shows_it(tmp_path: Path, template: str, kept: str) -> None:
    tokenizer = of_template(tmp_path, template)
    messages = [{"role": "system", "content": "Be kind."}, user("q"), message(1, "a"), user("r")]
    [position] = positions_of(tokenizer, messages, TextEnd(0, len("Be kind.")))
    assert decoded(tokenizer, tokenizer.encode_chat(messages)[:position]) == kept


def test_a_part_that_the_template_leaves_out_is_refused_by_its_message(tmp_path: Path) -> None:
    tokenizer = of_template(tmp_path, LAST_ONLY)
    messages = [user("q"), message(1, "a"), user("r")]
    with pytest.raises(InvalidRequest, match=r"messages\[1\]") as caught:
        positions_of(tokenizer, messages, TextEnd(1, 1))
    assert caught.value.param == "messages"
    assert positions_of(tokenizer, messages, TextEnd(2, 1)) == [2]


def test_where_a_mark_changes_what_the_template_writes_no_more_counts_than_was_there_without_it(tmp_path: Path) -> None:
    tokenizer = of_template(tmp_path, LOOKS_AT_ENDS)
    messages = [user("a"), user("Stop!")]
    assert positions_of(tokenizer, messages, TextEnd(0, 1), TextEnd(1, len("Stop!"))) == [2, 4]


def test_an_answer_that_keeps_its_own_ids_counts_by_these(tmp_path: Path) -> None:
    tokenizer = load_family(tmp_path, "chatml")
    answer = "The capital is Paris."
    own = character_ids(tokenizer, answer)
    messages = [user("q"), message(1, answer), user("sure?")]
    ends = [TextEnd(0, 1), TextEnd(1, len("The capital")), TextEnd(1, len(answer)), TextEnd(2, 4)]
    encoded = tokenizer.encode_chat_with_ends(messages, OPTIONS, ends, Answers(**{answer: own}))
    first, inside, whole, last = encoded.end_positions
    opening = len(encoded.token_ids[:whole]) - len(own)
    assert encoded.token_ids[opening:whole] == own
    # Its own tokens are other ones from the first on, so that none of them is sure to end inside the marked text.
    assert own[0] != tokenizer.encode(answer, add_special_tokens=False)[0]
    assert first < opening == inside
    assert decoded(tokenizer, encoded.token_ids[:last]).endswith("<|im_start|>user\nsure")


def test_results_of_tools_count_in_the_turn_that_they_are_put_into() -> None:
    tokenizer = Tokenizer.load(resolve_model_path(None))
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be kind."},
        user("q"),
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    options = ChatOptions([TOOL], True, False, {})
    ends = [TextEnd(0, 8), TextEnd(3, 3), TextEnd(4, 2)]
    encoded = tokenizer.encode_chat_with_ends(messages, options, ends)
    for end, position in zip(ends, encoded.end_positions, strict=True):
        assert_ends_at(tokenizer, encoded.token_ids, position, text_until(tokenizer, messages, end, tools=[TOOL]))


def test_a_message_that_is_left_open_counts_to_its_end(family: Tokenizer) -> None:
    messages = [user("q"), message(1, "The answer is")]
    options = ChatOptions(None, False, True, {})
    encoded = family.encode_chat_with_ends(messages, options, [TextEnd(1, 3), TextEnd(1, len("The answer is"))])
    assert encoded.end_positions[1] == len(encoded.token_ids)
    assert decoded(family, encoded.token_ids[: encoded.end_positions[0]]).endswith("The")
