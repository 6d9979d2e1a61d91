"""Read the tensors of GGUF files."""

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from radixserve.errors import ModelLoadError
from radixserve.gguf_header import GGUFTensor, read_gguf_header


class GGUFFile:
    """A memory-mapped GGUF file.

    Raises ModelLoadError if the file is no GGUF, holds a tensor of an unknown type, or is shorter than its header says.
    """

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        self.path = path
        self.metadata = header.metadata
        self.tensors = header.tensors
        # Private and writable, since torch warns about read-only memory; the file itself is never changed.
        # A plain view, as slices of a memmap are slow to make, and a dequantiser makes thousands.
        self._bytes = np.memmap(path, dtype=np.uint8, mode="c").view(np.ndarray)
        for name, tensor in self.tensors.items():
            self._check(name, tensor)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor in float32, in its shape. Raises ModelLoadError if no dequantiser knows its type."""
        tensor = self.tensors[name]
        data = self._bytes[tensor.offset : tensor.offset + _num_bytes(tensor)]
        # Row by row, as the quantised blocks never cross a row.
        rows = data.reshape(math.prod(tensor.shape[:-1]), -1)
        kind = GGMLQuantizationType(tensor.type)
        try:
            return dequantize(rows, kind).reshape(tensor.shape)
        except NotImplementedError as error:
            raise ModelLoadError(f"{self.path}: {name} has type {kind.name}, which cannot be read") from error

    def _check(self, name: str, tensor: GGUFTensor) -> None:
        if tensor.type not in GGML_QUANT_SIZES:
            raise ModelLoadError(f"{self.path}: {name} has the unknown type {tensor.type}")
        kind = GGMLQuantizationType(tensor.type)
        if not tensor.shape or min(tensor.shape) < 1 or tensor.shape[-1] % GGML_QUANT_SIZES[kind][0]:
            raise ModelLoadError(f"{self.path}: {name} has the impossible shape {tensor.shape} for type {kind.name}")
        end = tensor.offset + _num_bytes(tensor)
        if end > self._bytes.size:
            raise ModelLoadError(
                f"{self.path} is truncated: {name} ends at byte {end}, the file at {self._bytes.size}; "
                "download it again"
            )


def _num_bytes(tensor: GGUFTensor) -> int:
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
    return math.prod(tensor.shape) // block_size * block_bytes
