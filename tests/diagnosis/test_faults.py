"""Prompts that should have gone on with a cached one: the mistake and its message, whatever the chat template."""

from typing import Any

import pytest

from radixserve.diagnosis.report import Divergence
from radixserve.tokenizer.messages import Message
from tests.diagnosis.talks import TEMPLATES, Model, assistant, system, tool, user

RULES = "Answer shortly. Name the sources that you use. Do not guess: say so if you do not know. Write plain English."
FACTS = (
    "The quarterly report covers revenue, costs and staff. Revenue rose by four percent, costs by two. Staff numbers "
    "were flat over the year, with small changes in sales."
)
TALK = [
    system(RULES),
    user("What does the report say about costs?"),
    assistant(FACTS),
    user("And revenue?"),
    assistant("Revenue rose by four percent, as the first table on page two shows."),
]
OTHER_TALK = [user("Hello"), assistant("Hello! How can I help?")]
QUESTION = user("Thanks, and what of the staff?")
THINKING = "<think>\nLet me look at the report. It has several tables.\n</think>\n\n"
TOOLS = [
    tool("get_weather", "Get the weather of a city.", city="the city", day="the date"),
    tool("search_mail", "Search the mailbox.", words="words to find"),
    tool("send_mail", "Send a mail.", to="receiver", text="the text"),
]
TURNED = {
    "type": "function",
    "function": {
        **TOOLS[1]["function"],
        "parameters": dict(reversed(TOOLS[1]["function"]["parameters"].items())),
    },
}
WITH_TURNS = ["chatml", "headers", "forgetful"]
# Templates that write tools in front.
WITH_TOOLS = ["chatml", "headers"]


def assert_found(
    model: Model,
    expected: tuple[str, str, int | None],
    messages: list[Message],
    cached: list[int],
    tools: list[dict[str, Any]] | None = None,
) -> Divergence:
    diagnosis = model.diagnose(messages, cached, tools=tools)
    assert diagnosis.cause == "diverged", diagnosis
    assert not diagnosis.is_expected
    found = diagnosis.divergence
    assert isinstance(found, Divergence)
    assert (found.pattern, found.where, found.message_index) == expected, diagnosis
    token_ids = model.encode(messages, tools)
    assert token_ids[: found.position] == cached[: found.position]
    assert token_ids[found.position] != cached[found.position]
    return found


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    ("prompt", "one", "other", "pattern"),
    [
        (f"You are a bot. It is {{}}. {RULES}", "30 November 2026, 10:22 AM", "29 November 2026, 9:05 PM", "timestamp"),
        (f"You are a bot. {RULES} The time is {{}}", "2026-11-30T10:22:11Z", "2026-11-30T10:20:09Z", "timestamp"),
        (f"ts={{}} You are a bot. {RULES}", "1764498131", "1764499999", "timestamp"),
        (f"Today is {{}}. You are a bot. {RULES}", "Tuesday", "Monday", "timestamp"),
        (f"On {{}} you are a bot. {RULES}", "11/30/2026", "12/01/2026", "timestamp"),
        (f"Session {{}}. You are a bot. {RULES}", "sess_9f8e7d6c5b", "sess_1a2b3c4d5e", "id"),
        (f"You are a bot. This is request {{}}. {RULES}", "18", "17", "id"),
        (f"You are a bot at {{}}. {RULES}", "10:22:11, id 9f8e7d6c", "10:20:05, id 77aa88bb", "timestamp"),
    ],
)
def test_a_value_in_the_system_prompt(
    models: dict[str, Model], template: str, prompt: str, one: str, other: str, pattern: str
) -> None:
    model = models[template]
    cached = model.cached([system(prompt.format(other)), *OTHER_TALK])
    found = assert_found(model, (pattern, "system", 0), [system(prompt.format(one)), QUESTION], cached)
    assert one in found.prompt_text
    assert other in found.cached_text


