"""Answers that come back otherwise than they were given: found in the next turn and in later ones."""

import pytest

from radixserve.protocol import LostPrefix
from radixserve.tokenizer.messages import Message
from tests.diagnosis.talks import Model, assistant, explain, facts_of, user
from tests.diagnosis.test_faults import FACTS, TALK, TOOLS, WITH_TURNS, assert_found

ASKED = TALK[:2]
NEXT = user("And revenue?")
SHORT = "It is forty-two, as page two shows."
# What a client makes of an answer, and what it is then said to be.
CHANGES = {
    "upper case": (str.upper, "edited_text"),
    "the first words are missing": (lambda text: " ".join(text.split()[2:]), "edited_text"),
    "a heading": (lambda text: f"Answer: {text}", "edited_text"),
    "a summary": (lambda text: "(the user was told what page two shows)", "edited_text"),
    "the end is missing": (lambda text: " ".join(text.split()[:3]), "cut_history"),
    "nothing is left": (lambda text: "", "cut_history"),
}


@pytest.mark.parametrize("template", WITH_TURNS)
@pytest.mark.parametrize("answer", [SHORT, FACTS])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_answer(models: dict[str, Model], template: str, answer: str, change: str) -> None:
    model = models[template]
    sent_back, pattern = CHANGES[change]
    messages = [*ASKED, assistant(sent_back(answer)), NEXT]
    found = assert_found(model, (pattern, "assistant", 2), messages, model.cached([*ASKED, assistant(answer)]))
    assert answer.split()[3] in found.cached_text
    # In the next turn the answer to that is changed too.
    cached = model.cached([*messages, assistant(answer)])
    messages = [*messages, assistant(sent_back(answer)), user("Why?")]
    assert_found(model, (pattern, "assistant", 4), messages, cached)


@pytest.mark.parametrize("template", WITH_TURNS)
@pytest.mark.parametrize("change", CHANGES)
def test_an_answer_that_is_changed_some_turns_later(models: dict[str, Model], template: str, change: str) -> None:
    model = models[template]
    sent_back, pattern = CHANGES[change]
    cached = model.cached([*ASKED, assistant(SHORT), NEXT, assistant("It is forty-two.")])
    messages = [*ASKED, assistant(sent_back(SHORT)), NEXT, assistant("It is forty-two."), user("Why?")]
    assert_found(model, (pattern, "assistant", 2), messages, cached)


def test_the_end_of_an_answer_that_is_missing_some_long_turns_later(models: dict[str, Model]) -> None:
    model = models["chatml"]
    talk = [*TALK, user("What else is in there?"), assistant(FACTS)]
    messages = [*ASKED, assistant(FACTS[:60]), *talk[3:], user("Why?")]
    assert_found(model, ("cut_history", "assistant", 2), messages, model.cached(talk))


def test_another_answer_is_no_fault_where_the_cached_one_is_too_long_to_tell_how_it_ends(
    models: dict[str, Model],
) -> None:
    model = models["chatml"]
    messages = [*ASKED, assistant("I do not know that."), NEXT]
    for length, is_expected in ((300, False), (3000, True)):
        cached = model.encode(ASKED) + model.tokenizer.encode(" word" * length)
        assert model.diagnose(messages, cached).is_expected == is_expected


@pytest.mark.parametrize("template", ["chatml", "headers"])
def test_a_call_that_comes_back_with_other_arguments(models: dict[str, Model], template: str) -> None:
    model = models[template]

    def messages(arguments: str) -> list[Message]:
        return [*ASKED, assistant("", ("get_weather", arguments)), Message("tool", "17 degrees")]

    given = model.encode(messages('{"city": "Rome", "day": "today"}')[:-1], TOOLS)
    assert model.diagnose(messages('{"city": "Rome", "day": "today"}'), given, tools=TOOLS).is_expected
    changed = ['{"city": "Oslo", "day": "today"}', "{}"]
    # Some templates write the arguments anew.
    spaced = ['{\n  "city": "Rome",\n  "day": "today"\n}'] if template == "chatml" else []
    for arguments in (*changed, *spaced):
        assert_found(model, ("edited_text", "assistant", 2), messages(arguments), given, TOOLS)


