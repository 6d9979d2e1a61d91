"""What often differs between prompts that should be the same: times, ids, thinking that was left out."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from radixserve.diagnosis.report import Pattern

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DAY = r"(?:mon|tues|wednes|thurs|fri|satur|sun)day"
_TIME = re.compile(
    rf"""\d{{4}}-\d{{1,2}}-\d{{1,2}}(?:[T ,]*\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:\.\d+)?)?(?:Z|[+-]\d{{2}}:?\d{{2}})?)?
    |\b\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}\b|\b\d{{4}}[./]\d{{1,2}}[./]\d{{1,2}}\b
    |\b\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:\.\d+)?)?(?:\s?[ap]\.?m\b)?|\b\d{{1,2}}\s?[ap]\.?m\b
    |\b{_DAY}\b|\b{_MONTH}\s\d{{1,2}}\b(?:(?:st|nd|rd|th)?,?\s\d{{4}})?
    |\b\d{{1,2}}(?:st|nd|rd|th)?\s{_MONTH}(?:,?\s\d{{4}})?
    |\b1\d{{9}}(?:\d{{3}})?(?:\.\d+)?\b""",
    re.IGNORECASE | re.VERBOSE,
)
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
# A number; or letters and digits mixed, as words are not.
_ID = re.compile(rf"{_UUID}|(?<![\w.])\d+(?![\w.]*\w)|(?=[\w-]*\d)(?=[\w-]*[a-z])[\w-]{{6,}}", re.IGNORECASE)
_OPEN_THINKING = re.compile(r"<(think|thinking|thought|reasoning)>")
_THINKING = re.compile(r"<(think|thinking|thought|reasoning)>.*?(?:</\1>|\Z)\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Excerpt:
    """What differs, from start to end, and text around it: a value may begin before it and end behind it."""

    text: str
    start: int
    end: int


def pattern_of_value(one: Excerpt, other: Excerpt) -> Pattern | None:
    """Return what kind of value differs between two texts: a time, or an id; None if it is neither."""
    if _is_covered(_TIME, one) and _is_covered(_TIME, other):
        return "timestamp"
    return "id" if _is_covered(_ID, one) and _is_covered(_ID, other) else None


def _is_covered(expression: re.Pattern[str], excerpt: Excerpt) -> bool:
    """Whether all words that differ are inside matches, and there is one."""
    start, end = excerpt.start, excerpt.end
    uncovered = list(excerpt.text[start:end])
    is_found = False
    for match in expression.finditer(excerpt.text):
        if match.start() < max(end, start + 1) and match.end() > start:
            is_found = True
            for index in range(max(match.start(), start), min(match.end(), end)):
                uncovered[index - start] = " "
    return is_found and not re.search(r"\w", "".join(uncovered))


def lacks_thinking(turn: str, cached_turn: str) -> bool:
    """Whether a turn is a cached one without its thinking. A cached one that breaks off may still be thinking."""
    if _OPEN_THINKING.search(cached_turn) is None or len(_OPEN_THINKING.findall(turn)) >= len(
        _OPEN_THINKING.findall(cached_turn)
    ):
        return False
    answer = _THINKING.sub("", cached_turn).strip()
    said = _THINKING.sub("", turn).strip()
    return answer == "" or said.startswith(answer[:40]) or answer.startswith(said[:40])


def names(values: Sequence[str]) -> str:
    """Return names as a list for people, cut if it is long."""
    shown = ", ".join(values[:5])
    return shown if len(values) <= 5 else f"{shown} and {len(values) - 5} more"