@pytest.mark.parametrize("template", WITH_TURNS)
def test_a_window_over_the_history(models: dict[str, Model], template: str) -> None:
    model = models[template]
    messages = [TALK[0], *TALK[3:], QUESTION]
    assert_found(model, ("cut_history", "user", 1), messages, model.cached(TALK))


@pytest.mark.parametrize("template", WITH_TURNS)
def test_a_summary_of_the_history(models: dict[str, Model], template: str) -> None:
    model = models[template]
    summary = user("Summary of what was said so far: the user asked about costs.")
    assert_found(model, ("cut_history", "user", 1), [TALK[0], summary, *TALK[3:], QUESTION], model.cached(TALK))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_question_that_was_changed_afterwards(models: dict[str, Model], template: str) -> None:
    model = models[template]
    changed = user("[10:22] What does the report say about costs?")
    cached = model.cached([TALK[0], changed, *TALK[2:]])
    assert_found(model, ("edited_text", "user", 1), [*TALK, QUESTION], cached)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("num_known", [3, 5])
def test_an_answer_with_other_white_space(models: dict[str, Model], template: str, num_known: int) -> None:
    model = models[template]
    messages = [*TALK[:2], assistant(FACTS.replace(". ", ".\n\n")), *TALK[3:num_known], QUESTION]
    assert_found(model, ("edited_text", "assistant", 2), messages, model.cached(TALK[:num_known]))


@pytest.mark.parametrize("template", TEMPLATES)
def test_thinking_that_is_not_sent_back(models: dict[str, Model], template: str) -> None:
    model = models[template]
    cached = model.cached([*TALK[:2], assistant(THINKING + FACTS)])
    assert_found(model, ("stripped_thinking", "assistant", 2), [*TALK[:3], QUESTION], cached)


def test_thinking_that_the_template_leaves_out(models: dict[str, Model]) -> None:
    model = models["forgetful"]
    thinking = [*TALK[:2], assistant(THINKING + FACTS)]
    assert_found(model, ("stripped_thinking", "assistant", 2), [*thinking, QUESTION], model.cached(thinking))


@pytest.mark.parametrize("template", WITH_TOOLS)
@pytest.mark.parametrize(
    ("tools", "pattern", "detail"),
    [
        (TOOLS[::-1], "reordered_tools", ""),
        ([TOOLS[0], TURNED, TOOLS[2]], "reserialised_tools", ""),
        ([*TOOLS, tool("read_clock", zone="which")], "changed_tools", "added: read_clock"),
        ([tool("read_clock", zone="which"), *TOOLS], "changed_tools", "added: read_clock"),
        ([TOOLS[0], TOOLS[2]], "changed_tools", "gone: search_mail"),
        ([tool("get_weather", "By now.", city="where"), *TOOLS[1:]], "changed_tools", "added: get_weather"),
    ],
)
def test_tools(models: dict[str, Model], template: str, tools: list[dict[str, Any]], pattern: str, detail: str) -> None:
    model = models[template]
    cached = model.cached([system("You are X."), *OTHER_TALK], TOOLS)
    found = assert_found(model, (pattern, "tools", None), [system("You are X."), QUESTION], cached, tools)
    assert found.advice.startswith(detail)


def test_many_tools_of_which_the_cache_tells_a_part(models: dict[str, Model]) -> None:
    """The order has changed, as far as one can see, and nothing is said of tools beyond."""
    model = models["chatml"]
    tools = [tool(f"tool_{number}", "Does one of many things.", what="this or that") for number in range(60)]
    cached = model.cached([system("You are X."), *OTHER_TALK], tools)
    assert len(cached) > 2500
    messages = [system("You are X."), QUESTION]
    for changed, pattern, detail in (
        ([tools[1], tools[0], *tools[2:]], "reordered_tools", "send the tools"),
        ([tool("new", what="x"), *tools], "changed_tools", "added: new;"),
        (tools[1:], "changed_tools", "gone: tool_0;"),
    ):
        found = assert_found(model, (pattern, "tools", None), messages, cached, changed)
        assert found.advice.startswith(detail)


