"""Typed reading of a model's settings, each error naming the file and the field."""

from collections.abc import Mapping
from typing import Any

from radixserve.errors import ModelLoadError


class Fields:
    """The settings in one file, or in one object of it. A field that is null counts as absent.

    source: what errors call it. prefix: put before each name, as in GGUF's "llama.block_count".
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self.source = source

    def get(self, name: str) -> Any:
        """Return the field's value, or None."""
        return self._values.get(self._prefix + name)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number; without a default the field must be there."""
        value = self._require(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"is {value!r}, not a whole number")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        value = self.integer(name, default)
        if value < 1:
            raise self.error(name, f"is {value}; it must be at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number; without a default the field must be there."""
        value = self._require(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"is {value!r}, not a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self._require(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {value!r}, neither true nor false")
        return value

    def error(self, name: str, problem: str) -> ModelLoadError:
        """Return the error that says what is wrong with a field."""
        return ModelLoadError(f"{self.source}: {self._prefix}{name} {problem}")

    def _require(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value
