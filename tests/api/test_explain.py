"""Conversations with a planted mistake each, over HTTP: explain names it and its place."""

from typing import Any

import pytest

from radixserve.config import EngineConfig
from radixserve.model_path import resolve_model_path
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.scripted import Messages, Talk, system, talking, tool, user
from tests.api.serving import COMPLETIONS, ask
from tests.clock import FakeClock

pytestmark = pytest.mark.anyio

RULES = "Answer shortly. Name the sources that you use. Do not guess: say so if you do not know. Write plain English."
QUESTION = "What does the report say about the costs of the second quarter?"
TOOLS = [
    tool("get_weather", city="the city to look at", day="the day as a date"),
    tool("search_mail", words="words that the mail holds"),
    tool("send_mail", to="who gets it", text="what it says"),
]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(resolve_model_path(None))


def assert_diverged(diagnosis: dict[str, Any], pattern: str, where: str, message_index: int | None) -> dict[str, Any]:
    """Check what is named, and return the divergence."""
    assert diagnosis["cause"] == "diverged", diagnosis
    assert diagnosis["is_expected"] is False
    divergence: dict[str, Any] = diagnosis["divergence"]
    found = (divergence["pattern"], divergence["where"], divergence["message_index"])
    assert found == (pattern, where, message_index), diagnosis
    assert divergence["advice"]
    assert diagnosis["cached_tokens"] <= divergence["position"] < diagnosis["prompt_tokens"]
    assert "\ufffd" not in divergence["cached_text"] + divergence["prompt_text"]
    return divergence


async def test_a_time_in_the_system_prompt(demo: Tokenizer) -> None:
    def messages(time: str) -> Messages:
        return [system(f"You are a helpful analyst. It is {time} now. {RULES}"), user(QUESTION)]

    async with talking(demo) as talk:
        await talk.say(messages("2026-11-30 09:15:02"))
        diagnosis = await talk.explain(messages("2026-11-30 09:17:44"))
    divergence = assert_diverged(diagnosis, "timestamp", "system", 0)
    assert "09:15:02" in divergence["cached_text"]
    assert "09:17:44" in divergence["prompt_text"]


async def test_a_request_id_in_the_system_prompt(demo: Tokenizer) -> None:
    def messages(request_id: str) -> Messages:
        return [system(f"Request {request_id}. You are a helpful analyst. {RULES}"), user(QUESTION)]

    async with talking(demo) as talk:
        await talk.say(messages("7f9c2ba4-e88f-4d1a-9c3e-0a1b2c3d4e5f"))
        diagnosis = await talk.explain(messages("7f9c51d0-12ab-4c3d-8e9f-aabbccddeeff"))
    divergence = assert_diverged(diagnosis, "id", "system", 0)
    assert "2ba4" in divergence["cached_text"]
    assert "51d0" in divergence["prompt_text"]


async def test_tools_in_another_order(demo: Tokenizer) -> None:
    messages = [system("You are a helpful secretary."), user("Is there mail from Ann?")]
    async with talking(demo) as talk:
        await talk.say(messages, tools=TOOLS)
        diagnosis = await talk.explain(messages, tools=[TOOLS[0], TOOLS[2], TOOLS[1]])
    divergence = assert_diverged(diagnosis, "reordered_tools", "tools", None)
    assert "search_mail" in divergence["cached_text"]
    assert "send_mail" in divergence["prompt_text"]


async def test_the_same_tools_with_other_keys_first(demo: Tokenizer) -> None:
    messages = [system("You are a helpful secretary."), user("Is there mail from Ann?")]
    parameters = TOOLS[1]["function"]["parameters"]
    turned = {**TOOLS[1]["function"], "parameters": dict(reversed(parameters.items()))}
    async with talking(demo) as talk:
        await talk.say(messages, tools=TOOLS)
        diagnosis = await talk.explain(messages, tools=[TOOLS[0], {"type": "function", "function": turned}, TOOLS[2]])
    divergence = assert_diverged(diagnosis, "reserialised_tools", "tools", None)
    assert '{"type": "object"' in divergence["cached_text"]
    assert '{"required"' in divergence["prompt_text"]


