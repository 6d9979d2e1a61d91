"""What holds for any change of any conversation, and for any facts."""

import random
from array import array

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from radixserve.diagnosis.diagnose import diagnose
from radixserve.diagnosis.passage import text_around
from radixserve.diagnosis.prompt import Conversation, DiagnosedPrompt
from radixserve.diagnosis.report import Divergence
from radixserve.protocol import LostPrefix, OtherPrompt, PromptFacts
from radixserve.tokenizer.messages import Message
from tests.diagnosis.talks import Model, assistant, system, user

WORDS = [
    "river",
    "stone",
    "house",
    "green",
    "quickly",
    "seven",
    "under",
    "above",
    "letter",
    "carry",
    "bright",
    "12",
    "naïve",
    "你好",
    "😀",
    "open",
    "winter",
    "garden",
    "paper",
    "round",
    "music",
    "early",
    "2026",
    "table",
    "north",
    "simple",
    "answer",
    "number",
]


def conversation(random: random.Random, num_messages: int) -> list[Message]:
    texts = [" ".join(random.choices(WORDS, k=30)) for _ in range(num_messages)]
    makers = (user, assistant)
    return [system(texts[0]), *(makers[index % 2](text) for index, text in enumerate(texts[1:]))]


@pytest.mark.parametrize("template", ["chatml", "headers", "forgetful"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), num_turns=st.integers(1, 6), data=st.data())
def test_a_word_changed_in_a_message_of_the_history_is_found_there(
    models: dict[str, Model], template: str, seed: int, num_turns: int, data: st.DataObject
) -> None:
    model = models[template]
    cached = conversation(random.Random(seed), 1 + 2 * num_turns)
    index = data.draw(st.integers(0, len(cached) - 1))
    text = cached[index].content
    assert isinstance(text, str)
    words = text.split(" ")
    place = data.draw(st.integers(0, len(words) // 2))
    changed = " ".join([*words[:place], "entirely", *words[place + 1 :]])
    messages = [*cached[:index], Message(cached[index].role, changed), *cached[index + 1 :], user("What else?")]
    diagnosis = model.diagnose(messages, model.cached(cached))
    assert diagnosis.cause == "diverged", diagnosis
    found = diagnosis.divergence
    assert isinstance(found, Divergence)
    assert found.message_index == index
    assert "entirely" in found.prompt_text
    assert "\ufffd" not in found.prompt_text + found.cached_text


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), num_shared=st.integers(0, 4))
def test_another_conversation_is_nothing_wrong(models: dict[str, Model], seed: int, num_shared: int) -> None:
    model = models["chatml"]
    source = random.Random(seed)
    cached = conversation(source, 9)
    messages = [*cached[: 1 + 2 * num_shared], *conversation(source, 6)[1:]]
    assert model.diagnose(messages, model.cached(cached)).is_expected


QUESTIONS = ["Hello", "And then?", "What does the report say about the costs of this year?", "Who wrote it?"]
ANSWERS = [
    "Hello! How can I help you today?",
    "I do not know.",
    "hello! how can I help?",
    "The costs rose, it says.",
    "It",
]


@pytest.mark.parametrize("template", ["chatml", "forgetful"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_whoever_sends_back_what_was_said_is_blamed_for_nothing(
    models: dict[str, Model], template: str, seed: int
) -> None:
    """Several talks at once, in the same few words, of which some branch off from earlier turns."""
    model, source = models[template], random.Random(seed)
    cached: list[list[int]] = []
    talks = [[system(text)] for text in ("You are kind.", "You are kind. Answer in one sentence.", "Be brief.")]
    for _ in range(14):
        talk = source.choice(talks)
        messages = [*talk[: source.choice([1, len(talk), len(talk)])], user(source.choice(QUESTIONS))]
        diagnosis = model.diagnose(messages, *cached)
        assert diagnosis.is_expected, diagnosis
        answer = source.choice(ANSWERS)
        cached.insert(0, model.encode(messages) + model.tokenizer.encode(answer))
        talks.append([*messages, assistant(answer)])


token_ids = st.lists(st.integers(0, 49151), max_size=60)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    shared=token_ids,
    rest=token_ids.filter(bool),
    others=st.lists(token_ids.filter(bool), max_size=4),
    behind=token_ids,
    has_messages=st.booleans(),
    lost=st.none() | st.builds(LostPrefix, st.integers(1, 99), st.just("evicted"), st.floats(0, 9), st.floats(0, 9)),
    num_elsewhere=st.integers(0, 120),
)
def test_any_facts_have_a_diagnosis(
    models: dict[str, Model],
    shared: list[int],
    rest: list[int],
    others: list[list[int]],
    behind: list[int],
    has_messages: bool,
    lost: LostPrefix | None,
    num_elsewhere: int,
) -> None:
    """Of prompts of any tokens too, such as those that the messages here do not make."""
    model = models["chatml"]
    prompt = shared + rest
    messages = [system("a"), user("b"), assistant("c"), user("d")]
    made_of = Conversation(messages, model.encode) if has_messages else None
    cached = [OtherPrompt(array("i", other + behind).tobytes(), 1.0, 1) for other in others]
    facts = PromptFacts(len(prompt), len(shared), len(shared), lost, cached, num_elsewhere)
    diagnosis = diagnose(DiagnosedPrompt(prompt, made_of), facts, model.tokenizer, sees_other_namespaces=True)
    assert diagnosis.is_expected == diagnosis.verdict.startswith("nothing wrong")
    assert isinstance(diagnosis.divergence, Divergence) == (diagnosis.cause == "diverged")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(min_size=1, max_size=60), position=st.integers(0, 200), num_tokens=st.integers(1, 8))
def test_no_character_is_cut_at_the_ends_of_a_shown_text(
    models: dict[str, Model], text: str, position: int, num_tokens: int
) -> None:
    tokenizer = models["chatml"].tokenizer
    encoded = tokenizer.encode(text)
    assume(tokenizer.decode(encoded) == text)  # the vocabulary lacks a few bytes
    shown = text_around(encoded, min(position, len(encoded)), tokenizer, num_tokens)
    assert shown in text
    assert ("\ufffd" in shown) <= ("\ufffd" in text)


SNIPPETS = [
    *WORDS,
    "The sea is",
    "Once upon a time",
    "x",
    "\ufeff",
    "\u202e",
    "a b c d",
    "<|im_end|>",
    "<|im_start|>",
    " \n",
]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    one=st.lists(st.sampled_from(SNIPPETS), min_size=1, max_size=6),
    others=st.lists(st.lists(st.sampled_from(SNIPPETS), min_size=1, max_size=12), max_size=3),
    num_shared=st.integers(0, 2),
)
def test_short_texts_that_share_a_word_or_two_are_nothing_wrong(
    models: dict[str, Model], one: list[str], others: list[list[str]], num_shared: int
) -> None:
    model = models["chatml"]
    chat = model.tokenizer.decode(model.encode([system("You are kind."), user("Hello")]), skip_special_tokens=False)
    cached = [chat, *(" ".join([*one[:num_shared], *other]) for other in others)]
    assert model.diagnose_text(" ".join(one), *cached).is_expected
