"""A prompt beside a cached one: where they part, what differs there, and how much behind it is the same again."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from radixserve.diagnosis.common_prefix import num_equal
from radixserve.diagnosis.passage import BORDER, Passage, character_border, text_around
from radixserve.tokenizer.tokenizer import Tokenizer

# Tokens that are looked at before the first difference, and of the prompt behind it.
_NUM_TOKENS_BEFORE = 2048
_NUM_TOKENS_BEHIND = 4096
# So many equal words in a row are taken for the same text; fewer are often chance.
RUN_LENGTH = 6

Run = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What differs first: words begin to end of the prompt, in place of words begin to cached_end of the cached one.

    num_turns, num_cached_turns: borders of turns in them. is_rejoined: the same words stand behind both.
    """

    begin: int
    end: int
    cached_end: int
    num_turns: int
    num_cached_turns: int
    is_rejoined: bool


class Comparison:
    """A prompt and a cached one that begins with its first num_common tokens.

    cached: the tokens of the cached one from num_hit on; the tokens before are the prompt's. boilerplate: runs of words
    that the chat template writes into any prompt, which prove nothing.
    position: of the first token that differs, or where one of the two ends.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        cached: Sequence[int],
        num_hit: int,
        tokenizer: Tokenizer,
        boilerplate: frozenset[Run] = frozenset(),
    ) -> None:
        self._boilerplate = boilerplate
        self.position = num_hit + num_equal(token_ids[num_hit : num_hit + len(cached)], cached)
        self.num_tokens_left = len(token_ids) - self.position
        self.num_cached_left = num_hit + len(cached) - self.position
        start = character_border(token_ids, max(self.position - _NUM_TOKENS_BEFORE, 0), tokenizer)
        self.prompt = Passage(token_ids[start : self.position + _NUM_TOKENS_BEHIND], tokenizer)
        begin = min(start, num_hit)
        whole = [*token_ids[begin:num_hit], *cached]
        self.cached = Passage(whole[start - begin :], tokenizer)
        # Where the tokens part, in both texts. The end of a character that they share may be still to come.
        self.offset = len(Passage(token_ids[start : self.position], tokenizer).text.rstrip("\ufffd"))
        self.cached_text = text_around(whole, self.position - begin, tokenizer)
        self.prompt_text = text_around(token_ids, self.position, tokenizer)

    @property
    def is_continued(self) -> bool:
        """Whether one of the two ends where they would part."""
        return self.num_tokens_left == 0 or self.num_cached_left == 0

    @cached_property
    def num_equal_characters(self) -> int:
        """Characters of both texts that are the same, from their beginning, whatever the tokens are."""
        return num_equal(self.prompt.text, self.cached.text)

    @cached_property
    def num_equal_words(self) -> int:
        """Words of both that are the same, from their beginning."""
        return num_equal(self.prompt.words, self.cached.words)

    @cached_property
    def num_equal_words_behind(self) -> int:
        """Words that are still the same although something between them, such as white space, is not."""
        return self.num_equal_words - bisect_left(
            self.prompt.starts, self.num_equal_characters, 0, self.num_equal_words
        )

    @cached_property
    def runs(self) -> dict[Run, int]:
        """The runs of words in the cached one behind the first difference, and where each is first."""
        runs: dict[Run, int] = {}
        for index in range(self.num_equal_words, len(self.cached.words) - RUN_LENGTH + 1):
            run = tuple(self.cached.words[index : index + RUN_LENGTH])
            if run not in self._boilerplate:
                runs.setdefault(run, index)
        return runs

    @cached_property
    def shared_runs(self) -> list[tuple[int, int]]:
        """Where, in the words of prompt and of cached one, runs behind the first difference are the same."""
        words = self.prompt.words
        shared = []
        for index in range(self.num_equal_words, len(words) - RUN_LENGTH + 1):
            cached_index = self.runs.get(tuple(words[index : index + RUN_LENGTH]))
            if cached_index is not None:
                shared.append((index, cached_index))
        return shared

    @cached_property
    def num_shared_words(self) -> int:
        """Words of the cached one behind the first difference that are part of runs in both."""
        return len({cached + step for _, cached in self.shared_runs for step in range(RUN_LENGTH)})

    @property
    def likeness(self) -> int:
        """How much speaks for the two to be meant as one; to be compared with other cached ones'."""
        return self.num_shared_words + self.num_equal_words + self.num_equal_words_behind

    @cached_property
    def turn(self) -> int:
        """The turn that the first difference is in."""
        return self.prompt.text.count(BORDER, 0, self.num_equal_characters)

    @cached_property
    def change(self) -> Change:
        """What differs first, up to where the two join again: in the same turn if they do, else in a later one.

        Without that, it is the rest of the turn.
        """
        begin = self.num_equal_words
        words, cached_words = self.rest_of_turn
        num_last = num_equal(words[::-1], cached_words[::-1])
        in_turn = [
            (end, cached_end)
            for end, cached_end in self.shared_runs
            if self.prompt.turns[end] == self.turn == self.cached.turns[cached_end]
        ]
        if num_last > 0:
            in_turn.append((begin + len(words) - num_last, begin + len(cached_words) - num_last))
        if in_turn:
            return Change(begin, *min(in_turn, key=sum), num_turns=0, num_cached_turns=0, is_rejoined=True)
        if not self.shared_runs:
            end, cached_end = begin + len(words), begin + len(cached_words)
            return Change(begin, end, cached_end, num_turns=0, num_cached_turns=0, is_rejoined=False)
        end, cached_end = min(self.shared_runs, key=sum)
        return Change(
            begin,
            end,
            cached_end,
            num_turns=self.prompt.turns[end] - self.turn,
            num_cached_turns=self.cached.turns[cached_end] - self.turn,
            is_rejoined=True,
        )

    @property
    def is_said_later(self) -> bool:
        """Whether the cached one has in a later turn what the prompt says in the turn of the first difference."""
        return any(
            self.prompt.turns[index] == self.turn < self.cached.turns[cached_index]
            for index, cached_index in self.shared_runs
        )

    @cached_property
    def rest_of_turn(self) -> tuple[list[str], list[str]]:
        """The words of prompt and cached one from the first difference to the end of the turn that it is in."""
        begin = self.num_equal_words
        return self.prompt.words_of_turn(self.turn, begin), self.cached.words_of_turn(self.turn, begin)

    @cached_property
    def num_words_before(self) -> int:
        """Words of the turn before the first difference."""
        return self.prompt.turns[: self.num_equal_words].count(self.turn)
