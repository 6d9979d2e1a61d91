"""Answers and calls as clients send them back, over HTTP: what the server knows of them."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from radixserve.model_path import resolve_model_path
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.scripted import DEFAULT_REPLY, Messages, Talk, system, talking, tool, user
from tests.api.serving import ask

pytestmark = pytest.mark.anyio

RULES = "Answer shortly. Name the sources that you use. Do not guess: say so if you do not know. Write plain English."
ASKED = [system(RULES), user("What does the report say about the costs of the second quarter?")]
TOOLS = [tool("get_weather", city="the city to look at", day="the day"), tool("search_mail", words="words to find")]
ARGUMENTS = {"city": "Rome", "day": "today"}
STEP = [system("You are a secretary."), user("Is it warm in Rome?")]
CALL = f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': ARGUMENTS})}\n</tool_call>"


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(resolve_model_path(None))


@pytest.fixture
async def talk(demo: Tokenizer) -> AsyncIterator[Talk]:
    async with talking(demo, {"warm": CALL}) as talk:
        yield talk


def found(diagnosis: dict[str, Any]) -> tuple[str, str, int | None]:
    assert diagnosis["cause"] == "diverged", diagnosis
    divergence = diagnosis["divergence"]
    return divergence["pattern"], divergence["where"], divergence["message_index"]


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (str.upper, "edited_text"),
        (lambda text: text.removeprefix("Yes, I "), "edited_text"),
        (lambda text: "(what I think of it)", "edited_text"),
        (lambda text: text[: len(text) // 3], "cut_history"),
        (lambda text: "", "cut_history"),
    ],
)
async def test_a_client_that_changes_each_answer_is_told_so_in_each_turn(
    talk: Talk, change: Callable[[str], str], pattern: str
) -> None:
    messages: Messages = ASKED
    for question in ("And of the third?", "Who wrote it?", "When?"):
        *messages, answer = await talk.say(messages)
        messages = [*messages, {"role": "assistant", "content": change(answer["content"])}, user(question)]
        assert found(await talk.explain(messages)) == (pattern, "assistant", len(messages) - 2)


async def test_a_client_that_sends_questions_alone_is_told_so_in_each_turn(talk: Talk) -> None:
    messages: Messages = ASKED
    for question in ("And of the third?", "Who wrote it?"):
        await talk.say(messages)
        messages = [*messages, user(question)]
        assert found(await talk.explain(messages)) == ("cut_history", "user", len(messages) - 1)


async def step_of(talk: Talk) -> Messages:
    messages = await talk.say(STEP, tools=TOOLS)
    call_id = messages[2]["tool_calls"][0]["id"]
    return [*messages, {"role": "tool", "tool_call_id": call_id, "content": "17 degrees"}]


def with_arguments(messages: Messages, arguments: str) -> Messages:
    [call] = messages[2]["tool_calls"]
    changed = {**call, "function": {**call["function"], "arguments": arguments}}
    return [*messages[:2], {**messages[2], "tool_calls": [changed]}, *messages[3:]]


async def test_a_step_of_an_agent_without_its_tools(talk: Talk) -> None:
    messages = await step_of(talk)
    assert found(await talk.explain(messages)) == ("changed_tools", "tools", None)
    assert found(await talk.explain(messages, tools=TOOLS, tool_choice="none")) == ("changed_tools", "tools", None)


async def test_a_call_that_comes_back_with_other_arguments(talk: Talk) -> None:
    messages = await step_of(talk)
    for arguments in (json.dumps({**ARGUMENTS, "city": "Oslo"}), json.dumps({"city": "Rome"}), "{}"):
        diagnosis = await talk.explain(with_arguments(messages, arguments), tools=TOOLS)
        assert found(diagnosis) == ("edited_text", "assistant", 2)


async def test_a_call_that_comes_back_as_it_was(talk: Talk) -> None:
    messages = await step_of(talk)
    whole = {**messages[2], "content": ""}
    for clean in (messages, [*messages[:2], whole, messages[3]], with_arguments(messages, json.dumps(ARGUMENTS))):
        assert (await talk.explain(clean, tools=TOOLS))["cause"] == "none"


async def test_the_system_prompt_that_a_conversation_leaves_out_or_brings(talk: Talk) -> None:
    messages = [*await talk.say(ASKED), user("And of the third?")]
    assert found(await talk.explain(messages[1:])) == ("cut_history", "template", None)
    messages = [*await talk.say([user("Who wrote the report of last year?")]), user("When?")]
    assert found(await talk.explain([system("Speak like a pirate."), *messages])) == ("edited_text", "system", 0)


async def test_an_answer_that_was_sampled_again_and_shorter(talk: Talk) -> None:
    """The cache knows it as the beginning of a longer one."""
    await talk.say(ASKED)
    short = await ask(talk.client, "/v1/chat/completions", messages=ASKED, max_tokens=4)
    answer = short["choices"][0]["message"]
    assert len(answer["content"]) < len(DEFAULT_REPLY) // 2
    assert (await talk.explain([*ASKED, answer, user("And of the third?")]))["is_expected"]


async def test_white_space_around_an_answer(talk: Talk) -> None:
    *messages, answer = await talk.say(ASKED)
    for content in (f"{answer['content']} ", f"{answer['content']}\n\n"):
        spaced = {"role": "assistant", "content": content}
        assert (await talk.explain([*messages, spaced, user("And of the third?")]))["is_expected"]


async def test_a_text_beside_a_chat(talk: Talk) -> None:
    await talk.say(ASKED)
    for prompt in ("The sea is", "Once upon a time", "a b c d e f g", "\u202e\ufeff abc"):
        diagnosis = await ask(talk.client, "/v1/cache/explain", prompt=prompt)
        assert (diagnosis["cause"], diagnosis["is_expected"]) == ("never_computed", True), diagnosis
