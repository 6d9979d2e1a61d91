"""Conversations in every form that clients send, over HTTP: the same prompt, or a 400."""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import alphabet, ask, called, refusal_of, stream, text_of
from tests.byte_tokenizer import END, START, load_byte_tokenizer
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
# Unlike many, it prints whatever content it is given, so that a None would show.
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("plain")
    return load_byte_tokenizer(directory, chat_template=TEMPLATE)


@pytest.fixture
async def client(plain: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with called(stub_engine(plain, alphabet)) as client:
        yield client


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def history(role: str, content: Any) -> list[dict[str, Any]]:
    """A conversation with one message of a role."""
    last = {"role": "user", "content": "q"}
    if role == "tool":
        called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        return [last, called, {"role": role, "content": content, "tool_call_id": "c1"}]
    return [{"role": role, "content": content}, last]


async def prompt_and_answer(client: httpx.AsyncClient, messages: list[dict[str, Any]]) -> tuple[list[int], int, str]:
    body = await ask(client, CHAT, messages=messages, max_tokens=5, temperature=0, return_token_ids=True)
    return body["prompt_token_ids"], body["usage"]["prompt_tokens"], text_of(body["choices"])


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(("content", "joined"), [(parts("A", "B"), "AB"), ([], ""), (parts("A"), "A")])
async def test_api_1_parts_make_the_prompt_of_the_joined_text(
    client: httpx.AsyncClient, role: str, content: Any, joined: str
) -> None:
    asked = await prompt_and_answer(client, history(role, content))
    assert asked == await prompt_and_answer(client, history(role, joined))
    assert asked[1] == len(asked[0])


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
async def test_api_1_an_image_is_refused_by_its_type(client: httpx.AsyncClient, role: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    error = await refusal_of(client, CHAT, messages=history(role, [*parts("A"), image]))
    assert error["param"] == "messages"
    assert "image_url" in error["message"]
    assert "content[1]" in error["message"]


async def test_api_2_content_may_be_missing_beside_tool_calls(client: httpx.AsyncClient, plain: Tokenizer) -> None:
    prompts = []
    for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
        turn = {"role": "assistant", "tool_calls": [CALL], **content}
        reply = {"role": "tool", "tool_call_id": "c1", "content": "42"}
        prompts.append(await prompt_and_answer(client, [{"role": "user", "content": "q"}, turn, reply]))
    assert prompts == [prompts[0]] * 4
    text = plain.decode(prompts[0][0])
    assert 'assistant\n[f {"a": 1}]' in text
    assert "None" not in text
    assert "null" not in text


async def test_api_2_an_empty_list_of_tool_calls_is_the_same_as_none(client: httpx.AsyncClient) -> None:
    prompts = [
        await prompt_and_answer(
            client, [{"role": "assistant", "content": "hi", **calls}, {"role": "user", "content": "q"}]
        )
        for calls in ({}, {"tool_calls": []}, {"tool_calls": None})
    ]
    assert prompts == [prompts[0]] * 3


@pytest.mark.parametrize("calls", [{}, {"tool_calls": []}, {"tool_calls": None}])
async def test_api_2_neither_content_nor_calls_is_refused(client: httpx.AsyncClient, calls: dict[str, Any]) -> None:
    turn = {"role": "assistant", "content": None, **calls}
    error = await refusal_of(client, CHAT, messages=[{"role": "user", "content": "q"}, turn])
    assert error["param"] == "messages"
    assert "messages[1].content" in error["message"]


OPEN_TURN = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer is"}]
CLOSED = "<|start|>user\nq<|end|>\n<|start|>assistant\nThe answer is<|end|>\n"


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, CLOSED + "<|start|>assistant\n"),
        ({"add_generation_prompt": True}, CLOSED + "<|start|>assistant\n"),
        ({"add_generation_prompt": True, "continue_final_message": False}, CLOSED + "<|start|>assistant\n"),
        ({"add_generation_prompt": False, "continue_final_message": False}, CLOSED),
        ({"add_generation_prompt": False, "continue_final_message": True}, CLOSED.removesuffix("<|end|>\n")),
        ({"continue_final_message": True}, CLOSED.removesuffix("<|end|>\n")),
    ],
)
async def test_tc_8_a_history_that_ends_with_the_assistant(
    client: httpx.AsyncClient, plain: Tokenizer, options: dict[str, Any], prompt: str
) -> None:
    body = await ask(client, CHAT, messages=OPEN_TURN, max_tokens=3, return_token_ids=True, **options)
    assert plain.decode(body["prompt_token_ids"], skip_special_tokens=False) == prompt
    counted = await ask(client, "/tokenize", messages=OPEN_TURN, **options)
    assert counted["tokens"] == body["prompt_token_ids"]


async def test_tc_8_a_turn_cannot_be_continued_and_begun_at_once(client: httpx.AsyncClient) -> None:
    options = {"add_generation_prompt": True, "continue_final_message": True}
    assert (await refusal_of(client, CHAT, messages=OPEN_TURN, **options))["param"] == "continue_final_message"


async def test_tc_8_a_continuation_does_not_repeat_the_prefix_which_is_a_hit_again(plain: Tokenizer) -> None:
    continuation = " 42."

    def table(context: Sequence[int]) -> Mapping[int, float]:
        said = bytes(token_id for token_id in context if token_id < 256).decode().partition("The answer is")[2]
        rest = continuation.removeprefix(said)
        return {ord(rest[0]) if rest else END: 1.0}

    async with called(stub_engine(plain, table)) as client:
        answers = [await ask(client, CHAT, messages=OPEN_TURN, continue_final_message=True) for _ in range(2)]
        chunks = await stream(client, CHAT, messages=OPEN_TURN, continue_final_message=True)
    for body in answers:
        assert text_of(body["choices"]) == continuation
    assert text_of([chunk["choices"][0] for chunk in chunks]) == continuation
    first, second = (body["usage"] for body in answers)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] - 1


async def test_tc_8_a_last_turn_of_tool_calls_is_closed_and_followed_by_a_new_one(
    client: httpx.AsyncClient, plain: Tokenizer
) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    opening = "<|start|>assistant\n"
    for options, end in (
        ({}, f"<|end|>\n{opening}"),
        ({"add_generation_prompt": True, "continue_final_message": False}, f"<|end|>\n{opening}"),
        ({"add_generation_prompt": False}, "<|end|>\n"),
    ):
        body = await ask(client, CHAT, messages=messages, max_tokens=1, return_token_ids=True, **options)
        text = plain.decode(body["prompt_token_ids"], skip_special_tokens=False)
        assert text == f'<|start|>user\nq<|end|>\n{opening}[f {{"a": 1}}]{end}'
        assert body["prompt_token_ids"].count(START) == 2 + (end != "<|end|>\n")
    for options in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": True}):
        error = await refusal_of(client, CHAT, messages=messages, continue_final_message=True, **options)
        assert error["param"] == "continue_final_message"
