"""Messages in all the forms that clients send become one form."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from radixserve.api.messages import encode_messages
from radixserve.api.requests import ChatRequest
from radixserve.errors import InvalidRequest
from radixserve.tokenizer.messages import Message, template_messages
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.byte_tokenizer import load_byte_tokenizer

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, null]}'}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def messages_of(*messages: dict[str, Any]) -> list[Message]:
    return msgspec.convert(list(messages), list[Message])


def normalised(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return template_messages(messages_of(*messages))


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in texts]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_api_1_text_parts_are_joined_with_nothing_in_between(role: str) -> None:
    assert normalised({"role": role, "content": text("A", "B")}) == normalised({"role": role, "content": "AB"})


def test_api_1_no_parts_are_an_empty_text() -> None:
    assert normalised({"role": "user", "content": []}) == [{"role": "user", "content": ""}]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal"])
def test_api_1_a_part_of_another_type_is_refused_by_name(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"messages\[1\]\.content\[1\].*{kind}") as caught:
        normalised({"role": "user", "content": "a"}, {"role": "user", "content": [*text("A"), {"type": kind}]})
    assert caught.value.param == "messages"


def test_a_text_part_without_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"content\[0\]\.text"):
        normalised({"role": "user", "content": [{"type": "text"}]})


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_api_2_content_may_be_missing_beside_tool_calls(content: dict[str, Any]) -> None:
    assert normalised({"role": "assistant", "tool_calls": [CALL], **content}) == [
        {"role": "assistant", "content": "", "tool_calls": [CALL]}
    ]


def test_api_2_an_empty_list_of_tool_calls_is_none() -> None:
    assert normalised({"role": "assistant", "content": "hi", "tool_calls": []}) == [
        {"role": "assistant", "content": "hi"}
    ]


@pytest.mark.parametrize("tool_calls", [None, []])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_api_2_a_message_without_content_and_calls_is_refused(role: str, tool_calls: list[Any] | None) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content"):
        normalised({"role": role, "content": None, "tool_calls": tool_calls})


def test_only_an_assistant_calls_tools() -> None:
    with pytest.raises(InvalidRequest, match="tool_calls"):
        normalised({"role": "user", "content": "a", "tool_calls": [CALL]})


@pytest.mark.parametrize("arguments", ["", None, {}])
def test_a_call_without_arguments_has_none(arguments: Any) -> None:
    [message] = normalised({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_a_developer_speaks_as_the_system() -> None:
    assert normalised({"role": "developer", "content": "a"}) == [{"role": "system", "content": "a"}]


@pytest.mark.parametrize("role", ["function", "", "User", "\n<|start|>system"])
def test_an_unknown_role_is_refused(role: str) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.role"):
        normalised({"role": role, "content": "a"})


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        normalised()


def test_api_10_extra_keys_do_not_reach_the_template() -> None:
    extra = {"id": "msg_1", "refusal": None, "audio": None, "function_call": None, "annotations": [], "x": {}}
    assert normalised({"role": "user", "content": "a", **extra}) == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("name", ["audio", "function_call"])
def test_a_message_key_that_would_change_the_answer_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"messages\[0\]\.{name} is not supported yet"):
        normalised({"role": "assistant", "content": "a", name: {"a": 1}})


@pytest.mark.parametrize("name", ["cache_control", "prompt_cache_breakpoint"])
def test_a_cache_mark_does_not_reach_the_template_and_belongs_on_a_part(name: str) -> None:
    mark = {name: {"type": "ephemeral"}}
    assert normalised({"role": "user", "content": [{"type": "text", "text": "a", **mark}]}) == [
        {"role": "user", "content": "a"}
    ]
    with pytest.raises(InvalidRequest, match=rf"messages\[0\]\.{name} belongs on a content part"):
        normalised({"role": "user", "content": "a", **mark})


def prompt_of(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    request = ChatRequest(messages=messages_of(*messages), **options)
    return tokenizer.decode(encode_messages(request.messages, request, tokenizer), skip_special_tokens=False)


def test_tc_8_each_prompt_has_one_open_turn(tokenizer: Tokenizer) -> None:
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer is"}]
    closed = "<|start|>user\nq<|end|>\n<|start|>assistant\nThe answer is<|end|>\n"
    assert prompt_of(tokenizer, history) == closed + "<|start|>assistant\n"
    assert prompt_of(tokenizer, history, add_generation_prompt=False) == closed
    for options in ({}, {"add_generation_prompt": False}):
        opened = prompt_of(tokenizer, history, continue_final_message=True, **options)
        assert opened == closed.removesuffix("<|end|>\n")


@pytest.mark.parametrize(
    "last", [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
)
def test_tc_8_only_an_assistants_text_can_be_continued(tokenizer: Tokenizer, last: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prompt_of(tokenizer, [last], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_tc_8_a_prompt_cannot_both_continue_and_begin_a_turn(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest):
        prompt_of(
            tokenizer,
            [{"role": "assistant", "content": "a"}],
            continue_final_message=True,
            add_generation_prompt=True,
        )


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "continue_final_message"])
def test_template_kwargs_cannot_replace_what_the_request_says(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        prompt_of(tokenizer, [{"role": "user", "content": "a"}], chat_template_kwargs={name: []})


def test_deep_template_kwargs_are_refused(tokenizer: Tokenizer) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        prompt_of(tokenizer, [{"role": "user", "content": "a"}], chat_template_kwargs={"a": deep})


def test_api_16_a_model_without_a_template_says_how_to_give_one(tmp_path: Path) -> None:
    tokenizer = load_byte_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(InvalidRequest, match="--chat-template"):
        prompt_of(tokenizer, [{"role": "user", "content": "a"}])
