"""The header of a GGUF file: its metadata, and where its tensors lie.

The gguf package's reader makes a NumPy array of every token string, which takes seconds; this takes milliseconds.
Source: the GGUF specification, version 3, in the ggml repository.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixserve.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")


@dataclass(slots=True, frozen=True)
class GGUFTensor:
    """A tensor's place. shape: outermost axis first, as in torch. type: ggml's number. offset: bytes into the file."""

    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(slots=True, frozen=True)
class GGUFHeader:
    """All metadata and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read the header of a GGUF file.

    Raises ModelLoadError if the file is none, of an unknown version, or ends inside its header. Nothing is said of the
    tensors' own bytes: the file may end before them.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except (struct.error, IndexError, RecursionError) as error:
        raise ModelLoadError(f"{path} is truncated inside its header; download it again") from error
    except (OSError, ValueError, OverflowError) as error:  # an empty file cannot be mapped: a ValueError
        raise ModelLoadError(f"{path} cannot be read as GGUF: {error}") from error


class _Reader:
    """Reads from the front; struct.error and IndexError mean that the file ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def header(self) -> GGUFHeader:
        if self._data[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"it does not begin with {_MAGIC.decode()}")
        self._position = len(_MAGIC)
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; versions 2 and 3, little-endian, are read")
        num_tensors, num_entries = self._numbers("Q", 2)
        metadata = {self._string(): self._value() for _ in range(num_entries)}
        tensors = [self._tensor() for _ in range(num_tensors)]

        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its general.alignment is {alignment!r}, no number of bytes")
        start = -(-self._position // alignment) * alignment
        return GGUFHeader(metadata, {name: GGUFTensor(shape, kind, start + at) for name, shape, kind, at in tensors})

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, type, and the offset from the start of all tensors."""
        name = self._string()
        innermost_first = self._numbers("Q", self._number("I"))
        return name, innermost_first[::-1], self._number("I"), self._number("Q")

    def _value(self) -> Any:
        kind = self._number("I")
        if kind == _ARRAY:
            return self._array()
        return self._string() if kind == _STRING else self._number(_layout(kind))

    def _array(self) -> list[Any]:
        kind, length = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            return [self._array() for _ in range(length)]
        if kind == _STRING:
            return [self._string() for _ in range(length)]
        return list(self._numbers(_layout(kind), length))

    def _number(self, layout: str) -> Any:
        return self._numbers(layout, 1)[0]

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


def _layout(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"it holds a value of the unknown type {kind}")
    return _SCALARS[kind]
