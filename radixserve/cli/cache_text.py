"""Texts as a terminal shows them."""

import re

_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\"}
# Control characters, which could change what a terminal shows, and marks that turn or hide the text around them.
_UNSAFE = re.compile("[\\\\\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def printable(text: str, encoding: str = "utf-8") -> str:
    """Return a text on one line, in which nothing is for the terminal but what is seen."""
    escaped = _UNSAFE.sub(lambda match: _ESCAPES.get(match[0], f"\\u{ord(match[0]):04x}"), text)
    return escaped.encode(encoding, "backslashreplace").decode(encoding)
