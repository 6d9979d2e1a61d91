"""Tokens of a prompt as words, and which turn each word is in: what two prompts are compared by."""

import re
from collections.abc import Sequence
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


class Passage:
    """A stretch of tokens.

    text: decoded, each control token a BORDER. words: without the roles that a template writes. starts, ends: of each
    word in text. turns: for each word, how many borders are before it.
    """

    def __init__(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        control_token_ids = tokenizer.control_token_ids
        self.text = "".join(
            BORDER * len(list(run)) if is_control else tokenizer.decode(list(run), skip_special_tokens=False)
            for is_control, run in groupby(token_ids, key=control_token_ids.__contains__)
        )
        roles = {match.end() for match in _ROLE.finditer(self.text)}
        found = [match for match in _WORD.finditer(self.text) if match.end() not in roles]
        self.words = [match[0] for match in found]
        self.starts = [match.start() for match in found]
        self.ends = [match.end() for match in found]
        self.turns: list[int] = []
        num_borders = position = 0
        for start in self.starts:
            num_borders += self.text.count(BORDER, position, start)
            self.turns.append(num_borders)
            position = start

    def words_of_turn(self, turn: int, begin: int) -> list[str]:
        """Return the words of a turn from word number begin on."""
        return [word for word, other in zip(self.words[begin:], self.turns[begin:], strict=True) if other == turn]

    def end_of_turn(self, position: int) -> int:
        """Return where, in text, the turn that holds a position ends."""
        end = self.text.find(BORDER, position)
        return len(self.text) if end < 0 else end

    def start_of_turn(self, position: int) -> int:
        """Return where, in text, the turn that holds a position begins."""
        return self.text.rfind(BORDER, 0, position) + 1


def character_border(token_ids: Sequence[int], position: int, tokenizer: Tokenizer) -> int:
    """Return the last position up to this one at which no character is cut in two."""
    for back in range(min(_MAX_TOKENS_OF_CHARACTER, position)):
        if position - back == len(token_ids):
            if not _is_cut(token_ids, position - back, tokenizer):
                return position - back
        elif not _continues_character(token_ids[position - back], tokenizer):
            return position - back
    return position


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
