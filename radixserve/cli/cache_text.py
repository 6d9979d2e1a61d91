"""Texts and times as a terminal shows them."""

import re

_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\"}
# Control characters, which could change what a terminal shows, and marks that turn or hide the text around them.
_UNSAFE = re.compile("[\\\\\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def printable(text: str, encoding: str = "utf-8") -> str:
    """Return a text on one line, in which nothing is for the terminal but what is seen."""
    escaped = _UNSAFE.sub(lambda match: _ESCAPES.get(match[0], f"\\u{ord(match[0]):04x}"), text)
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


def duration(seconds: float) -> str:
    """Return a time in its largest unit, such as 12 s, 3 min or 2 h."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
