"""Lines typed into a terminal, or piped in."""

import io

import pytest


class Keyboard(io.StringIO):
    """A stdin that says whether it is a terminal."""

    def __init__(self, lines: str, *, is_terminal: bool) -> None:
        super().__init__(lines)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def type_in(monkeypatch: pytest.MonkeyPatch, lines: str, *, is_terminal: bool = True) -> Keyboard:
    """Make lines the stdin. On a terminal the line ^C is the key, and the end of the lines is Ctrl-D."""
    keyboard = Keyboard(lines, is_terminal=is_terminal)

    def read_keys(_: str) -> str:
        line = keyboard.readline()
        if not line:
            raise EOFError
        if line == "^C\n":
            raise KeyboardInterrupt
        return line.removesuffix("\n")

    monkeypatch.setattr("sys.stdin", keyboard)
    monkeypatch.setattr("builtins.input", read_keys)
    return keyboard
