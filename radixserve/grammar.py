"""Grammars that an answer has to follow, as requests carry them."""

from typing import Final, Literal, TypedDict

import msgspec

GrammarKind = Literal["json_schema", "regex", "lark"]


class JsonStyle(TypedDict):
    """How JSON is laid out, where a grammar leaves that open: llguidance's options of the same names."""

    whitespace_flexible: bool
    item_separator: str
    key_separator: str


# Blanks only behind a comma or a colon, and one at most: a weak model that is let put more of them never ends.
JSON_STYLE: Final[JsonStyle] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class Grammar(msgspec.Struct, frozen=True):
    """A language of texts.

    source: a JSON schema as JSON text ({} is any JSON value), a regular expression that matches the whole answer, or a
    grammar in llguidance's dialect of Lark, where <name> stands for a special token. JSON is laid out as in JSON_STYLE;
    a schema inside a Lark grammar, %json {...}, says so by "x-guidance": JSON_STYLE.
    """

    kind: GrammarKind
    source: str
