"""A prompt beside a cached one: where they part, what differs there, and how much behind it is the same again."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from radixserve.diagnosis.common_prefix import num_equal
from radixserve.diagnosis.passage import (
    BORDER,
    RUN_LENGTH,
    Passage,
    Run,
    character_border,
    position_of_character,
    runs_of,
    text_around,
)
from radixserve.tokenizer.tokenizer import Tokenizer

# Tokens that are looked at before the first difference, and of the prompt behind it.
_NUM_TOKENS_BEFORE = 2048
_NUM_TOKENS_BEHIND = 4096


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
    """A prompt and a cached one that begins with its first num_hit tokens.

    cached: the tokens of the cached one from num_hit on; the tokens before are the prompt's.
    boilerplate: as in Passage. is_cut: the cached one goes on beyond what is known of it.
    position: of the first token that differs, or where one of the two ends.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        cached: Sequence[int],
        num_hit: int,
        tokenizer: Tokenizer,
        boilerplate: frozenset[Run] = frozenset(),
        *,
        is_cut: bool = False,
    ) -> None:
        self.is_cut = is_cut
        self.position = num_hit + num_equal(token_ids[num_hit : num_hit + len(cached)], cached)
        self.num_tokens_left = len(token_ids) - self.position
        self.num_cached_left = num_hit + len(cached) - self.position
        self._tokenizer = tokenizer
        self._known, self._behind = token_ids[: self.position], cached[self.position - num_hit :]
        start = character_border(token_ids, max(self.position - _NUM_TOKENS_BEFORE, 0), tokenizer)
        self._token_ids = token_ids[start : self.position + _NUM_TOKENS_BEHIND]
        self.prompt = Passage(self._token_ids, tokenizer, boilerplate)
        begin = min(start, num_hit)
        self._cached_token_ids = [*token_ids[begin:num_hit], *cached][start - begin :]
        self.cached = Passage(self._cached_token_ids, tokenizer, boilerplate)
        # Where the tokens part, in both texts. The end of a character that they share may be still to come.
        self.offset = len(Passage(token_ids[start : self.position], tokenizer).text.rstrip("\ufffd"))

    def texts_around(self) -> tuple[str, str]:
        """Return what the cached one and the prompt hold around the first difference that can be seen."""
        # Where the tokens part the texts need not: other ones can spell the same for a while, or to the end.
        is_visible = self.num_equal_characters < min(len(self.cached.text), len(self.prompt.text))
        character = self.num_equal_characters if is_visible else self.offset
        cached_text, prompt_text = (
            text_around(token_ids, position_of_character(token_ids, character, self._tokenizer), self._tokenizer)
            for token_ids in (self._cached_token_ids, self._token_ids)
        )
        return cached_text, prompt_text

    def cached_words_behind(self, opening: Sequence[int]) -> list[str]:
        """Return what the cached one says in the turn that these tokens open; nothing if it begins otherwise."""
        position = self.position
        behind = self._behind[max(len(opening) - position, 0) :]
        if [*self._known, *self._behind][: len(opening)] != [*opening] or len(opening) < position:
            return []
        return Passage(behind, self._tokenizer).words_by_turn.get(0, [])

    @property
    def has_turns(self) -> bool:
        """Whether anything shows where messages end."""
        return BORDER in self.cached.text or BORDER in self.prompt.text

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
        for index, run in enumerate(runs_of(self.cached.words[self.num_equal_words :])):
            runs.setdefault(run, self.num_equal_words + index)
        return runs

    @cached_property
    def shared_runs(self) -> list[tuple[int, int]]:
        """Where, in the words of prompt and of cached one, runs behind the first difference are the same."""
        found = enumerate(runs_of(self.prompt.words[self.num_equal_words :]))
        return [(self.num_equal_words + index, self.runs[run]) for index, run in found if run in self.runs]

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
        num_changed = max(len(words), len(cached_words)) - num_last
        in_turn = [
            (end, cached_end)
            for end, cached_end in self.shared_runs
            if self.prompt.turns[end] == self.turn == self.cached.turns[cached_end]
        ]
        # A word or two at the end are the same by chance, unless little else differs.
        if num_last >= RUN_LENGTH or 2 * num_last >= num_changed > 0:
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

    def agrees_after(self, turn: int, cached_turn: int) -> bool:
        """Whether the next turn is the same in both, or begins so: what a model said once is seldom said again."""
        words, cached_words = self.prompt.words_after_turn(turn), self.cached.words_after_turn(cached_turn)
        return num_equal(words, cached_words) >= (RUN_LENGTH if words != cached_words else 1)

    def turns_alike(self, num_turns: int, num_cached_turns: int) -> list[list[str]]:
        """Return the turns in a row that are the same in both, so many behind where the turn of the difference begins.

        The last one of the cached prompt may break off.
        """
        turns = self.prompt.turns_from(self.turn)[num_turns:]
        cached_turns = self.cached.turns_from(self.turn)[num_cached_turns:]
        num_alike = num_equal(turns, cached_turns)
        if num_alike == len(cached_turns) - 1 and num_alike < len(turns):
            begun = cached_turns[num_alike]
            num_alike += num_equal(turns[num_alike], begun) >= max(len(begun) - 1, 1)
        return turns[:num_alike]

    def joins_again(self, num_words: int) -> tuple[int, int] | None:
        """Return after how many turns both go on with the same question and answer; None if in fewer words, or not.

        The turns of the prompt and of the cached one, that of the first difference included. None of one of them is
        what only the other has.
        """
        for numbers in ((1, 1), (0, 1), (1, 0)):
            turns = self.turns_alike(*numbers)
            if len(turns) > 1 and sum(map(len, turns)) >= num_words:
                return numbers
        return None

    @property
    def is_last_turn(self) -> bool:
        """Whether the cached one is not known to go on behind the turn of the first difference."""
        return not self.is_cut and len(self.cached.turns_from(self.turn)) <= 1

    @property
    def is_said_later(self) -> bool:
        """Whether the turn of the first difference, and the next one, are later turns of the cached one."""
        words = self.prompt.words_by_turn.get(self.turn, [])
        return any(
            turn > self.turn and words == cached_words and self.agrees_after(self.turn, turn)
            for turn, cached_words in self.cached.words_by_turn.items()
        )

    @property
    def is_rejoined_later(self) -> bool:
        """Whether the first difference ends with a turn that is the same in both, as is the next one."""
        turn, cached_turn = self.turn + self.change.num_turns, self.turn + self.change.num_cached_turns
        words, cached_words = (
            one.words_by_turn.get(at) for one, at in ((self.prompt, turn), (self.cached, cached_turn))
        )
        return self.change.num_turns > 0 and words == cached_words and self.agrees_after(turn, cached_turn)

    @cached_property
    def rest_of_turn(self) -> tuple[list[str], list[str]]:
        """The words of prompt and cached one from the first difference to the end of the turn that it is in."""
        num_before = self.num_words_before
        words, cached_words = self.words_of_turn
        return words[num_before:], cached_words[num_before:]

    @property
    def words_of_turn(self) -> tuple[list[str], list[str]]:
        """The words of prompt and cached one in the turn of the first difference."""
        return self.prompt.words_by_turn.get(self.turn, []), self.cached.words_by_turn.get(self.turn, [])

    @property
    def num_words_behind(self) -> tuple[int, int]:
        """Words of prompt and cached one in the turn of the first difference that reach beyond it."""
        num_words, num_cached_words = (
            sum(
                turn == self.turn and end > self.num_equal_characters
                for turn, end in zip(one.turns, one.ends, strict=True)
            )
            for one in (self.prompt, self.cached)
        )
        return num_words, num_cached_words

    @cached_property
    def num_words_before(self) -> int:
        """Words of the turn before the first difference."""
        return self.prompt.turns[: self.num_equal_words].count(self.turn)
