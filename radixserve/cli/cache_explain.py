"""A diagnosis in the terminal: the verdict, and both texts with what differs between them marked."""

from difflib import SequenceMatcher

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from radixserve.cli.cache_text import printable
from radixserve.diagnosis.common_prefix import num_equal
from radixserve.diagnosis.report import Diagnosis, Divergence

# What differs stands between these, as colours alone are lost in a file, and to many eyes.
_MARKS = ("[[", "]]")
# Fewer equal characters are no more than chance, such as the colon of two times.
_MIN_TOGETHER = 4
# Comparing takes the product of both lengths, and for what repeats itself more.
_MAX_COMPARED = 300


def explain_view(diagnosis: Diagnosis, encoding: str = "utf-8") -> Group:
    """Return what to print of a diagnosis. encoding: the terminal's."""
    style = "green" if diagnosis.is_expected else "yellow"
    parts: list[Text | Padding] = [Text(printable(diagnosis.verdict, encoding), style=style)]
    if isinstance(diagnosis.divergence, Divergence):
        parts += _divergence_view(diagnosis.divergence, encoding)
    return Group(*parts)


def _divergence_view(divergence: Divergence, encoding: str) -> list[Text | Padding]:
    cached, prompt = marked(divergence.cached_text, divergence.prompt_text, encoding)
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("cached", style="bold"), cached)
    table.add_row(Text("prompt", style="bold"), prompt)
    advice = Text(printable(f"{divergence.pattern.replace('_', ' ')}: {divergence.advice}", encoding))
    return [Padding(table, (1, 0, 1, 2)), advice]


def marked(one: str, other: str, encoding: str = "utf-8") -> tuple[Text, Text]:
    """Return two texts with the first part that differs marked in each, up to where they come together again."""
    begin = num_equal(one, other)
    num_one, num_other = _num_apart(one[begin:], other[begin:])
    return _marked(one, begin, begin + num_one, encoding), _marked(other, begin, begin + num_other, encoding)


def _num_apart(one: str, other: str) -> tuple[int, int]:
    """Return how many characters of two texts that begin otherwise lie before what both go on with."""
    near = SequenceMatcher(None, one[:_MAX_COMPARED], other[:_MAX_COMPARED], autojunk=False)
    for index, other_index, num_same in near.get_matching_blocks():
        if num_same >= _MIN_TOGETHER:
            return index, other_index
    num_same = num_equal(one[::-1], other[::-1])
    return len(one) - num_same, len(other) - num_same


def _marked(text: str, begin: int, end: int, encoding: str) -> Text:
    before, part, after = (printable(piece, encoding) for piece in (text[:begin], text[begin:end], text[end:]))
    if not part:
        return Text(before + after)
    opening, closing = _MARKS
    return Text.assemble(before, (f"{opening}{part}{closing}", "bold red"), after)
