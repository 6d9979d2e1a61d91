"""A file of blocks.

    header    magic, version, number of the file, build, block_bytes, num_slots, checksum
    table     for each slot 72 bytes: name, digest of the block, time of its last use, checksum; zeros where none is
    blocks    from the next whole page on

A block is written before its entry, and there is no order beyond that: an entry whose checksum is wrong is none, and a
block whose digest is wrong is not given out. So a crash at any moment costs what was being written and nothing else.
The checksums of the entries begin with the header and the number of the slot, so an entry counts in its place alone.
"""

import errno
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import xxhash

from radixserve.core.block_store import NAME_BYTES, BlockBytes
from radixserve.tiers.files import Files

_MAGIC = b"RADIXKV\n"
_VERSION = 1
_PAGE = 4096
_HEADER = struct.Struct("<8sII32sQQ")
_DIGEST_BYTES = 16
_ENTRY = struct.Struct(f"<{NAME_BYTES}s{_DIGEST_BYTES}sQ")
_CHECKSUM = struct.Struct("<Q")
_ENTRY_BYTES = _ENTRY.size + _CHECKSUM.size
_PLACE = struct.Struct("<Q")


class Entry(NamedTuple):
    """What a slot holds. last_used: in the order of use; nanoseconds since 1970, if the clock has not been set back."""

    name: bytes
    digest: bytes
    last_used: int


@dataclass(slots=True, frozen=True)
class SegmentShape:
    """Of which build the blocks of a segment are, 32 bytes, and how many there are of which size."""

    build: bytes
    block_bytes: int
    num_slots: int

    @property
    def blocks_start(self) -> int:
        """Offset of the first block."""
        return _blocks_start(self.num_slots)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.blocks_start + self.num_slots * self.block_bytes


def num_slots_within(file_bytes: int, block_bytes: int) -> int:
    """Return how many blocks a segment of at most file_bytes has; 0 if not even one fits."""
    num_slots = max(file_bytes // (block_bytes + _ENTRY_BYTES), 0)
    while num_slots > 0 and _blocks_start(num_slots) + num_slots * block_bytes > file_bytes:
        num_slots -= 1
    return num_slots


def digest_of(block: BlockBytes) -> bytes:
    """Return the digest by which a block is known to be what was written; other threads run meanwhile."""
    return xxhash.xxh3_128_digest(block.data)


class Segment:
    """An open segment file. All methods raise OSError."""

    def __init__(self, path: Path, number: int, shape: SegmentShape, descriptor: int, files: Files) -> None:
        self.path = path
        self.number = number
        self.shape = shape
        self.is_written = False
        self._descriptor = descriptor
        self._files = files
        self._seal = _header(number, shape)

    @classmethod
    def create(cls, path: Path, number: int, shape: SegmentShape, files: Files) -> Self:
        """Make a segment without blocks; it takes room on the disk as blocks are written. Raises OSError."""
        descriptor = files.open(path)
        try:
            files.resize(descriptor, 0)
            files.resize(descriptor, shape.file_bytes)
            files.write_at(descriptor, memoryview(_header(number, shape)), 0)
        except BaseException:
            files.close(descriptor)
            raise
        return cls(path, number, shape, descriptor, files)

    @classmethod
    def open(cls, path: Path, number: int, build: bytes, block_bytes: int, files: Files) -> "Self | None":
        """Open a segment; None if it is none of this number, build and block size. Raises OSError."""
        descriptor = files.open(path)
        try:
            header = bytearray(_HEADER.size + _DIGEST_BYTES)
            files.read_at(descriptor, memoryview(header), 0)
            num_slots = _HEADER.unpack_from(header)[-1]
            shape = SegmentShape(build, block_bytes, num_slots)
            if header != _header(number, shape):
                files.close(descriptor)
                return None
        except BaseException:
            files.close(descriptor)
            raise
        return cls(path, number, shape, descriptor, files)

    def entries(self) -> Iterator[tuple[int, Entry | None]]:
        """Iterate over the slots that were written to; None where the entry is damaged, or its block cut off.

        A file that is too short or too long gets its size again.
        """
        size = self._files.size(self._descriptor)
        if size != self.shape.file_bytes:
            self._files.resize(self._descriptor, self.shape.file_bytes)
        table = np.zeros((self.shape.num_slots, _ENTRY_BYTES), dtype=np.uint8)
        self._files.read_at(self._descriptor, table.data.cast("B"), _table_start())
        for slot in map(int, np.flatnonzero(table.any(axis=1))):
            content = table[slot].tobytes()
            packed, checksum = content[: _ENTRY.size], content[_ENTRY.size :]
            is_whole = checksum == self._checksum(slot, packed) and self._offset(slot + 1) <= size
            yield slot, Entry(*_ENTRY.unpack(packed)) if is_whole else None

    def check(self) -> None:
        """Raise FileNotFoundError if someone has deleted the file, which takes writes all the same."""
        if self._files.is_deleted(self._descriptor):
            raise FileNotFoundError(errno.ENOENT, "deleted while the server ran", str(self.path))

    def write_block(self, slot: int, block: BlockBytes) -> None:
        """Write a block, whose entry is to follow. Raises FileNotFoundError as check does."""
        self.check()
        self.is_written = True
        self._files.write_at(self._descriptor, block.data, self._offset(slot))

    def write_entry(self, slot: int, entry: Entry) -> None:
        """Write what a slot holds."""
        self.is_written = True
        packed = _ENTRY.pack(*entry)
        content = memoryview(packed + self._checksum(slot, packed))
        self._files.write_at(self._descriptor, content, _table_start() + slot * _ENTRY_BYTES)

    def erase_entry(self, slot: int) -> None:
        """Let a slot hold nothing."""
        self.is_written = True
        self._files.write_at(self._descriptor, memoryview(bytes(_ENTRY_BYTES)), _table_start() + slot * _ENTRY_BYTES)

    def read_block(self, slot: int, block: BlockBytes) -> bool:
        """Read a block into an array; return whether the file is that long."""
        return self._files.read_at(self._descriptor, block.data, self._offset(slot)) == len(block)

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        if self.is_written:
            self._files.sync(self._descriptor)
            self.is_written = False

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._descriptor)

    def _offset(self, slot: int) -> int:
        return self.shape.blocks_start + slot * self.shape.block_bytes

    def _checksum(self, slot: int, packed: bytes) -> bytes:
        return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(self._seal + _PLACE.pack(slot) + packed))


def _header(number: int, shape: SegmentShape) -> bytes:
    content = _HEADER.pack(_MAGIC, _VERSION, number, shape.build, shape.block_bytes, shape.num_slots)
    return content + xxhash.xxh3_128_digest(content)


def _table_start() -> int:
    return _HEADER.size + _DIGEST_BYTES


def _blocks_start(num_slots: int) -> int:
    end = _table_start() + num_slots * _ENTRY_BYTES
    return -(-end // _PAGE) * _PAGE
