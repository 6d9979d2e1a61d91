"""Read GGUF files.

The header is parsed here: the gguf package's reader makes a NumPy array of every token string, which takes seconds.
Its table of tensor types and its dequantisers are used.
Source: the GGUF specification, version 3, in the ggml repository.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from radixserve.errors import ModelLoadError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(slots=True, frozen=True)
class GGUFTensor:
    """Where a tensor lies. shape: outermost axis first, as in torch. offset: bytes from the start of the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GGUFFile:
    """A memory-mapped GGUF file.

    metadata: every scalar and string, and arrays of numbers; arrays of strings are the tokenizer's and left out.
    Raises ModelLoadError if the file is no GGUF, of an unknown version, or shorter than its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            # Private and writable, since torch warns about read-only memory; the file itself is never changed.
            self._bytes = np.memmap(path, dtype=np.uint8, mode="c")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        self._read_header(_HeaderReader(path, self._bytes))

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor in float32, in its shape.

        Raises ModelLoadError if no dequantiser knows its type.
        """
        tensor = self.tensors[name]
        data = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        # Row by row, as the quantised blocks never cross a row.
        rows = data.reshape(math.prod(tensor.shape[:-1]), -1)
        try:
            return dequantize(rows, tensor.type).reshape(tensor.shape)
        except NotImplementedError as error:
            raise ModelLoadError(f"{self.path}: {name} has type {tensor.type.name}, which cannot be read") from error

    def _read_header(self, reader: "_HeaderReader") -> None:
        if reader.take(4) != MAGIC:
            raise ModelLoadError(f"{self.path} is no GGUF file: it does not begin with {MAGIC.decode()}")
        version = reader.scalar("<I")
        if version not in VERSIONS:
            raise ModelLoadError(f"{self.path} has GGUF version {version}; versions 2 and 3, little-endian, are read")
        num_tensors, num_fields = reader.scalar("<Q"), reader.scalar("<Q")
        for _ in range(num_fields):
            key = reader.string()
            value = reader.value(reader.scalar("<I"))
            if value is not None:
                self.metadata[key] = value
        tensors = [reader.tensor() for _ in range(num_tensors)]

        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelLoadError(f"{self.path}: general.alignment is {alignment!r}, no number of bytes")
        start = -(-reader.position // alignment) * alignment
        for name, tensor_type, shape, relative_offset in tensors:
            self.tensors[name] = self._place(name, tensor_type, shape, start + relative_offset)

    def _place(self, name: str, tensor_type: int, shape: tuple[int, ...], offset: int) -> GGUFTensor:
        try:
            known_type = GGMLQuantizationType(tensor_type)
        except ValueError as error:
            raise ModelLoadError(f"{self.path}: {name} has the unknown type {tensor_type}") from error
        block_size, block_bytes = GGML_QUANT_SIZES[known_type]
        if not shape or min(shape) < 1 or shape[-1] % block_size:
            raise ModelLoadError(f"{self.path}: {name} has the impossible shape {shape} for type {known_type.name}")
        num_bytes = math.prod(shape) // block_size * block_bytes
        if offset + num_bytes > self._bytes.size:
            raise ModelLoadError(
                f"{self.path} is truncated: {name} ends at byte {offset + num_bytes}, the file at "
                f"{self._bytes.size}; download it again"
            )
        return GGUFTensor(name, known_type, shape, offset, num_bytes)


class _HeaderReader:
    """Walks through the header. Raises ModelLoadError where it would read past the end of the file."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self.position = 0
        self._path = path
        self._data = data.data

    def take(self, num_bytes: int) -> bytes:
        start = self._advance(num_bytes)
        return self._data[start : start + num_bytes].tobytes()

    def scalar(self, layout: str) -> Any:
        return struct.unpack_from(layout, self._data, self._advance(struct.calcsize(layout)))[0]

    def string(self) -> str:
        return self.take(self.scalar("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """Return a metadata value, or None for an array of strings."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(self._layout(kind))
        item_kind, length = self.scalar("<I"), self.scalar("<Q")
        if item_kind == _STRING:
            return self._skip_strings(length)
        if item_kind == _ARRAY:
            return [self.value(_ARRAY) for _ in range(length)]
        layout = self._layout(item_kind)
        data = self.take(length * struct.calcsize(layout))
        return [item for (item,) in struct.iter_unpack(layout, data)]

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Return name, type, shape with the outermost axis first, and the offset from the start of the data."""
        name = self.string()
        num_axes = self.scalar("<I")
        shape = tuple(reversed([self.scalar("<Q") for _ in range(num_axes)]))
        return name, self.scalar("<I"), shape, self.scalar("<Q")

    def _skip_strings(self, count: int) -> None:
        unpack_length = struct.Struct("<Q").unpack_from
        position, end = self.position, len(self._data) - 8
        for _ in range(count):
            if position > end:
                break
            position += 8 + unpack_length(self._data, position)[0]
        self._advance(position - self.position)

    def _layout(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self._path} is damaged: byte {self.position} follows the unknown type {kind}")
        return _SCALARS[kind]

    def _advance(self, num_bytes: int) -> int:
        """Move on and return where this began."""
        start, end = self.position, self.position + num_bytes
        if end > len(self._data):
            raise ModelLoadError(
                f"{self._path} is truncated: its header reaches byte {end}, the file ends at {len(self._data)}; "
                "download it again"
            )
        self.position = end
        return start
