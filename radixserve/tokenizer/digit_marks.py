"""Marks in messages, by which a rendered conversation tells where a place in a message has come to stand.

Digits pass unchanged through what templates do to content: trim, case, JSON.
"""

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from radixserve.errors import InvalidRequest


class TextEnd(NamedTuple):
    """A place in a conversation: behind the first num_characters of the content of messages[message_index]."""

    message_index: int
    num_characters: int


def random_digits() -> str:
    """Return digits that stand in no text by chance, and that nobody can foretell."""
    return "".join(secrets.choice("0123456789") for _ in range(20))


def put_marks(messages: list[dict[str, Any]], ends: Sequence[TextEnd], marks: Sequence[str]) -> list[dict[str, Any]]:
    """Return the messages with marks[i] at ends[i], for each i; ends come in the order of the conversation."""
    marked = list(messages)
    # Backwards: what is put in at one place moves none of those before it.
    for (index, num_characters), mark in zip(reversed(ends), reversed(marks), strict=True):
        content = marked[index]["content"]
        marked[index] = {**marked[index], "content": content[:num_characters] + mark + content[num_characters:]}
    return marked


def texts_before(rendered: str, ends: Sequence[TextEnd], marks: Sequence[str]) -> list[str]:
    """Return what stands before each mark in a rendered conversation, without the other marks.

    A mark that the template shows several times counts where it comes first. Raises InvalidRequest, with the index of
    the message, for one that it does not show.
    """
    texts = []
    for end, mark in zip(ends, marks, strict=True):
        before, found, _ = rendered.partition(mark)
        if not found:
            raise InvalidRequest(
                f"the chat template does not show the end of a part of messages[{end.message_index}], so the prompt "
                "cannot be kept up to there; leave its cache mark out",
                param="messages",
            )
        for other in marks:
            before = before.replace(other, "")
        texts.append(before)
    return texts
