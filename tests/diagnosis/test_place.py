"""Which message of a conversation a token belongs to, in any chat template."""

import pytest

from radixserve.diagnosis.prompt import Conversation, DiagnosedPrompt, Place, place_of
from radixserve.tokenizer.messages import ContentPart, Message
from tests.diagnosis.talks import TEMPLATES, Model, assistant, system, user

MESSAGES = [
    system("Zebras are striped."),
    user("alpha beta"),
    assistant("gamma delta"),
    Message("user", [ContentPart("text", "epsilon "), ContentPart("text", "zeta")]),
    assistant("", ("call", '{"eta": "theta"}')),
    Message("tool", "iota kappa"),
    user("lambda"),
]
WORDS = ["striped", "beta", "delta", "zeta", None, "kappa", "lambda"]


def prompt_of(model: Model, messages: list[Message], num_cut_tokens: int = 0) -> DiagnosedPrompt:
    return DiagnosedPrompt(
        model.encode(messages)[num_cut_tokens:], Conversation(messages, model.encode, num_cut_tokens)
    )


def position_of(model: Model, prompt: DiagnosedPrompt, text: str) -> int:
    """Return the position of the token with which a text ends."""
    decode = model.tokenizer.decode
    ends = range(1, len(prompt.token_ids) + 1)
    return next(end for end in ends if text in decode(prompt.token_ids[:end], skip_special_tokens=False)) - 1


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("num_cut_tokens", [0, 3])
def test_a_word_is_in_its_message(models: dict[str, Model], template: str, num_cut_tokens: int) -> None:
    model = models[template]
    prompt = prompt_of(model, MESSAGES, num_cut_tokens)
    for index, word in enumerate(WORDS):
        if word is None or (template == "brackets" and MESSAGES[index].role == "tool"):
            continue
        place = place_of(prompt, position_of(model, prompt, word), model.tokenizer)
        assert (place.message_index, place.where) == (index, MESSAGES[index].role), word
        assert place.is_at_end == (index == len(MESSAGES) - 1)


def test_a_call_is_in_the_answer_that_makes_it(models: dict[str, Model]) -> None:
    model = models["chatml"]
    prompt = prompt_of(model, MESSAGES)
    for text in ("<tool_call>", "theta"):
        assert place_of(prompt, position_of(model, prompt, text), model.tokenizer) == Place(4, "assistant")


@pytest.mark.parametrize("template", ["chatml", "headers", "forgetful"])
def test_what_opens_and_ends_a_message_belongs_to_it(models: dict[str, Model], template: str) -> None:
    model = models[template]
    prompt = prompt_of(model, MESSAGES[:3])
    opening = position_of(model, prompt, "user")
    assert place_of(prompt, opening, model.tokenizer) == Place(1, "user")
    assert place_of(prompt, position_of(model, prompt, "beta") + 1, model.tokenizer) == Place(1, "user")


def test_what_the_template_writes_by_itself_belongs_to_no_message(models: dict[str, Model]) -> None:
    model = models["chatml"]
    prompt = prompt_of(model, [user("alpha")])
    named = position_of(model, prompt, "named SmolLM")
    assert place_of(prompt, named, model.tokenizer) == Place(None, "template")
    last = place_of(prompt, len(prompt.token_ids) - 1, model.tokenizer)
    assert last == Place(None, "template", is_at_end=True)


def test_a_prompt_without_messages_has_none(models: dict[str, Model]) -> None:
    assert place_of(DiagnosedPrompt([1, 2, 3], None), 1, models["chatml"].tokenizer) == Place(None, "prompt")


def test_a_long_conversation_takes_few_encodings(models: dict[str, Model]) -> None:
    model = models["chatml"]
    messages = [user(f"message {number}") if number % 2 else assistant(f"{number}") for number in range(200)]
    num_encodings = 0

    def encode(changed: list[Message]) -> list[int]:
        nonlocal num_encodings
        num_encodings += 1
        return model.encode(changed)

    prompt = DiagnosedPrompt(model.encode(messages), Conversation(messages, encode))
    place = place_of(prompt, position_of(model, prompt, "message 77"), model.tokenizer)
    assert place.message_index == 77
    assert num_encodings <= 10
