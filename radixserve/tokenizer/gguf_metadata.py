"""The metadata of a GGUF file.

The gguf package's reader makes a NumPy array of every token string, which takes seconds; this takes milliseconds.
Source: the GGUF specification, version 3, in the ggml repository.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from radixserve.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return all metadata of a GGUF file. Raises ModelLoadError if it is none, or ends too early."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).metadata()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped: a ValueError
        raise ModelLoadError(f"{path} cannot be read as GGUF: {error}") from error
    except (struct.error, IndexError) as error:
        raise ModelLoadError(f"{path} is truncated inside its metadata; download it again") from error


class _Reader:
    """Reads from the front; struct.error and IndexError mean that the file ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def metadata(self) -> dict[str, Any]:
        if self._data[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"it does not begin with {_MAGIC.decode()}")
        self._position = len(_MAGIC)
        (version,) = self._numbers("I", 1)
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; versions 2 and 3, little-endian, are read")
        _num_tensors, num_entries = self._numbers("Q", 2)
        return {self._string(): self._value() for _ in range(num_entries)}

    def _value(self) -> Any:
        (kind,) = self._numbers("I", 1)
        if kind == _ARRAY:
            return self._array()
        return self._string() if kind == _STRING else self._numbers(_layout(kind), 1)[0]

    def _array(self) -> list[Any]:
        (kind,) = self._numbers("I", 1)
        (length,) = self._numbers("Q", 1)
        if kind == _ARRAY:
            return [self._array() for _ in range(length)]
        if kind == _STRING:
            return [self._string() for _ in range(length)]
        return list(self._numbers(_layout(kind), length))

    def _numbers(self, layout: str, count: int) -> tuple[Any, ...]:
        numbers = struct.Struct(f"<{count}{layout}")
        values = numbers.unpack_from(self._data, self._position)
        self._position += numbers.size
        return values

    def _string(self) -> str:
        (length,) = _LENGTH.unpack_from(self._data, self._position)
        start = self._position + _LENGTH.size
        self._position = start + length
        if self._position > len(self._data):
            raise IndexError
        return self._data[start : self._position].decode("utf-8", "replace")


_LENGTH = struct.Struct("<Q")


def _layout(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"it holds a value of the unknown type {kind}")
    return _SCALARS[kind]
