"""Tokens of a prompt as words, and which turn each word is in: what two prompts are compared by."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby

from radixserve.tokenizer.tokenizer import Tokenizer

# Stands for a control token in the text of a passage. No model is shown it, and a word never reaches across it.
BORDER = "\0"
# What chat templates write behind the control token that opens a turn.
_ROLE = re.compile(r"\0\s*(?:system|developer|user|human|assistant|model|tool|ipython)\b")
# Scripts without spaces: each character is a word.
_IDEOGRAPH = r"[\u3040-\u9fff\uac00-\ud7af]"
_WORD = re.compile(rf"{_IDEOGRAPH}|(?:(?!{_IDEOGRAPH})\w)+")
_MAX_TOKENS_OF_CHARACTER = 4
# So many equal words in a row are taken for the same text; fewer are often chance.
RUN_LENGTH = 6

Run = tuple[str, ...]


class Passage:
    """A stretch of tokens.

    boilerplate: runs of words that the chat template writes into any prompt, which prove nothing.
    text: decoded, each control token a BORDER. words: without boilerplate, and the roles that a template writes.
    starts, ends: of each word in text. turns: for each word, how many borders are before it.
    """

    def __init__(
        self, token_ids: Sequence[int], tokenizer: Tokenizer, boilerplate: frozenset[Run] = frozenset()
    ) -> None:
        control_token_ids = tokenizer.control_token_ids
        self.text = "".join(
            BORDER * len(list(run)) if is_control else tokenizer.decode(list(run), skip_special_tokens=False)
            for is_control, run in groupby(token_ids, key=control_token_ids.__contains__)
        )
        roles = {match.end() for match in _ROLE.finditer(self.text)}
        found = [match for match in _WORD.finditer(self.text) if match.end() not in roles]
        found = _without(found, boilerplate)
        self.words = [match[0] for match in found]
        self.starts = [match.start() for match in found]
        self.ends = [match.end() for match in found]
        self.turns: list[int] = []
        num_borders = position = 0
        for start in self.starts:
            num_borders += self.text.count(BORDER, position, start)
            self.turns.append(num_borders)
            position = start

    @cached_property
    def words_by_turn(self) -> dict[int, list[str]]:
        """The words of each turn that has any."""
        words_by_turn: dict[int, list[str]] = {}
        for word, turn in zip(self.words, self.turns, strict=True):
            words_by_turn.setdefault(turn, []).append(word)
        return words_by_turn

    def words_after_turn(self, turn: int) -> list[str]:
        """Return the words of the next turn that has any; none if there is no such turn."""
        return next((words for other, words in self.words_by_turn.items() if other > turn), [])

    def turns_from(self, turn: int) -> list[list[str]]:
        """Return the words of this turn and of those behind it, as far as they have any."""
        return [words for other, words in self.words_by_turn.items() if other >= turn]

    def text_of_turn(self, position: int) -> str:
        """Return the text of the turn that holds a position, without the role that opens it."""
        start, end = self.start_of_turn(position), self.end_of_turn(position)
        role = _ROLE.match(self.text, start - 1, end) if start > 0 else None
        return self.text[start if role is None else role.end() : end]

    def end_of_turn(self, position: int) -> int:
        """Return where, in text, the turn that holds a position ends."""
        end = self.text.find(BORDER, position)
        return len(self.text) if end < 0 else end

    def start_of_turn(self, position: int) -> int:
        """Return where, in text, the turn that holds a position begins."""
        return self.text.rfind(BORDER, 0, position) + 1


def runs_of(words: Sequence[str]) -> list[Run]:
    """Return all RUN_LENGTH words in a row."""
    return [tuple(words[index : index + RUN_LENGTH]) for index in range(len(words) - RUN_LENGTH + 1)]


def _without(found: list[re.Match[str]], boilerplate: frozenset[Run]) -> list[re.Match[str]]:
    """Return the words that are in no run of boilerplate."""
    if not boilerplate:
        return found
    left_out = {
        index + step
        for index, run in enumerate(runs_of([match[0] for match in found]))
        if run in boilerplate
        for step in range(RUN_LENGTH)
    }
    return [match for index, match in enumerate(found) if index not in left_out]


def character_border(token_ids: Sequence[int], position: int, tokenizer: Tokenizer) -> int:
    """Return the last position up to this one at which no character is cut in two."""
    for back in range(min(_MAX_TOKENS_OF_CHARACTER, position + 1)):
        if position - back == len(token_ids):
            if not _is_cut(token_ids, position - back, tokenizer):
                return position - back
        elif not _continues_character(token_ids[position - back], tokenizer):
            return position - back
    return position


def position_of_character(token_ids: Sequence[int], character: int, tokenizer: Tokenizer) -> int:
    """Return the position of the token that holds a character of a passage's text."""
    ends = range(1, len(token_ids) + 1)
    return bisect_right(ends, character, key=lambda end: len(Passage(token_ids[:end], tokenizer).text))


def _continues_character(token_id: int, tokenizer: Tokenizer) -> bool:
    first = tokenizer.token_bytes(token_id)[:1]
    return first != b"" and 0x80 <= first[0] < 0xC0


def _is_cut(token_ids: Sequence[int], position: int, tokenizer: Tokenizer) -> bool:
    """Whether the tokens before a position end inside a character."""
    last = b"".join(
        tokenizer.token_bytes(token_id)
        for token_id in token_ids[max(position - _MAX_TOKENS_OF_CHARACTER, 0) : position]
    )
    for length in range(1, min(4, len(last)) + 1):
        byte = last[-length]
        if byte >= 0xC0:
            return length < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False


def text_around(token_ids: Sequence[int], position: int, tokenizer: Tokenizer, num_tokens: int = 20) -> str:
    """Return the text of up to num_tokens tokens on either side of a position; no character is cut at its ends."""
    start = character_border(token_ids, max(position - num_tokens, 0), tokenizer)
    end = character_border(token_ids, min(position + num_tokens, len(token_ids)), tokenizer)
    return tokenizer.decode(token_ids[start:end], skip_special_tokens=False)
