"""The segments of one build, and how they grow and go."""

from collections.abc import Iterator
from pathlib import Path

from radixserve.core.block_store import BlockBytes
from radixserve.errors import ConfigError
from radixserve.tiers.block_index import Place
from radixserve.tiers.cache_directory import CacheDirectory
from radixserve.tiers.files import Files
from radixserve.tiers.segment import Entry, Segment, SegmentShape, num_slots_within

_SEGMENT_BYTES = 256 << 20
_BUILD_BYTES = 32
_MAX_SEGMENTS = 256  # each is an open file
_MAX_SLOTS = 1 << 16  # whose table is read at once, when a server starts


class BlockFiles:
    """Segments in a directory of which this process is the only user.

    The segments of all builds together stay within capacity_bytes. Where room is needed, those of other builds go
    before a block of this one gives way, the one that was written to longest ago first. A hole in a segment counts as
    if it were written.
    Raises what CacheDirectory raises, and ConfigError if not even one block fits. All methods raise OSError. `restore`
    comes first, and a place is written to by one thread.
    """

    def __init__(self, path: Path, block_bytes: int, capacity_bytes: int, build: bytes, files: Files) -> None:
        if num_slots_within(capacity_bytes, block_bytes) < 1:
            raise ConfigError(
                f"--kv-cache-dir-size is {capacity_bytes} bytes, and one block has {block_bytes}; raise it"
            )
        if len(build) != _BUILD_BYTES:
            raise ValueError(f"a build is {_BUILD_BYTES} bytes, not {len(build)}")
        self._block_bytes = block_bytes
        self._capacity_bytes = capacity_bytes
        self._build = build
        self._files = files
        self._segment_bytes = max(_SEGMENT_BYTES, capacity_bytes // _MAX_SEGMENTS)
        self._segments: dict[int, Segment] = {}
        self._directory = CacheDirectory(path, build, files)

    def restore(self) -> Iterator[tuple[Place, Entry | None] | None]:
        """Open what is there and iterate over all its slots, one segment after another.

        For a slot that holds nothing the entry is None. None instead of a slot stands for something that is damaged
        and ignored: an entry, whose slot follows as one that holds nothing, or a whole segment, which is removed.
        What is there beyond the capacity is removed, the segments that were written to longest ago first.
        """
        num_bytes = 0
        paths = self._directory.segments()
        latest_first = sorted(paths, key=lambda number: paths[number].lstat().st_mtime_ns, reverse=True)
        for number in latest_first:
            segment = self._open(paths[number], number)
            if segment is not None and num_bytes + segment.shape.file_bytes <= self._capacity_bytes:
                num_bytes += segment.shape.file_bytes
                self._segments[number] = segment
                yield from _slots_of(segment)
                continue
            paths[number].unlink()
            if segment is None:
                yield None
            else:
                segment.close()
        self._make_room(0)

    def grow(self) -> list[Place]:
        """Add a segment and return its places; none if there is no room for one."""
        num_own_bytes = self._num_own_bytes()
        room = min(self._segment_bytes, self._capacity_bytes - num_own_bytes)
        num_slots = min(num_slots_within(room, self._block_bytes), _MAX_SLOTS)
        if num_slots == 0:
            return []
        shape = SegmentShape(self._build, self._block_bytes, num_slots)
        self._make_room(shape.file_bytes)
        number = next(number for number in range(len(self._segments) + 1) if number not in self._segments)
        self._segments[number] = Segment.create(self._directory.segment_path(number), number, shape, self._files)
        return [Place(number, slot) for slot in reversed(range(num_slots))]

    def check(self) -> None:
        """Raise FileNotFoundError if someone has deleted one of the files."""
        self._directory.check()
        for segment in self._segments.values():
            segment.check()

    def write_block(self, place: Place, block: BlockBytes) -> None:
        """Write a block, whose entry is to follow. Raises FileNotFoundError if someone has deleted its file."""
        self._segments[place.segment].write_block(place.slot, block)

    def write_entry(self, place: Place, entry: Entry) -> None:
        """Write what a place holds."""
        self._segments[place.segment].write_entry(place.slot, entry)

    def erase_entry(self, place: Place) -> None:
        """Let a place hold nothing."""
        self._segments[place.segment].erase_entry(place.slot)

    def read_block(self, place: Place, block: BlockBytes) -> bool:
        """Read a block into an array; return whether its file is that long."""
        return self._segments[place.segment].read_block(place.slot, block)

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        for segment in self._segments.values():
            segment.sync()

    def close(self) -> None:
        """Close the segments, and let another server use the directory."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._directory.close()

    def _open(self, path: Path, number: int) -> Segment | None:
        if path.is_symlink():
            return None
        return Segment.open(path, number, self._build, self._block_bytes, self._files)

    def _num_own_bytes(self) -> int:
        return sum(segment.shape.file_bytes for segment in self._segments.values())

    def _make_room(self, num_bytes: int) -> None:
        limit = self._capacity_bytes - self._num_own_bytes() - num_bytes
        while self._directory.num_other_bytes() > limit:
            self._directory.remove_other()


def _slots_of(segment: Segment) -> Iterator[tuple[Place, Entry | None] | None]:
    written = dict(segment.entries())
    for slot in reversed(range(segment.shape.num_slots)):
        entry = written.get(slot)
        if slot in written and entry is None:
            yield None
        yield Place(segment.number, slot), entry