async def test_a_tool_added_in_front(demo: Tokenizer) -> None:
    messages = [system("You are a helpful secretary."), user("Is there mail from Ann?")]
    async with talking(demo) as talk:
        await talk.say(messages, tools=TOOLS)
        diagnosis = await talk.explain(messages, tools=[tool("read_clock", zone="the time zone"), *TOOLS])
    divergence = assert_diverged(diagnosis, "changed_tools", "tools", None)
    assert "get_weather" in divergence["cached_text"]
    assert "read_clock" in divergence["prompt_text"]
    assert "added: read_clock" in divergence["advice"]


async def test_a_thinking_block_that_is_not_sent_back(demo: Tokenizer) -> None:
    thinking = "<think>\nThe user asks about the costs, so I look at page nine.\n</think>\n\n"
    async with talking(demo, {"costs": f"{thinking}The costs went up by four percent."}) as talk:
        history = await talk.say([system(RULES), user(QUESTION)])
        history[2] = history[2] | {"content": history[2]["content"].removeprefix(thinking)}
        diagnosis = await talk.explain([*history, user("And in the third?")])
    divergence = assert_diverged(diagnosis, "stripped_thinking", "assistant", 2)
    assert "<think>" in divergence["cached_text"]
    assert "The costs went up" in divergence["prompt_text"]


async def test_an_answer_that_is_encoded_otherwise_than_it_was_generated(demo: Tokenizer) -> None:
    answer = "the costs went up by four percent in the second quarter"
    letters = [token_id for letter in answer for token_id in demo.encode(letter)]
    async with talking(demo, {"say about": [*demo.encode("Well, "), *letters]}) as talk:
        # Continued, so that the whole turn is no answer that the server knows.
        open_turn = [system(RULES), user(QUESTION), {"role": "assistant", "content": "Well, "}]
        history = await talk.say(open_turn, continue_final_message=True)
        whole = {"role": "assistant", "content": "Well, " + history.pop()["content"]}
        diagnosis = await talk.explain([*history[:2], whole, user("And in the third?")])
    divergence = assert_diverged(diagnosis, "retokenised_answer", "assistant", 2)
    assert "the costs" in divergence["cached_text"]
    assert "the costs went up" in divergence["prompt_text"]


async def test_history_that_was_cut(demo: Tokenizer) -> None:
    async with talking(demo) as talk:
        messages: Messages = [system(RULES)]
        for question in ("Who wrote the report of last year?", QUESTION, "How many people work in sales today?"):
            messages = await talk.say([*messages, user(question)])
        diagnosis = await talk.explain([messages[0], *messages[3:], user("Thank you. Is that more than before?")])
    divergence = assert_diverged(diagnosis, "cut_history", "user", 1)
    assert "Who wrote the report" in divergence["cached_text"]
    assert "What does the report" in divergence["prompt_text"]


async def test_a_system_prompt_edited_in_the_middle(demo: Tokenizer) -> None:
    def messages(rule: str) -> Messages:
        return [system(f"You are a helpful analyst of company reports. {rule} {RULES}"), user(QUESTION)]

    async with talking(demo) as talk:
        await talk.say(messages("Be polite to everyone."))
        diagnosis = await talk.explain(messages("Show tables where they help."))
    divergence = assert_diverged(diagnosis, "edited_text", "system", 0)
    assert "Be polite" in divergence["cached_text"]
    assert "Show tables" in divergence["prompt_text"]


async def press(talk: Talk, num_prompts: int = 4) -> None:
    """Compute prompts that have nothing to do with any other, of some 200 tokens each."""
    for number in range(num_prompts):
        token_ids = [1000 + 200 * number + index for index in range(200)]
        await ask(talk.client, COMPLETIONS, prompt=token_ids, max_tokens=1)


def assert_lost(diagnosis: dict[str, Any], cause: str, seconds_ago: float, idle_seconds: float) -> None:
    """Check what is named, of a prompt all of which was cached."""
    assert (diagnosis["cause"], diagnosis["is_expected"]) == (cause, cause == "reset"), diagnosis
    lost = diagnosis["lost"]
    assert lost["tokens"] >= (diagnosis["prompt_tokens"] - diagnosis["cached_tokens"]) * 3 // 4
    assert lost["seconds_ago"] == pytest.approx(seconds_ago, abs=1)
    assert lost["idle_seconds"] == pytest.approx(idle_seconds, abs=1)
    assert "divergence" not in diagnosis


