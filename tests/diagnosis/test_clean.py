"""Prompts that miss for no fault of theirs: nothing is found in any of them, whatever the chat template."""

from array import array
from typing import Any

import msgspec
import pytest

from radixserve.diagnosis.diagnose import diagnose
from radixserve.diagnosis.prompt import Conversation, DiagnosedPrompt
from radixserve.diagnosis.report import Loss
from radixserve.protocol import LostPrefix, OtherPrompt, PromptFacts
from radixserve.tokenizer.messages import Message
from tests.diagnosis.talks import TEMPLATES, Model, assistant, facts_of, system, tool, user
from tests.diagnosis.test_faults import FACTS, RULES, TALK, TOOLS, WITH_TURNS

FEW_SHOT = (
    "Here are examples. Input: a good film. Label: positive. Input: a bad film. Label: negative. Now do this. Input: "
)
LONG_QUESTION = user("What does the quarterly report say about the costs of the second quarter of this year?")
GREETING = "Hello! How can I help you today?"


def weather(city: str, answer: str) -> list[Message]:
    """An agent's talk of one form."""
    return [
        system("You are an agent."),
        user(f"Is it warm in {city}?"),
        assistant("", ("get_weather", f'{{"city": "{city}", "day": "2026-11-30"}}')),
        Message("tool", f"{answer}, and some clouds over the city"),
        assistant(f"It is {answer}."),
    ]


def about(context: str, question: str, answer: str) -> list[Message]:
    """A talk about a document, in a form that repeats."""
    form = f"Context: {context}. Question: {{}} Answer only from the context above."
    return [system(RULES), user(form.format(question)), assistant(answer), user(form.format("really?"))]