def test_tools_that_a_request_of_the_same_conversation_leaves_out(models: dict[str, Model]) -> None:
    model = models["chatml"]
    assert_found(model, ("changed_tools", "tools", None), [*TALK, QUESTION], model.cached(TALK, TOOLS))


@pytest.mark.parametrize("template", WITH_TOOLS)
@pytest.mark.parametrize("first", [[system("You are X.")], []])
def test_tools_that_a_later_step_leaves_out_or_brings(
    models: dict[str, Model], template: str, first: list[Message]
) -> None:
    """However short the talk is."""
    model = models[template]
    asked = [*first, user("Warm in Rome?")]
    if template == "headers":
        asked = [asked[0], *OTHER_TALK[::-1], *asked] if first else [*OTHER_TALK, *asked]
    step = [*asked, assistant("", ("get_weather", '{"city": "Rome"}')), Message("tool", "17 degrees")]
    for cached_tools, tools in ((TOOLS, None), (None, TOOLS)):
        cached = model.encode(step[:-1], cached_tools)
        assert_found(model, ("changed_tools", "tools", None), step, cached, tools)


@pytest.mark.parametrize("template", WITH_TURNS)
def test_the_system_prompt_of_a_conversation_that_goes_on(models: dict[str, Model], template: str) -> None:
    model = models[template]
    answer = assistant("It is forty-two, as page two shows.")
    without = [TALK[1], answer]
    whole = [TALK[0], *without]
    missing = assert_found(model, ("cut_history", "template", None), [*without, QUESTION], model.cached(whole))
    # An answer's last token has no K/V yet when it ends.
    cut = model.cached(whole)[:-2]
    assert_found(model, ("cut_history", "template", None), [*without, QUESTION], cut)
    assert "Answer shortly" in missing.cached_text
    added = assert_found(model, ("edited_text", "system", 0), [*whole, QUESTION], model.cached(without))
    assert "Answer shortly" in added.prompt_text
    replaced = [system("You sing."), *without, QUESTION]
    assert_found(model, ("edited_text", "system", 0), replaced, model.cached(whole))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_sentence_of_the_system_prompt(models: dict[str, Model], template: str) -> None:
    model = models[template]
    one, other = (
        system(f"You are an analyst of reports. {rule} {RULES}")
        for rule in ("Show tables where they help.", "Be polite to all people.")
    )
    assert_found(model, ("edited_text", "system", 0), [one, QUESTION], model.cached([other, *OTHER_TALK]))


def test_a_text_without_messages_is_at_fault_if_most_of_it_comes_again(models: dict[str, Model]) -> None:
    model = models["chatml"]
    for one, other, pattern in (
        ("10:22", "10:25", "timestamp"),
        ("run 17", "run 18", "id"),
        ("Rome", "Oslo", "edited_text"),
    ):
        diagnosis = model.diagnose_text(f"{one}. {RULES} {FACTS}", f"{other}. {RULES} {FACTS} And more.")
        found = diagnosis.divergence
        assert isinstance(found, Divergence)
        assert (found.pattern, found.where, found.message_index) == (pattern, "prompt", None)
        assert found.position < 8


def test_the_cached_prompt_that_is_most_alike_is_the_one_compared_with(models: dict[str, Model]) -> None:
    model = models["chatml"]
    cached = [
        model.cached([system("It is Monday, and you sing."), *OTHER_TALK]),
        model.cached([system(f"It is 10:01, you are a bot. {RULES}"), *OTHER_TALK]),
        model.cached([system(f"It is 12:01, you are a bot. {RULES}"), *TALK[1:]]),
        model.cached([system("It is 13:01, and you dance."), *OTHER_TALK]),
    ]
    diagnosis = model.diagnose([system(f"It is 23:59, you are a bot. {RULES}"), *TALK[1:], QUESTION], *cached)
    assert isinstance(diagnosis.divergence, Divergence)
    assert "12:01" in diagnosis.divergence.cached_text
