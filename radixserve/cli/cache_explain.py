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
    """Return two texts with the part that differs marked in each: what is between the same beginning and end."""
    begin = num_equal(one, other)
    end = num_equal(one[begin:][::-1], other[begin:][::-1])
    return _marked(one, begin, len(one) - end, encoding), _marked(other, begin, len(other) - end, encoding)


def _marked(text: str, begin: int, end: int, encoding: str) -> Text:
    before, part, after = (printable(piece, encoding) for piece in (text[:begin], text[begin:end], text[end:]))
    if not part:
        return Text(before + after)
    opening, closing = _MARKS
    return Text.assemble(before, (f"{opening}{part}{closing}", "bold red"), after)
