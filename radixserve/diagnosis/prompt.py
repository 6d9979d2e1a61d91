"""The prompt that a diagnosis is of, and which message of it a token belongs to."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from radixserve.diagnosis.common_prefix import num_equal
from radixserve.diagnosis.report import Where
from radixserve.errors import InvalidRequest
from radixserve.tokenizer.messages import Message
from radixserve.tokenizer.tokenizer import Tokenizer

_ROLES: dict[str, Where] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def _is_unknown(_: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages that a prompt was made of.

    encode: returns the ids of messages in place of these, all else being the same. num_cut_tokens: how many of the
    first ones were cut off, so that the prompt fits. is_answer: whether a text is that of an earlier answer.
    """

    messages: list[Message]
    encode: Callable[[list[Message]], list[int]]
    num_cut_tokens: int = 0
    is_answer: Callable[[str], bool] = _is_unknown


@dataclass(frozen=True, slots=True)
class DiagnosedPrompt:
    """A prompt as the engine gets it. conversation: what it was made of; None for one that was given as such."""

    token_ids: list[int]
    conversation: Conversation | None


@dataclass(frozen=True, slots=True)
class Place:
    """Which message a token belongs to; None where the template writes it by itself, or there are no messages.

    is_at_end: it is in the last message, or behind it.
    """

    message_index: int | None
    where: Where
    is_at_end: bool = False


def place_of(prompt: DiagnosedPrompt, position: int, tokenizer: Tokenizer) -> Place:
    """Return the message that a token of a prompt belongs to: in its text, in what opens it, or in what ends it.

    Messages are found by changing them: the first token that changes with a message is where it begins. So any template
    will do, at the cost of an encoding for each halving of the conversation.
    """
    conversation = prompt.conversation
    if conversation is None:
        return Place(None, "prompt")
    messages = conversation.messages
    try:
        index = bisect_right(range(len(messages)), position, key=lambda index: _start(prompt, conversation, index)) - 1
        if index < 0 and position >= _start_of_system(prompt, conversation):
            index = 0
        start = 0 if index < 0 else _start(prompt, conversation, index)
    except InvalidRequest:
        return Place(None, "template")
    if index < 0:
        return Place(None, "template")
    # A message holds no control token but in its calls, so what follows one opens the next message.
    is_behind = not tokenizer.control_token_ids.isdisjoint(prompt.token_ids[start:position])
    if is_behind and not messages[index].tool_calls:
        index += 1
    if index == len(messages):
        return Place(None, "template", is_at_end=True)
    return Place(index, _ROLES[messages[index].role], is_at_end=index == len(messages) - 1)


def _start(prompt: DiagnosedPrompt, conversation: Conversation, index: int) -> int:
    """Return the position of the first token that changes when the messages from index on do."""
    messages = conversation.messages
    changed = [msgspec.structs.replace(message, content=_other_text(message)) for message in messages[index:]]
    token_ids = conversation.encode([*messages[:index], *changed])[conversation.num_cut_tokens :]
    return num_equal(prompt.token_ids, token_ids)


def _start_of_system(prompt: DiagnosedPrompt, conversation: Conversation) -> int:
    """Return the position of what opens a system message that comes first; behind the prompt if none does."""
    first, *others = conversation.messages
    if _ROLES[first.role] != "system":
        return len(prompt.token_ids)
    token_ids = conversation.encode([msgspec.structs.replace(first, role="user"), *others])
    return num_equal(prompt.token_ids, token_ids[conversation.num_cut_tokens :])


def _other_text(message: Message) -> str:
    """Return a short text that begins otherwise than a message does, also where a template trims it."""
    content = message.content
    text = "".join(part.text or "" for part in content) if isinstance(content, list) else content or ""
    return "Z" if text.lstrip()[:1] != "Z" else "Q"
