"""From what the cache holds to a diagnosis."""

from array import array

from msgspec import UNSET

from radixserve.diagnosis.comparison import RUN_LENGTH, Comparison, Run
from radixserve.diagnosis.divergence import describe, find_fault
from radixserve.diagnosis.passage import Passage
from radixserve.diagnosis.prompt import DiagnosedPrompt, place_of
from radixserve.diagnosis.report import Cause, Diagnosis, Divergence, Loss, OtherNamespace
from radixserve.diagnosis.wording import verdict_of
from radixserve.errors import InvalidRequest
from radixserve.protocol import LostPrefix, OtherPrompt, PromptFacts
from radixserve.tokenizer.tokenizer import Tokenizer

# What the engine tells of another prompt at most; one of so many tokens probably goes on.
MAX_OTHER_TOKENS = 2048
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
    num_missing = facts.num_tokens - facts.num_hit_tokens
    lost = facts.lost
    num_gained = facts.num_tokens_elsewhere - facts.num_hit_tokens
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
        cached_tokens=facts.num_hit_tokens,
        verdict=verdict_of(cause, facts, divergence, sees_other_namespaces=sees_other_namespaces),
        is_expected=is_expected,
        cause=cause,
        divergence=UNSET if divergence is None else divergence,
        lost=UNSET if lost is None else _loss(lost),
        other_namespace=OtherNamespace(facts.num_tokens_elsewhere) if cause == "other_namespace" else UNSET,
    )


def _explains(num_tokens: int, num_missing: int) -> bool:
    return num_tokens >= min(_MANY_TOKENS, (num_missing + 1) // 2)


def _loss(lost: LostPrefix) -> Loss:
    return Loss(tokens=lost.num_tokens, seconds_ago=lost.seconds_ago, idle_seconds=lost.idle_seconds)


def _compare(prompt: DiagnosedPrompt, facts: PromptFacts, tokenizer: Tokenizer) -> tuple[Cause, Divergence | None]:
    """Return what the cached prompts that begin in the same way explain."""
    if not facts.others:
        return ("none" if facts.num_hit_tokens else "never_computed"), None
    boilerplate = _boilerplate(prompt, tokenizer)
    comparisons = [
        (Comparison(prompt.token_ids, _token_ids(other), facts.num_hit_tokens, tokenizer, boilerplate), other)
        for other in facts.others
    ]
    furthest = max(comparison.position for comparison, _ in comparisons)
    comparisons = [pair for pair in comparisons if pair[0].position == furthest]
    if any(comparison.is_continued for comparison, _ in comparisons):
        return "none", None
    place = place_of(prompt, furthest, tokenizer)
    # The one that was used last among those most alike: max takes the first.
    by_likeness = sorted(comparisons, key=lambda pair: pair[0].likeness, reverse=True)
    for comparison, other in by_likeness:
        is_cut = len(other.token_ids) >= MAX_OTHER_TOKENS * array("i").itemsize
        fault = find_fault(comparison, prompt, place, is_cut=is_cut)
        if fault is not None:
            return "diverged", describe(fault, comparison, place)
    return "never_computed", None


def _token_ids(other: OtherPrompt) -> list[int]:
    return array("i", other.token_ids).tolist()


def _boilerplate(prompt: DiagnosedPrompt, tokenizer: Tokenizer) -> frozenset[Run]:
    """Return the runs of words that the chat template writes into any prompt, with tools or without."""
    if prompt.conversation is None:
        return frozenset()
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    runs: set[Run] = set()
    for tools in (None, [_DUMMY_TOOL]):
        try:
            token_ids = tokenizer.encode_chat(messages, tools=tools)
        except InvalidRequest:
            continue  # a template may refuse a system message, or tools
        words = Passage(token_ids, tokenizer).words
        runs |= {tuple(words[index : index + RUN_LENGTH]) for index in range(len(words) - RUN_LENGTH + 1)}
    return frozenset(runs)
