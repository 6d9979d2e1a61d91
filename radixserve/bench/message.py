"""A message of a conversation."""

from collections.abc import Sequence

import msgspec


class Message(msgspec.Struct, frozen=True):
    """One message, as OpenAI's API spells it."""

    role: str
    content: str


def as_json(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return messages as plain objects."""
    return [{"role": message.role, "content": message.content} for message in messages]
