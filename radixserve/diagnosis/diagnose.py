"""From what the cache holds to a diagnosis."""

from array import array
from contextlib import suppress

import msgspec
from msgspec import UNSET

from radixserve.diagnosis.comparison import Comparison
from radixserve.diagnosis.divergence import describe, find_fault, may_be_fault
from radixserve.diagnosis.passage import Passage, Run, runs_of
from radixserve.diagnosis.prompt import DiagnosedPrompt, place_of
from radixserve.diagnosis.report import Cause, Diagnosis, Divergence, Loss, OtherNamespace
from radixserve.diagnosis.wording import verdict_of
from radixserve.errors import InvalidRequest
from radixserve.protocol import MAX_OTHER_TOKENS, LostPrefix, OtherPrompt, PromptFacts
from radixserve.tokenizer.messages import Message, template_messages
from radixserve.tokenizer.tokenizer import Tokenizer

# A loss, or a match elsewhere, of fewer tokens than these and than half of what is missing does not explain the miss.
_MANY_TOKENS = 256

_DUMMY_TOOL = {
    "type": "function",
    "function": {"name": "a", "description": "b", "parameters": {"type": "object", "properties": {}}},
}


def diagnose(
    prompt: DiagnosedPrompt, facts: PromptFacts, tokenizer: Tokenizer, *, sees_other_namespaces: bool
) -> Diagnosis:
    """Return why a prompt hits what it hits, and not more. Slow for long prompts: to be run off the event loop.

    facts: the engine's, of the prompt's token ids. sees_other_namespaces: whether the engine was to look there.
    """
    num_cached = facts.num_hit_tokens + facts.num_stored_tokens
    num_missing = facts.num_tokens - num_cached
    lost = _lost_for_good(facts)
    num_gained = facts.num_tokens_elsewhere - num_cached
    divergence = None
    cause: Cause
    # The last token is always computed, to have something to go on from.
    if num_missing <= 1:
        cause = "none"
    elif lost is not None and _explains(lost.num_tokens, num_missing):
        cause = lost.reason
    elif _explains(num_gained, num_missing):
        cause = "other_namespace"
    else:
        cause, divergence = _compare(prompt, facts, tokenizer)
    is_expected = cause in ("none", "never_computed", "reset")
    return Diagnosis(
        prompt_tokens=facts.num_tokens,
        cached_tokens=num_cached,
        tier_tokens=facts.num_stored_tokens,
        verdict=verdict_of(cause, facts, lost, divergence, sees_other_namespaces=sees_other_namespaces),
        is_expected=is_expected,
        cause=cause,
        divergence=UNSET if divergence is None else divergence,
        lost=UNSET if lost is None else _loss(lost),
        other_namespace=OtherNamespace(facts.num_tokens_elsewhere) if cause == "other_namespace" else UNSET,
    )


def _explains(num_tokens: int, num_missing: int) -> bool:
    return num_tokens >= min(_MANY_TOKENS, (num_missing + 1) // 2)


def _lost_for_good(facts: PromptFacts) -> LostPrefix | None:
    """Return what was lost behind all that is cached; what a lower tier has is not."""
    lost = facts.lost
    if lost is None or lost.num_tokens <= facts.num_stored_tokens:
        return None
    return msgspec.structs.replace(lost, num_tokens=lost.num_tokens - facts.num_stored_tokens)


def _loss(lost: LostPrefix) -> Loss:
    return Loss(tokens=lost.num_tokens, seconds_ago=lost.seconds_ago, idle_seconds=lost.idle_seconds)


def _compare(prompt: DiagnosedPrompt, facts: PromptFacts, tokenizer: Tokenizer) -> tuple[Cause, Divergence | None]:
    """Return what the cached prompts that begin in the same way explain."""
    num_cached = facts.num_hit_tokens + facts.num_stored_tokens
    # Others that part before the end of what a lower tier has are not what the prompt goes on from.
    if not facts.others or facts.num_common_tokens < num_cached:
        return ("none" if num_cached else "never_computed"), None
    boilerplate = _boilerplate(prompt, tokenizer)
    comparisons = [
        Comparison(
            prompt.token_ids, _token_ids(other), facts.num_hit_tokens, tokenizer, boilerplate, is_cut=_is_cut(other)
        )
        for other in facts.others
    ]
    furthest = max(comparison.position for comparison in comparisons)
    comparisons = [comparison for comparison in comparisons if comparison.position == furthest]
    if any(comparison.is_continued for comparison in comparisons):
        return "none", None
    suspects = [comparison for comparison in comparisons if may_be_fault(comparison)]
    if not suspects:
        return "never_computed", None
    place = place_of(prompt, furthest, tokenizer)
    is_untaken = facts.lost is None and all(comparison.is_last_turn for comparison in comparisons)
    # Of those that are equally alike, the one that was used last stays first.
    for comparison in sorted(suspects, key=lambda suspect: suspect.likeness, reverse=True):
        fault = find_fault(comparison, prompt, place, is_untaken=is_untaken)
        if fault is not None:
            return "diverged", describe(fault, comparison, place)
    return "never_computed", None


def _is_cut(other: OtherPrompt) -> bool:
    # One of so many tokens probably goes on.
    return len(other.token_ids) >= MAX_OTHER_TOKENS * array("i").itemsize


def _token_ids(other: OtherPrompt) -> list[int]:
    return array("i", other.token_ids).tolist()


def _boilerplate(prompt: DiagnosedPrompt, tokenizer: Tokenizer) -> frozenset[Run]:
    """Return the runs of words that any prompt with the same tools has, or any prompt with a tool, or without."""
    if prompt.conversation is None:
        return frozenset()
    roles = ("system", "user", "assistant", "user")
    texts = [Message(role, letter) for role, letter in zip(roles, "abcd", strict=True)]
    runs: set[Run] = set()
    # Templates may refuse a system message, or tools; some write a system message of their own.
    for messages in (texts, texts[1:]):
        with suppress(InvalidRequest):
            runs |= _runs(prompt.conversation.encode(messages), tokenizer)
        with suppress(InvalidRequest):
            runs |= _runs(tokenizer.encode_chat(template_messages(messages), tools=[_DUMMY_TOOL]), tokenizer)
    return frozenset(runs)


def _runs(token_ids: list[int], tokenizer: Tokenizer) -> set[Run]:
    return set(runs_of(Passage(token_ids, tokenizer).words))