CASES: dict[str, tuple[list[Message], list[list[Message]]]] = {
    "a first request": (TALK[:2], []),
    "another question": ([system(RULES), user("How do I cook rice?")], [TALK]),
    "the same request": (TALK[:2], [TALK]),
    "a shorter history": ([*TALK[:3], user("Who wrote it?")], [TALK]),
    "another application": ([system("You translate into French what users write."), user("Good night")], [TALK]),
    "another application that went on": (
        [system("You translate into French."), user("Good morning"), assistant("Bonjour"), user("Good night")],
        [TALK],
    ),
    "no system prompt": (
        [user("Good morning"), assistant(GREETING), user("I need a recipe")],
        [
            [
                system(RULES),
                user("Hi"),
                assistant(GREETING),
                user("Nothing, bye"),
                assistant("Goodbye, have a nice day!"),
            ]
        ],
    ),
    "two personas": (
        [system("You are Bob, a pirate. Speak like one. Never break character."), user("Hi")],
        [[system("You are Amy, a nurse. Speak like one. Never break character."), user("Hi"), assistant("Hello dear")]],
    ),
    "few-shot": ([system(RULES), user(f"{FEW_SHOT}a long film.")], [[system(RULES), user(f"{FEW_SHOT}a short one.")]]),
    "few-shot in one message": ([user(f"{FEW_SHOT}a long film.")], [[user(f"{FEW_SHOT}a short one.")]]),
    "another last message": (
        [system(RULES), user(f"At 10:25. {FACTS} What is it about?")],
        [[system(RULES), user(f"At 10:22. {FACTS} What is it about?"), assistant("A report.")]],
    ),
    "one form": ([user("Translate 'cat' into French.")], [[user("Translate 'dog' into French."), assistant("chien")]]),
    "another document": (about("rice is white", "colour?", "White."), [about("snow is cold", "warm?", "No.")]),
    "another answer was taken": (
        [*TALK[:2], assistant("Costs rose by two percent only."), user("Why?")],
        [TALK[:3], TALK],
    ),
    "set phrases": (
        [system(RULES), user("hello there"), assistant(GREETING), user("What time is it in Rome?")],
        [[system(RULES), user("hi"), assistant(GREETING), user("Tell me a joke."), assistant("I know none.")]],
    ),
}
# Where the template shows which words are the system prompt.
CASES_WITH_TURNS: dict[str, tuple[list[Message], list[list[Message]]]] = {
    "a greeting to another application": (
        [system("Speak like a pirate."), user("Hi"), assistant(GREETING), user("Tell me a joke.")],
        [[system("You translate into French."), user("Hi"), assistant(GREETING)]],
    ),
    "one question to two applications": (
        [system("Speak like a pirate."), LONG_QUESTION, assistant("Aye, they rose."), user("Why?")],
        [[system("You translate into French."), LONG_QUESTION, assistant("Que dit le rapport des frais?")]],
    ),
}
CASES_WITH_TOOLS: dict[str, tuple[list[Message], list[Message], Any, Any]] = {
    "another task": ([*weather("Rome", "17 degrees"), user("Thanks")], weather("Oslo", "2 degrees"), TOOLS, TOOLS),
    "another application with the same tools": (
        [system("You write poems about the sea for small children."), user("Begin")],
        [system("As a secretary you read mail and say what is urgent."), user("Mail?"), assistant("None")],
        TOOLS,
        TOOLS,
    ),
    "other tools": (
        [system("You are X."), user("Begin")],
        [system("You are X."), user("Mail?"), assistant("None")],
        [tool("alpha", a="b"), tool("beta", c="d")],
        TOOLS,
    ),
    "no tools": (
        [system("You are X."), user("Begin")],
        [system("You are X."), user("Mail?"), assistant("None")],
        None,
        TOOLS,
    ),
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_wrong(models: dict[str, Model], template: str, case: str) -> None:
    model = models[template]
    messages, talks = CASES[case]
    diagnosis = model.diagnose(messages, *(model.cached(talk) for talk in talks))
    assert diagnosis.is_expected, diagnosis
    assert diagnosis.verdict.startswith("nothing wrong")


@pytest.mark.parametrize("template", WITH_TURNS)
@pytest.mark.parametrize("case", CASES_WITH_TURNS)
def test_nothing_is_wrong_with_turns(models: dict[str, Model], template: str, case: str) -> None:
    model = models[template]
    messages, talks = CASES_WITH_TURNS[case]
    diagnosis = model.diagnose(messages, *(model.cached(talk) for talk in talks))
    assert diagnosis.is_expected, diagnosis


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("case", CASES_WITH_TOOLS)
def test_nothing_is_wrong_with_tools(models: dict[str, Model], template: str, case: str) -> None:
    model = models[template]
    messages, talk, tools, cached_tools = CASES_WITH_TOOLS[case]
    diagnosis = model.diagnose(messages, model.cached(talk, cached_tools), tools=tools)
    assert diagnosis.is_expected, diagnosis


def test_a_talk_that_goes_on_is_told_from_one_that_is_new(models: dict[str, Model]) -> None:
    model = models["chatml"]
    assert model.diagnose([*TALK, user("Thanks")], model.cached(TALK)).cause == "none"
    assert model.diagnose([system(RULES), user("Thanks")], model.cached(TALK)).cause == "never_computed"
    # Only one of several answers is gone on with.
    other = [*TALK[:2], assistant("I do not know.")]
    assert model.diagnose([*TALK[:3], user("Thanks")], model.cached(other), model.cached(TALK[:3])).cause == "none"


def test_a_cached_prompt_that_holds_all_of_it_leaves_nothing_to_explain(models: dict[str, Model]) -> None:
    """Even if less of it would hit."""
    model = models["chatml"]
    token_ids = model.encode(TALK)
    rest = OtherPrompt(array("i", [*token_ids[10:], 1, 2, 3]).tobytes(), seconds_idle=1.0, num_requests_hit=1)
    facts = PromptFacts(len(token_ids), 10, len(token_ids), None, [rest], 0)
    prompt = DiagnosedPrompt(token_ids, Conversation(TALK, model.encode))
    assert diagnose(prompt, facts, model.tokenizer, sees_other_namespaces=True).cause == "none"


@pytest.mark.parametrize(
    ("num_stored", "cause", "num_lost"), [(90, "none", 0), (96, "none", 0), (48, "evicted", 42), (0, "evicted", 90)]
)
def test_what_a_lower_tier_has_is_not_lost(
    models: dict[str, Model], num_stored: int, cause: str, num_lost: int
) -> None:
    lost = LostPrefix(90, "evicted", 5.0, 9.0)
    facts = PromptFacts(107, 10, 10, lost, [], 0, num_stored)
    prompt = DiagnosedPrompt(list(range(107)), None)
    diagnosis = diagnose(prompt, facts, models["chatml"].tokenizer, sees_other_namespaces=True)
    assert (diagnosis.cached_tokens, diagnosis.tier_tokens, diagnosis.cause) == (10 + num_stored, num_stored, cause)
    assert num_lost == (diagnosis.lost.tokens if isinstance(diagnosis.lost, Loss) else 0)


def test_a_cached_prompt_that_parts_before_the_end_of_what_a_lower_tier_has_explains_nothing(
    models: dict[str, Model],
) -> None:
    model = models["chatml"]
    messages = [system(f"It is 09:15:02 now. {RULES}"), *TALK[1:]]
    token_ids = model.encode(messages)
    facts = facts_of(token_ids, [model.cached([system(f"It is 09:17:44 now. {RULES}"), *TALK[1:]])])
    prompt = DiagnosedPrompt(token_ids, Conversation(messages, model.encode))
    assert diagnose(prompt, facts, model.tokenizer, sees_other_namespaces=True).cause == "diverged"
    facts = msgspec.structs.replace(facts, num_stored_tokens=len(token_ids) - facts.num_hit_tokens - 20)
    diagnosis = diagnose(prompt, facts, model.tokenizer, sees_other_namespaces=True)
    assert (diagnosis.cause, diagnosis.is_expected) == ("none", True)
    assert diagnosis.verdict.startswith("nothing wrong")


@pytest.mark.parametrize(
    ("text", "cached"),
    [
        (f"{FACTS} And so on.", FACTS),
        (FACTS, f"{FACTS} And so on."),
        ("The boat is blue.", FACTS),
        (FEW_SHOT + "a", FEW_SHOT + "b"),
        ("The sea is", "<|im_start|>system\nYou are careful.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"),
        ("a b c d e f g", "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHello! How can I help?"),
        ("\u202e\ufeff", "<|im_start|>user\nHello<|im_end|>\n"),
        ("Hello there", "Hello<|im_end|>\n<|im_start|>assistant\nHello! How can I help?"),
    ],
)
def test_texts_without_messages(models: dict[str, Model], text: str, cached: str) -> None:
    assert models["chatml"].diagnose_text(text, cached).is_expected
