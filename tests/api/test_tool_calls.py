"""Chats with tools over HTTP: the model says what a test wrote for it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import called, error_of, events_of, wait_until_idle
from tests.clients.speaker import speaker
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
OTHER = {"type": "function", "function": {"name": "sub"}}
NAMED = {"type": "function", "function": {"name": "add"}}
ARGUMENTS = '{"a": 1, "b": 20}'


def tagged(arguments: str, name: str = "add") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


REPLIES = {
    "1 + 20?": tagged(ARGUMENTS),
    "Both?": "Let me see.\n" + tagged(ARGUMENTS) + "\n" + tagged('{"a": 2}'),
    "Hello?": "Hi! <tool_cal",
    "Broken?": '<tool_call>{"name": "add", "arguments": {oops}}</tool_call>',
    "Nothing?": "",
    "21\n</tool_response>": "It is 21.",
}


@pytest.fixture
async def client(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    config = EngineConfig(tool_call_parser="hermes", max_num_batched_tokens=4096)
    async with called(
        stub_engine(tokenizer, speaker(REPLIES), config=config, num_blocks=512, max_model_len=4096)
    ) as client:
        yield client


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(client: httpx.AsyncClient, text: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [user(text)], "tools": [TOOL, OTHER], "temperature": 0, **fields}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def stream(client: httpx.AsyncClient, text: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": [user(text)], "tools": [TOOL, OTHER], "temperature": 0, "stream": True, **fields}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return events_of(response.text)


def put_together(chunks: list[dict[str, Any]], index: int = 0) -> tuple[str | None, list[tuple[str, str]], str]:
    """What a client makes of the chunks of one choice: content, calls by name and arguments, and the reason."""
    content: str | None = None
    calls: list[dict[str, str]] = []
    reasons = []
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    for number, choice in enumerate(choices):
        delta = choice["delta"]
        assert ("role" in delta) == (number == 0)
        if delta.get("content") is not None:
            content = (content or "") + delta["content"]
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                assert call["type"] == "function"
                calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            else:
                assert call.keys() == {"index", "function"}
                assert call["function"].keys() == {"arguments"}
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    [reason] = reasons
    assert len({call["id"] for call in calls}) == len(calls)
    return content, [(call["name"], call["arguments"]) for call in calls], reason


def parts_of(answer: dict[str, Any], index: int = 0) -> tuple[str | None, list[tuple[str, str]], str]:
    choice = answer["choices"][index]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    functions = [call["function"] for call in calls]
    return message["content"], [(call["name"], call["arguments"]) for call in functions], choice["finish_reason"]


@pytest.mark.parametrize("choice", ["auto", None, "required", NAMED])
async def test_tc_1_calls_end_an_answer_with_tool_calls_streamed_or_not(client: httpx.AsyncClient, choice: Any) -> None:
    expected = (None, [("add", ARGUMENTS)], "tool_calls")
    assert parts_of(await ask(client, "1 + 20?", tool_choice=choice)) == expected
    assert put_together(await stream(client, "1 + 20?", tool_choice=choice)) == expected


@pytest.mark.parametrize(
    ("text", "content"),
    [("Hello?", "Hi! <tool_cal"), ("Broken?", REPLIES["Broken?"]), ("Nothing?", "")],
)
async def test_tc_1_text_alone_ends_an_answer_with_stop(client: httpx.AsyncClient, text: str, content: str) -> None:
    assert parts_of(await ask(client, text)) == (content, [], "stop")
    assert put_together(await stream(client, text)) == (content, [], "stop")


async def test_tc_3_two_calls_after_text(client: httpx.AsyncClient) -> None:
    expected = ("Let me see.", [("add", ARGUMENTS), ("add", '{"a": 2}')], "tool_calls")
    answer = await ask(client, "Both?")
    assert parts_of(answer) == put_together(await stream(client, "Both?")) == expected
    first, second = answer["choices"][0]["message"]["tool_calls"]
    assert first["id"] != second["id"]


async def test_tc_3_an_answer_of_one_call_ends_there(client: httpx.AsyncClient) -> None:
    expected = ("Let me see.", [("add", ARGUMENTS)], "tool_calls")
    answer = await ask(client, "Both?", parallel_tool_calls=False)
    assert parts_of(answer) == expected
    assert put_together(await stream(client, "Both?", parallel_tool_calls=False)) == expected
    assert answer["usage"]["completion_tokens"] == REPLIES["Both?"].index("</tool_call>") + len("</tool_call>")
    # The stop string is the server's own.
    assert answer["choices"][0]["stop_reason"] is None


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
async def test_tc_7_a_call_that_is_cut_off_ends_with_length(client: httpx.AsyncClient, choice: Any) -> None:
    expected = (None, [("add", ARGUMENTS[:10])], "length")
    limit = {"max_tokens": tagged("").index("}") + 10, "tool_choice": choice}
    assert parts_of(await ask(client, "1 + 20?", **limit)) == expected
    assert put_together(await stream(client, "1 + 20?", **limit)) == expected


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_arguments_that_a_grammar_keeps_right_are_streamed_as_they_come(
    client: httpx.AsyncClient, choice: Any
) -> None:
    chunks = await stream(client, "1 + 20?", tool_choice=choice)
    pieces = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert len(pieces) == len(ARGUMENTS)


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_call_that_must_be_made_is_made_against_the_models_will(client: httpx.AsyncClient, choice: Any) -> None:
    # What the model would say is not allowed, so each token is any that is; most of them lead to a call in time.
    _, calls, reason = parts_of(await ask(client, "Hello?", tool_choice=choice, tools=[NO_ARGUMENTS], max_tokens=100))
    assert (calls, reason) == ([("add", "{}")], "tool_calls")


NO_ARGUMENTS = {"type": "function", "function": {"name": "add"}}


async def test_every_choice_has_calls_of_its_own(client: httpx.AsyncClient) -> None:
    answer = await ask(client, "1 + 20?", n=3)
    chunks = await stream(client, "1 + 20?", n=3)
    for index in range(3):
        assert parts_of(answer, index) == put_together(chunks, index) == (None, [("add", ARGUMENTS)], "tool_calls")
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]]
    assert len(set(ids)) == 3


async def test_token_ids_logprobs_and_usage_count_what_the_model_wrote(client: httpx.AsyncClient) -> None:
    options = {"return_token_ids": True, "logprobs": True}
    answer = await ask(client, "1 + 20?", **options)
    chunks = await stream(client, "1 + 20?", stream_options={"include_usage": True}, **options)
    [choice] = answer["choices"]
    written = list(REPLIES["1 + 20?"].encode())
    assert choice["token_ids"][:-1] == written
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == len(choice["logprobs"]["content"])
    streamed = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert [token for piece in streamed for token in piece["token_ids"]] == choice["token_ids"]
    assert [entry for piece in streamed for entry in piece["logprobs"]["content"]] == choice["logprobs"]["content"]
    assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
async def test_the_next_step_finds_the_call_in_the_cache(client: httpx.AsyncClient, choice: Any) -> None:
    first = await ask(client, "1 + 20?", tool_choice=choice)
    [call] = first["choices"][0]["message"]["tool_calls"]
    messages = [
        user("1 + 20?"),
        first["choices"][0]["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "21"},
    ]
    second = await ask(client, "", messages=messages, tool_choice="auto")
    assert parts_of(second) == ("It is 21.", [], "stop")
    usage = first["usage"]
    # All of it but the token that ended it, whose K/V were not computed.
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= usage["prompt_tokens"] + usage["completion_tokens"] - 1


async def count(client: httpx.AsyncClient, **fields: Any) -> list[int]:
    response = await client.post("/tokenize", json=fields)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["tokens"]
    return tokens


async def test_api_2_content_may_be_missing_beside_calls(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    prompts = []
    for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
        history = [
            user("1 + 20?"),
            {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "tool_call_id": "1", "content": "21"},
        ]
        assert parts_of(await ask(client, "", messages=history))[0] == "It is 21."
        prompts.append(await count(client, messages=history, tools=[TOOL]))
    assert all(prompt == prompts[0] for prompt in prompts)
    text = tokenizer.decode(prompts[0], skip_special_tokens=False)
    assert f"assistant\n{tagged(ARGUMENTS)}<|end|>" in text
    assert "None" not in text
    assert "null" not in text


async def test_api_2_an_empty_list_of_calls_is_none(client: httpx.AsyncClient) -> None:
    history = [user("Hello?"), {"role": "assistant", "content": "hi"}, user("Hello?")]
    with_list = [history[0], {**history[1], "tool_calls": []}, history[2]]
    assert await count(client, messages=history) == await count(client, messages=with_list)
    await ask(client, "", messages=with_list)


async def test_api_2_an_answer_of_nothing_is_refused(client: httpx.AsyncClient) -> None:
    history = [user("Hello?"), {"role": "assistant", "content": None}, user("Hello?")]
    error = error_of(await client.post("/v1/chat/completions", json={"messages": history}))
    assert error["param"] == "messages"


async def test_tools_that_may_not_be_called_do_not_enter_the_prompt(client: httpx.AsyncClient) -> None:
    message = {"messages": [user("Hello?")]}
    plain = await count(client, **message)
    assert await count(client, **message, tools=[TOOL], tool_choice="none") == plain
    with_tools = await count(client, **message, tools=[TOOL])
    assert len(with_tools) > len(plain)
    for choice in ("auto", "required", NAMED):
        assert await count(client, **message, tools=[TOOL], tool_choice=choice) == with_tools
    answer = await ask(client, "Hello?", tools=[TOOL])
    assert answer["usage"]["prompt_tokens"] == len(with_tools)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_tc_4_wrong_tools_are_refused_by_field(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, is_streamed: bool
) -> None:
    body = {"messages": [user("1 + 20?")], "tools": [TOOL], "stream": is_streamed, **fields}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    await wait_until_idle(client)


async def test_a_schema_that_cannot_be_enforced_matters_only_where_it_must_be(client: httpx.AsyncClient) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "add", "strict": True, "parameters": parameters}}]
    body = {"messages": [user("1 + 20?")], "tools": tools}
    error = error_of(await client.post("/v1/chat/completions", json={**body, "tool_choice": "required"}))
    assert error["param"] == "tools"
    assert "uniqueItems" in error["message"]
    assert parts_of(await ask(client, "1 + 20?", tools=tools))[2] == "tool_calls"


async def test_a_model_whose_template_knows_no_tools_says_how_to_give_one(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, speaker(REPLIES))) as client:
        response = await client.post("/v1/chat/completions", json={"messages": [user("Hello?")], "tools": [TOOL]})
        assert response.status_code == 400
        assert "--chat-template" in error_of(response)["message"]
        body = {"messages": [user("Hello?")], "tools": [TOOL], "tool_choice": "none"}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


def test_the_replies_here_are_what_they_claim() -> None:
    assert json.loads(ARGUMENTS) == {"a": 1, "b": 20}
