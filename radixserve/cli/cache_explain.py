"""A diagnosis in the terminal: the verdict, and both texts with what differs between them marked."""

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from radixserve.diagnosis.common_prefix import num_equal
from radixserve.diagnosis.report import Diagnosis, Divergence

# Where there are no colours, what differs stands between these.
_MARKS = ("[[", "]]")


def explain_view(diagnosis: Diagnosis) -> Group:
    """Return what to print of a diagnosis."""
    verdict = Text(_visible(diagnosis.verdict), style="green" if diagnosis.is_expected else "yellow")
    parts: list[Text | Padding] = [verdict]
    if isinstance(diagnosis.divergence, Divergence):
        parts += _divergence_view(diagnosis.divergence)
    return Group(*parts)


def _divergence_view(divergence: Divergence) -> list[Text | Padding]:
    cached, prompt = marked(divergence.cached_text, divergence.prompt_text)
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("cached", style="bold"), cached)
    table.add_row(Text("prompt", style="bold"), prompt)
    advice = Text(_visible(f"{divergence.pattern.replace('_', ' ')}: {divergence.advice}"))
    return [Padding(table, (1, 0, 1, 2)), advice]


def marked(one: str, other: str) -> tuple[Text, Text]:
    """Return two texts with the part that differs marked in each: what is between the same beginning and end."""
    begin = num_equal(one, other)
    end = num_equal(one[begin:][::-1], other[begin:][::-1])
    return _marked(one, begin, len(one) - end), _marked(other, begin, len(other) - end)


def _marked(text: str, begin: int, end: int) -> Text:
    if begin == end:
        return Text(_visible(text))
    opening, closing = _MARKS
    return Text.assemble(
        _visible(text[:begin]),
        (f"{opening}{_visible(text[begin:end])}{closing}", "bold red"),
        _visible(text[end:]),
    )


def _visible(text: str) -> str:
    """Return a text of one line, with nothing in it that steers a terminal."""
    return "".join(
        character if character.isprintable() else "\u21b5" if character == "\n" else "\ufffd" for character in text
    )