@pytest.mark.parametrize("template", WITH_TURNS)
def test_an_answer_that_is_left_out(models: dict[str, Model], template: str) -> None:
    model = models[template]
    cached = model.cached([*ASKED, assistant(FACTS)])
    found = assert_found(model, ("cut_history", "user", 2), [*ASKED, NEXT], cached)
    assert "quarterly" in found.cached_text
    assert "revenue" in found.prompt_text
    cached = model.cached([*ASKED, NEXT, assistant(SHORT)])
    assert_found(model, ("cut_history", "user", 3), [*ASKED, NEXT, user("Why?")], cached)


@pytest.mark.parametrize("template", ["chatml", "forgetful"])
def test_answers_that_are_left_out_some_turns_later(models: dict[str, Model], template: str) -> None:
    model = models[template]
    cached = model.cached([*ASKED, assistant(SHORT), NEXT, assistant("It is forty-two.")])
    assert_found(model, ("cut_history", "user", 2), [*ASKED, NEXT, user("Why?")], cached)


@pytest.mark.parametrize("template", ["chatml", "headers"])
def test_an_answer_to_a_tool_result_that_is_left_out(models: dict[str, Model], template: str) -> None:
    model = models[template]
    messages = [*ASKED, assistant("", ("get_weather", "{}")), Message("tool", "17 degrees")]
    cached = model.encode(messages, TOOLS) + model.tokenizer.encode(FACTS)
    assert_found(model, ("cut_history", "user", 4), [*messages, NEXT], cached, TOOLS)


@pytest.mark.parametrize("template", WITH_TURNS)
def test_what_is_no_answer_to_go_on_from_is_no_fault(models: dict[str, Model], template: str) -> None:
    model = models[template]
    asked = model.encode(ASKED)
    for name, messages, cached in (
        ("the question was computed, but not answered", [*ASKED, NEXT], asked),
        ("its answer was stopped at once", [*ASKED, NEXT], asked + model.tokenizer.encode("The quarterly")),
        ("two questions in a row, another one", [*ASKED, NEXT], model.encode([*ASKED, user("And staff?")])),
        ("a reader stopped the answer", [*ASKED, assistant(FACTS[:-14]), NEXT], model.cached(TALK[:3])),
        ("white space at its end", [*ASKED, assistant(SHORT), NEXT], asked + model.tokenizer.encode(SHORT + " \n")),
        ("others went on from it", [*ASKED, assistant("Costs fell."), NEXT], model.encode(TALK)),
        (
            "results of calls, one after the other",
            [*ASKED, assistant("", ("a", "{}")), Message("tool", "one"), Message("tool", "two")],
            model.encode([*ASKED, assistant("", ("a", "{}")), Message("tool", "one")])
            + model.tokenizer.encode("There is one more to come, so wait."),
        ),
    ):
        assert model.diagnose(messages, cached).is_expected, name


def test_an_answer_that_was_given_or_was_cached_itself_is_no_fault(models: dict[str, Model]) -> None:
    """As where it was sampled again, or the other one was evicted."""
    model = models["chatml"]
    cached = model.cached(TALK[:3])
    given = "Costs rose by two percent only."
    for answer in (given, "The quarterly report"):
        messages = [*ASKED, assistant(answer), NEXT]
        token_ids = model.encode(messages)
        facts = facts_of(token_ids, [cached])
        assert not explain(model, messages, facts, lambda text: False).is_expected
        assert explain(model, messages, facts, answer.__eq__).is_expected
    lost = LostPrefix(3, "evicted", 5.0, 5.0)
    facts = facts_of(token_ids, [cached], lost)
    assert explain(model, messages, facts, lambda text: False).is_expected


def test_one_of_several_cached_answers_that_went_on_clears_the_others(models: dict[str, Model]) -> None:
    model = models["chatml"]
    messages = [*ASKED, assistant("Costs fell."), NEXT]
    other = model.cached([*ASKED, assistant("I do not know that, to be honest.")])
    assert not model.diagnose(messages, other).is_expected
    assert model.diagnose(messages, other, model.cached(TALK)).is_expected


def test_the_same_answer_in_other_letters_is_a_fault_even_if_others_went_on_from_it(models: dict[str, Model]) -> None:
    model = models["chatml"]
    for answer in ("Yes, it does.", SHORT):
        cached = model.cached([*ASKED, assistant(answer), *TALK[3:]])
        messages = [*ASKED, assistant(answer.upper()), user("Who wrote it?")]
        assert_found(model, ("edited_text", "assistant", 2), messages, cached)
