"""Conversations in which nothing is wrong, over HTTP: explain says so, however little they hit."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from radixserve.model_path import resolve_model_path
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.scripted import Messages, Talk, system, talking, tool, user
from tests.api.serving import COMPLETIONS, ask

pytestmark = pytest.mark.anyio

RULES = "Answer shortly. Name the sources that you use. Do not guess: say so if you do not know. Write plain English."
QUESTION = "What does the report say about the costs of the second quarter?"
TOOLS = [tool("get_weather", city="the city to look at"), tool("search_mail", words="words that the mail holds")]
CALL = {"type": "function", "function": {"name": "search_mail", "arguments": '{"words": "Ann"}'}}
REPLIES = {
    "Think": "<think>\nThis is about two numbers, so I add them up.\n</think>\n\nIt is forty-two, and not less.",
    "mail from": '<tool_call>\n{"name": "search_mail", "arguments": {"words": "Ann"}}\n</tool_call>',
}


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(resolve_model_path(None))


@pytest.fixture
async def talk(demo: Tokenizer) -> AsyncIterator[Talk]:
    async with talking(demo, REPLIES) as talk:
        yield talk


def assert_clean(diagnosis: dict[str, Any], cause: str) -> None:
    assert diagnosis["is_expected"] is True, diagnosis
    assert diagnosis["cause"] == cause, diagnosis
    assert diagnosis["verdict"].startswith("nothing wrong")
    assert diagnosis.keys() == {"prompt_tokens", "cached_tokens", "tier_tokens", "verdict", "is_expected", "cause"}


async def test_a_conversation_that_goes_on(talk: Talk) -> None:
    messages: Messages = [system(RULES)]
    for question in (QUESTION, "And of the third?", "Who wrote it?"):
        messages.append(user(question))
        diagnosis = await talk.explain(messages)
        assert_clean(diagnosis, "never_computed" if len(messages) == 2 else "none")
        messages = await talk.say(messages)
    assert diagnosis["cached_tokens"] > diagnosis["prompt_tokens"] // 2


async def test_an_agent_with_tools_and_their_results(talk: Talk) -> None:
    messages = await talk.say([system("You are a secretary."), user("Is there mail from Ann?")], tools=TOOLS)
    assert messages[2]["tool_calls"]
    messages.append({"role": "tool", "content": "Two mails.", "tool_call_id": messages[2]["tool_calls"][0]["id"]})
    assert_clean(await talk.explain(messages, tools=TOOLS), "none")
    messages = [*await talk.say(messages, tools=TOOLS), user("Read me the first one, please.")]
    assert_clean(await talk.explain(messages, tools=TOOLS), "none")


async def test_two_users_under_one_system_prompt(talk: Talk) -> None:
    history = await talk.say([system(RULES), user(QUESTION)])
    await talk.say([*history, user("And of the third?")])
    assert_clean(await talk.explain([system(RULES), user("How do I cook rice?")]), "never_computed")


async def test_a_long_conversation_of_another_user_that_was_never_here(talk: Talk) -> None:
    history = await talk.say([system(RULES), user(QUESTION)])
    await talk.say([*history, user("And of the third?")])
    other = [
        system(RULES),
        user("How do I cook rice?"),
        {"role": "assistant", "content": "Take twice as much water as rice, and wait for a quarter of an hour."},
        user("And potatoes?"),
    ]
    assert_clean(await talk.explain(other), "never_computed")


async def test_the_first_request_ever(talk: Talk) -> None:
    diagnosis = await talk.explain([system(RULES), user(QUESTION)])
    assert_clean(diagnosis, "never_computed")
    assert diagnosis["cached_tokens"] == 0


async def test_a_request_that_is_repeated(talk: Talk) -> None:
    await talk.say([system(RULES), user(QUESTION)])
    diagnosis = await talk.explain([system(RULES), user(QUESTION)])
    assert_clean(diagnosis, "none")
    assert diagnosis["cached_tokens"] == diagnosis["prompt_tokens"] - 1


async def test_several_answers_of_which_one_goes_on(talk: Talk) -> None:
    history = await talk.say([system(RULES), user(QUESTION)], n=3, temperature=1, seed=1)
    assert_clean(await talk.explain([*history, user("And of the third?")]), "none")


async def test_branches_of_one_history(talk: Talk) -> None:
    history = await talk.say([system(RULES), user(QUESTION)])
    one = await talk.say([*history, user("And of the third quarter, in which we sold the house?")])
    await talk.say([*one, user("Who wrote it?")])
    other = [*history, user("And of the third quarter, in which we bought the boat?")]
    assert_clean(await talk.explain(other), "never_computed")
    other = await talk.say(other)
    assert_clean(await talk.explain([*other, user("Who wrote it?")]), "none")


async def test_an_answer_that_is_asked_for_again_and_longer(talk: Talk) -> None:
    messages = [system(RULES), user(QUESTION)]
    await ask(talk.client, "/v1/chat/completions", messages=messages, max_tokens=4)
    assert_clean(await talk.explain(messages), "none")
    assert_clean(await talk.explain([*await talk.say(messages), user("And of the third?")]), "none")


async def test_a_conversation_that_is_taken_up_again_after_another(talk: Talk) -> None:
    history = await talk.say([system(RULES), user(QUESTION)])
    other = await talk.say([system(RULES), user("How do I cook rice?")])
    await talk.say([*other, user("And potatoes?")])
    assert_clean(await talk.explain([*history, user("And of the third?")]), "none")


@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_the_system_prompt_of_another_application(talk: Talk, tools: Any) -> None:
    translator = "You are a helpful assistant. You translate what the user says into French, word by word."
    coder = "You are a helpful assistant. You write small and tested Python programs, and nothing else."
    history = await talk.say([system(translator), user("Good morning, everyone")], tools=tools)
    await talk.say([*history, user("Good night")], tools=tools)
    other_tools = None if tools is None else [tool("run_python", program="the program to run")]
    messages = [system(coder), user("Sort a list of numbers.")]
    assert_clean(await talk.explain(messages, tools=other_tools), "never_computed")
    messages = [*messages, {"role": "assistant", "content": "Use sorted()."}, user("And backwards?")]
    assert_clean(await talk.explain(messages, tools=other_tools), "never_computed")


async def test_a_completion_that_is_extended(talk: Talk) -> None:
    text = "The report begins with a list of the costs of each quarter, and goes on to say that the four"
    answer = (await ask(talk.client, COMPLETIONS, prompt=text))["choices"][0]["text"]
    for longer in (text, f"{text}th", f"{text} quarters were alike", text + answer, f"{text}{answer} And then"):
        diagnosis = await ask(talk.client, "/v1/cache/explain", prompt=longer)
        assert diagnosis["is_expected"], diagnosis


async def test_completions_that_have_nothing_to_do_with_each_other(talk: Talk) -> None:
    await ask(talk.client, COMPLETIONS, prompt="The report begins with a list of the costs of each quarter.")
    assert_clean(await ask(talk.client, "/v1/cache/explain", prompt="The boat is blue."), "never_computed")
    assert_clean(await ask(talk.client, "/v1/cache/explain", prompt="Rice is white."), "never_computed")


async def test_thinking_that_is_sent_back(talk: Talk) -> None:
    history = await talk.say([system(RULES), user("Think: what is 40 and 2?")])
    assert "</think>" in history[2]["content"]
    assert_clean(await talk.explain([*history, user("And 3 more?")]), "none")


async def test_short_talks_with_the_same_set_phrases(demo: Tokenizer) -> None:
    greeting = "Hello! How can I help you today?"
    async with talking(demo, {"hi": greeting, "hello": greeting}) as talk:
        history = await talk.say([system(RULES), user("hi")])
        await talk.say([*history, user("Tell me a joke.")])
        other = [system(RULES), user("hello there"), {"role": "assistant", "content": greeting}]
        assert_clean(await talk.explain([*other, user("What time is it in Rome?")]), "never_computed")


async def test_questions_of_one_form(talk: Talk) -> None:
    def asked(country: str, capital: str) -> Messages:
        answer = {"role": "assistant", "content": f"The capital of {country} is {capital}."}
        return [system(RULES), user(f"What is the capital of {country}?"), answer]

    await talk.say([*asked("France", "Paris"), user("And its largest river?")])
    await talk.say([*asked("Italy", "Rome"), user("And its largest river?")])
    assert_clean(await talk.explain([*asked("Spain", "Madrid"), user("And its largest river?")]), "never_computed")


async def test_an_answer_that_was_cut_at_a_stop_string(talk: Talk) -> None:
    history = await talk.say([system(RULES), user(QUESTION)], stop=["this is"])
    assert history[2]["content"].endswith("and ")
    diagnosis = await talk.explain([*history, user("And of the third?")])
    assert diagnosis["is_expected"], diagnosis