async def test_a_prompt_that_was_evicted_under_pressure(demo: Tokenizer) -> None:
    clock = FakeClock()
    messages = [system(RULES), user(QUESTION)]
    async with talking(demo, num_blocks=40, clock=clock) as talk:
        await talk.say(messages)
        clock.seconds += 300
        await press(talk)
        clock.seconds += 20
        diagnosis = await talk.explain(messages)
    assert_lost(diagnosis, "evicted", seconds_ago=20, idle_seconds=300)
    assert "evicted 20 s ago, after 5 min without use" in diagnosis["verdict"]


async def test_a_prompt_whose_pin_had_expired(demo: Tokenizer) -> None:
    clock = FakeClock()
    messages = [system(RULES), user(QUESTION)]
    async with talking(demo, num_blocks=40, clock=clock) as talk:
        await ask(talk.client, "/v1/cache/pin", messages=messages, ttl=60)
        clock.seconds += 40
        await press(talk)
        assert (await talk.explain(messages))["cause"] == "none"
        clock.seconds += 40
        await press(talk)
        diagnosis = await talk.explain(messages)
    assert_lost(diagnosis, "expired", seconds_ago=0, idle_seconds=80)
    assert "their pin was over" in diagnosis["verdict"]


async def test_a_prompt_whose_pin_was_broken_for_a_request_that_cannot_run_without(demo: Tokenizer) -> None:
    messages = [system(RULES), user(QUESTION)]
    async with talking(demo, num_blocks=40) as talk:
        await ask(talk.client, "/v1/cache/pin", messages=messages, ttl=60)
        await ask(talk.client, COMPLETIONS, prompt=list(range(1000, 1620)), max_tokens=1)
        diagnosis = await talk.explain(messages)
    assert_lost(diagnosis, "unpinned", seconds_ago=0, idle_seconds=0)


async def test_a_cache_that_was_reset_is_nothing_wrong_with_the_prompt(demo: Tokenizer) -> None:
    messages = [system(RULES), user(QUESTION)]
    async with talking(demo) as talk:
        await talk.say(messages)
        await talk.client.post("/v1/cache/reset")
        diagnosis = await talk.explain(messages)
    assert_lost(diagnosis, "reset", seconds_ago=0, idle_seconds=0)


async def test_another_salt_with_every_request(demo: Tokenizer) -> None:
    messages = [system(RULES), user(QUESTION)]
    async with talking(demo, config=EngineConfig(enable_cache_introspection=True)) as talk:
        await talk.say(messages, cache_salt="one")
        diagnosis = await talk.explain(messages, cache_salt="two")
    assert (diagnosis["cause"], diagnosis["is_expected"]) == ("other_namespace", False)
    assert diagnosis["other_namespace"]["tokens"] == diagnosis["prompt_tokens"]
    assert diagnosis["cached_tokens"] == 0
    assert "divergence" not in diagnosis


async def test_without_introspection_other_salts_are_not_looked_at_and_the_verdict_says_so(demo: Tokenizer) -> None:
    messages = [system(RULES), user(QUESTION)]
    async with talking(demo) as talk:
        await talk.say(messages, cache_salt="one")
        diagnosis = await talk.explain(messages, cache_salt="two")
        assert (await talk.explain(messages, cache_salt="one"))["cause"] == "none"
    assert (diagnosis["cause"], diagnosis["is_expected"]) == ("never_computed", True)
    assert "other salts were not looked at" in diagnosis["verdict"]


@pytest.mark.parametrize("introspection", [False, True])
async def test_other_tenants_texts_never_appear(demo: Tokenizer, introspection: bool) -> None:
    secret = "the merger with Acme Limited is planned for the spring"
    config = EngineConfig(api_key=("a=ka", "b=kb"), enable_cache_introspection=introspection)
    messages = [system(f"You are a helpful analyst. It is 09:15 now. {RULES}"), user(QUESTION)]
    async with talking(demo, config=config, Authorization="Bearer ka") as talk:
        await talk.say([messages[0], user(f"Remember that {secret}.")])
        talk.client.headers["Authorization"] = "Bearer kb"
        other = [system(f"You are a helpful analyst. It is 09:16 now. {RULES}"), user(QUESTION)]
        response = await talk.client.post("/v1/cache/explain", json={"messages": other})
        assert (await talk.explain(messages))["cached_tokens"] == 0
    assert "merger" not in response.text
    assert "09:15" not in response.text
    assert response.json()["cause"] == "never_computed"
