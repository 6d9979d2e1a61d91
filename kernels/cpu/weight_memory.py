"""Memory for weights, which are written once and read at every step."""

import mmap
from contextlib import suppress

import torch

# Of Linux on x86-64. A step of one row that read its weights from pages of 4 KiB took a third longer: what hardware
# fetches ahead ends with each of them.
_HUGE_PAGE = 2**21
_CHUNK = 2**26
_CACHE_LINE = 64


class WeightMemory:
    """Hands out memory of huge pages, where the machine has them, piece after piece.

    A piece is kept as long as its tensor; a chunk of 64 MiB goes when all of its pieces have gone. Pages that no piece
    has reached take no memory.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor on a border of a cache line."""
        tensor_size = torch.Size(shape).numel() * dtype.itemsize
        if tensor_size > self._chunk.numel() - self._used:
            self._chunk, self._used = _map(max(_CHUNK, -(-tensor_size // _HUGE_PAGE) * _HUGE_PAGE)), 0
        piece = self._chunk[self._used : self._used + tensor_size]
        self._used += -(-tensor_size // _CACHE_LINE) * _CACHE_LINE
        return piece.view(dtype).view(shape)


def _map(size: int) -> torch.Tensor:
    """Map size bytes, a multiple of huge pages that begins with one."""
    # Private: of shared memory, which is the default, huge pages are a setting of its own, and usually off.
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # of a kernel that has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE_PAGE :][:size]
