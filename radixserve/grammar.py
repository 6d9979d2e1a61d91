"""Grammars that an answer has to follow, as requests carry them."""

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "lark"]


class Grammar(msgspec.Struct, frozen=True):
    """A language of texts.

    source: a JSON schema as JSON text ({} is any JSON value), a regular expression that matches the whole answer, or a
    grammar in llguidance's dialect of Lark, where <name> stands for a special token.
    """

    kind: GrammarKind
    source: str
