"""A diagnosis, as callers get it. UNSET leaves a key out."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

Cause = Literal["none", "diverged", "evicted", "expired", "unpinned", "reset", "never_computed", "other_namespace"]
Where = Literal["tools", "system", "user", "assistant", "tool", "template", "prompt"]
Pattern = Literal[
    "timestamp",
    "id",
    "reordered_tools",
    "reserialised_tools",
    "changed_tools",
    "stripped_thinking",
    "retokenised_answer",
    "cut_history",
    "edited_text",
]


class Divergence(msgspec.Struct, frozen=True):
    """Where a prompt leaves a cached one that it should have gone on with.

    position: index of the first token that differs. message_index: None in tools, in a prompt without messages and in
    what the template writes by itself. where: "prompt" for a prompt without messages.
    cached_text, prompt_text: what the two hold around position, control tokens spelled out.
    """

    position: int
    message_index: int | None
    where: Where
    cached_text: str
    prompt_text: str
    pattern: Pattern
    advice: str


class Loss(msgspec.Struct, frozen=True):
    """Tokens right behind the hit that were cached once; they had been unused for idle_seconds when they went."""

    tokens: int
    seconds_ago: float
    idle_seconds: float


class OtherNamespace(msgspec.Struct, frozen=True):
    """How many of the prompt's tokens are cached under another salt of the same tenant."""

    tokens: int


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What a request would read from the cache, and why not more.

    tier_tokens: those of the cached tokens that would come from a lower tier. is_expected: nothing is wrong with how
    the prompt is written and the cache is used.
    """

    prompt_tokens: int
    cached_tokens: int
    tier_tokens: int
    verdict: str
    is_expected: bool
    cause: Cause
    divergence: Divergence | UnsetType = UNSET
    lost: Loss | UnsetType = UNSET
    other_namespace: OtherNamespace | UnsetType = UNSET
