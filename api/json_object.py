"""Find the end of a JSON object in text that grows."""

_BLANKS = frozenset(" \t\n\r")
# Numbers, true, false, null, and what lies between values.
_OUTSIDE_STRINGS = frozenset("0123456789+-.eEtruefalsn:,") | _BLANKS


class JsonObject:
    """An object, and perhaps text after it.

    end: where the object ends, once it does. first_value_end: where the first object or list inside it ends.
    is_broken: no more text can make this JSON. It is not set for each mistake; decode the object when it has an end.
    """

    def __init__(self) -> None:
        self.text = ""
        self.end: int | None = None
        self.first_value_end: int | None = None
        self.is_broken = False
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def push(self, text: str) -> None:
        """Add text."""
        num_read = len(self.text)
        self.text += text
        for position in range(num_read, len(self.text)):
            if self.end is not None or self.is_broken:
                return
            character = self.text[position]
            if self._is_in_string:
                self._read_in_string(character)
            else:
                self._read_outside(character, position)

    def _read_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False
        elif character < " ":
            self.is_broken = True

    def _read_outside(self, character: str, position: int) -> None:
        if character == "{" or (character == "[" and self._depth):
            self._depth += 1
        elif self._depth == 0:
            self.is_broken = character not in _BLANKS
        elif character == '"':
            self._is_in_string = True
        elif character in "}]":
            self._depth -= 1
            if self._depth == 1 and self.first_value_end is None:
                self.first_value_end = position + 1
            elif self._depth == 0:
                self.end = position + 1
        elif character not in _OUTSIDE_STRINGS:
            self.is_broken = True
