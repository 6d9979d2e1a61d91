"""A diagnosis in the terminal: the verdict, and both texts with what differs between them marked."""

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from radixserve.cli.cache_text import printable
from radixserve.diagnosis.common_prefix import num_equal
from radixserve.diagnosis.report import Diagnosis, Divergence

# What differs stands between these, as colours alone are lost in a file, and to many eyes.
_MARKS = ("[[", "]]")
# So many equal characters are no chance: there the two go on alike, although one may end before the other.
_MIN_ALIKE = 8


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
    """Return two texts with the first part that differs marked in each, up to where both go on alike."""
    begin = num_equal(one, other)
    size, other_size = _sizes_of_difference(one[begin:], other[begin:])
    return _marked(one, begin, begin + size, encoding), _marked(other, begin, begin + other_size, encoding)


def _sizes_of_difference(one: str, other: str) -> tuple[int, int]:
    """Return how many characters of each come before they are the same again, for a while or to their ends."""
    # Backwards, so that the first of several places stays.
    places = {one[index : index + _MIN_ALIKE]: index for index in range(len(one) - _MIN_ALIKE, -1, -1)}
    runs = [other[index : index + _MIN_ALIKE] for index in range(len(other) - _MIN_ALIKE + 1)]
    num_last = num_equal(one[::-1], other[::-1])
    alike = [(places[run], index) for index, run in enumerate(runs) if run in places]
    return min([*alike, (len(one) - num_last, len(other) - num_last)], key=sum)


def _marked(text: str, begin: int, end: int, encoding: str) -> Text:
    before, part, after = (printable(piece, encoding) for piece in (text[:begin], text[begin:end], text[end:]))
    if not part:
        return Text(before + after)
    opening, closing = _MARKS
    return Text.assemble(before, (f"{opening}{part}{closing}", "bold red"), after)
