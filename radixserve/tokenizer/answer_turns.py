"""Where a rendered conversation holds the assistant's turns.

What a model samples is often not how its tokenizer would encode the text. A client sends the text back; encoded anew it
has other ids than the engine has K/V for, and the cached prefix ends there. So a turn whose text is exactly that of an
earlier answer takes the answer's own ids, which decode to the very same text.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

# Returns the ids that an answer of this text was generated as; None if no such answer is known.
AnswerLookup = Callable[[str], Sequence[int] | None]


class Piece(NamedTuple):
    """A piece of a rendered conversation. token_ids: the ids that it has, or None for those of its text encoded."""

    text: str
    token_ids: Sequence[int] | None = None


def find_opening(opened: str, closed: str, control_tokens: re.Pattern[str]) -> str | None:
    """Return what a chat template writes to open the assistant's turn, from its first control token on.

    opened, closed: one conversation, rendered with a generation prompt and without. None if no control token is in the
    difference: what a user writes could then look like an opening.
    """
    shorter = range(min(len(opened), len(closed)))
    num_common = bisect_left(shorter, True, key=lambda index: opened[: index + 1] != closed[: index + 1])
    for token in control_tokens.finditer(opened):
        if token.end() > num_common:
            return opened[token.start() :]
    return None


def split_at_answers(text: str, opening: str, control_tokens: re.Pattern[str], answers: AnswerLookup) -> list[Piece]:
    """Return text in pieces, the turns that are known answers with their ids.

    A turn lies between an opening and the next control token, or the end. Both borders of it are borders of pieces in
    whatever is encoded: the answer's own prompt ended with the opening, and no token reaches across a control token.
    """
    pieces: list[Piece] = []
    rest = 0
    position = text.find(opening)
    while position >= 0:
        start = position + len(opening)
        border = control_tokens.search(text, start)
        end = len(text) if border is None else border.start()
        token_ids = answers(text[start:end]) if start < end else None
        if token_ids is not None:
            pieces += (Piece(text[rest:start]), Piece(text[start:end], token_ids))
            rest = end
        position = text.find(opening, end)
    return [*pieces, Piece(text[rest:])]
