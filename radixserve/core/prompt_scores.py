"""Log-probabilities of a prompt's tokens, gathered from the steps that compute it."""

from array import array
from dataclasses import dataclass, field

from radixserve.protocol import TokenLogprobs


@dataclass(slots=True, eq=False)
class PromptScores:
    """What is known of the tokens of one prompt.

    The logits at a position score the token behind it, so there is an entry for each token but the first. A position
    counts once: what a resumed request computes again is not taken twice.
    num_alternatives: tokens that each entry tells beside its own.
    """

    num_prompt_tokens: int
    num_alternatives: int
    _entries: list[TokenLogprobs] = field(default_factory=list)
    _is_told: bool = False

    @property
    def num_scored_positions(self) -> int:
        """Leading positions whose logits are not wanted any more."""
        return len(self._entries)

    @property
    def is_complete(self) -> bool:
        """Whether every token but the first has its entry."""
        return len(self._entries) == self.num_prompt_tokens - 1

    def targets(self, token_ids: "array[int]", start: int, end: int) -> "array[int]":
        """Return the prompt tokens that the logits at positions start to end - 1 score; none if all are known."""
        if self.is_complete:
            return array("i")
        return token_ids[start + 1 : min(end + 1, self.num_prompt_tokens)]

    def add(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Take in the entries that the logits at positions start onwards gave; those before are known."""
        assert start <= len(self._entries)
        self._entries += entries[len(self._entries) - start :]

    def take(self) -> list[TokenLogprobs | None] | None:
        """Return one entry for each prompt token, None for the first, at the first call; None at later ones."""
        if self._is_told:
            return None
        self._is_told = True
        return [None, *self._entries]
