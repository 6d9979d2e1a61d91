"""Who answers in a terminal chat: the seam between the conversation and a server or an engine."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from radixserve.bench.message import Message


class AnswerPart(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an answer at one moment, and the counts so far; None where they are not known.

    num_cached_tokens: prompt tokens whose K/V were read from the cache.
    """

    text: str
    num_generated_tokens: int
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None


class Responder(Protocol):
    """Answers conversations. start comes first, close last, all in one event loop."""

    async def start(self) -> str:
        """Get ready and return a name for who answers. Raises RadixServeError."""

    def answer(self, messages: Sequence[Message]) -> AsyncGenerator[AnswerPart, None]:
        """Yield the answer as it comes; closing the generator ends it. Raises RadixServeError."""

    async def close(self) -> None:
        """Free what start took."""
