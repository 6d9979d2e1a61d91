"""What limits the tokens of one sequence, as the scheduler sees it."""

from collections.abc import Iterable
from typing import Protocol, Self


class TokenConstraint(Protocol):
    """Follows one sequence token by token and says which may come next. Its state is that of the sequence.

    It survives a preemption, as only generated tokens enter it, each once.
    """

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end token may come next."""

    def allowed_tokens(self) -> bytes:
        """Return a bit for each token id, the lowest bit of the first byte for id 0: 1 where the token may come next.

        At least one bit is set. An end token is allowed where the text may end.
        """

    def accept(self, token_id: int) -> None:
        """Take the next token, one that was allowed and does not end the text.

        Raises a RequestError if it cannot tell what may follow; the constraint is of no use after that.
        """

    def fork(self) -> Self:
        """Return a constraint in the same state that goes on by itself."""


def token_mask(token_ids: Iterable[int]) -> bytes:
    """Return these tokens, at least one, in the form of TokenConstraint.allowed_tokens."""
    chosen = set(token_ids)
    mask = bytearray(max(chosen) // 8 + 1)
    for token_id in chosen:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)
