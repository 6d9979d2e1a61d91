"""Verdicts: a short sentence for people."""

from radixserve.diagnosis.report import Cause, Divergence, Pattern
from radixserve.protocol import LostPrefix, PromptFacts

_WHAT: dict[Pattern, str] = {
    "timestamp": "a time or date changed",
    "id": "an id or number changed",
    "reordered_tools": "the same tools stand in another order",
    "reserialised_tools": "the same tools are written in another way",
    "changed_tools": "the tools changed",
    "stripped_thinking": "the answer's thinking was left out",
    "retokenised_answer": "the same text has other tokens than were generated",
    "cut_history": "part of the history is missing",
    "edited_text": "the text was changed",
}


def verdict_of(
    cause: Cause,
    facts: PromptFacts,
    lost: LostPrefix | None,
    divergence: Divergence | None,
    *,
    sees_other_namespaces: bool,
) -> str:
    """Return what became of a prompt, and why. lost: behind all that is cached."""
    num_cached = facts.num_hit_tokens + facts.num_stored_tokens
    hit = f"{num_cached} of {facts.num_tokens} tokens hit"
    if facts.num_stored_tokens:
        hit += f" ({facts.num_stored_tokens} of them in a lower tier)"
    if divergence is not None:
        return f"{hit}: {_WHAT[divergence.pattern]} at token {divergence.position}, in {_place(divergence)}"
    if cause == "none":
        if num_cached >= facts.num_tokens - 1:
            return f"nothing wrong: {hit}, all that can (the last one is always computed)"
        return f"nothing wrong: {hit}, and the rest goes on where a cached prompt ends"
    if cause == "other_namespace":
        return (
            f"{hit}: {facts.num_tokens_elsewhere} are cached under another cache_salt, which is not shared; send the "
            "same salt with every request of one user, or none"
        )
    if cause == "never_computed" or lost is None:
        rest = "the rest is new" if num_cached else "nothing that begins like it was computed before"
        unseen = "" if sees_other_namespaces else " (prompts under other salts were not looked at)"
        return f"nothing wrong: {hit}, and {rest}{unseen}"
    ago = f"{duration(lost.seconds_ago)} ago"
    if cause == "reset":
        return f"{hit}: the next {lost.num_tokens} were cached until the cache was reset {ago}"
    idle = f"after {duration(lost.idle_seconds)} without use"
    if cause == "evicted":
        return (
            f"{hit}: the next {lost.num_tokens} were evicted {ago}, {idle}, to make room; pin them, or add K/V memory"
        )
    if cause == "expired":
        return (
            f"{hit}: the next {lost.num_tokens} were evicted {ago}, {idle}, when the time of their pin was over; pin "
            "them for longer"
        )
    return (
        f"{hit}: the pin of the next {lost.num_tokens} was broken {ago} for a request that could not run without their "
        "blocks; pin less, or give the cache more memory"
    )


def _place(divergence: Divergence) -> str:
    match divergence.where:
        case "tools":
            return "the tools"
        case "template":
            return "what the chat template writes"
        case "prompt":
            return "the prompt"
        case role:
            return f"messages[{divergence.message_index}], the {'tool result' if role == 'tool' else role}"


def duration(seconds: float) -> str:
    """Return a time in the largest unit that it has two of, such as 90 s, 3 min or 2 h."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
