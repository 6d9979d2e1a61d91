"""Which slot of which segment holds which block."""

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from radixserve.tiers.segment import Entry


class Place(NamedTuple):
    """A slot of a segment."""

    segment: int
    slot: int


class BlockIndex:
    """Names with their entries and places, and the order in which they give way: the least recently used first.

    What an earlier server has left, and this one has not used yet, is older than everything else.
    """

    def __init__(self) -> None:
        self._used: OrderedDict[bytes, tuple[Place, Entry]] = OrderedDict()  # by this server, the oldest first
        self._restored: dict[bytes, tuple[Place, Entry]] = {}
        self._restored_order: Iterator[bytes] = iter(())
        self._free: list[Place] = []
        self._touched: set[bytes] = set()
        self._latest_use = 0

    def __len__(self) -> int:
        return len(self._used) + len(self._restored)

    def __contains__(self, name: bytes) -> bool:
        # Called without a lock beside `touch`, so a name must be in one of the two at every moment.
        return name in self._used or name in self._restored or name in self._used

    def find(self, name: bytes) -> tuple[Place, Entry] | None:
        """Return where a block is and its entry; None if it is not here."""
        return self._used.get(name) or self._restored.get(name)

    def new_use(self) -> int:
        """Return the time, later than any before it, those of earlier servers too."""
        self._latest_use = max(time.time_ns(), self._latest_use + 1)
        return self._latest_use

    def touch(self, name: bytes) -> bool:
        """Let a block be the most recently used one; return whether it is here."""
        found = self.find(name)
        if found is None:
            return False
        place, entry = found
        self._used[name] = (place, entry._replace(last_used=self.new_use()))
        self._used.move_to_end(name)
        self._restored.pop(name, None)
        self._touched.add(name)
        return True

    def put(self, place: Place, entry: Entry) -> None:
        """Let a taken place hold a block that was written now."""
        self._used[entry.name] = (place, entry)

    def restore(self, place: Place, entry: Entry) -> None:
        """Let a place hold a block that an earlier server has written; of two of one name the later one stays."""
        self._latest_use = max(self._latest_use, entry.last_used)
        found = self.find(entry.name)
        if found is not None and found[1].last_used >= entry.last_used:
            self._free.append(place)
            return
        if found is not None:
            self.forget(entry.name)
        self._restored[entry.name] = (place, entry)

    def restored(self) -> list[Entry]:
        """Return the entries that were restored and not used since."""
        return [entry for _, entry in self._restored.values()]

    def set_restored_order(self, names: Iterator[bytes]) -> None:
        """Set the order in which restored blocks give way; a name that has been used meanwhile is passed over."""
        self._restored_order = names

    def free(self, place: Place) -> None:
        """Let a place hold nothing."""
        self._free.append(place)

    def forget(self, name: bytes) -> None:
        """Let the place of a block, which must be here, hold nothing."""
        self._free.append(self._remove(name))

    def remove_all(self, beginning: bytes) -> list[Place]:
        """Let go of all blocks whose names begin so, and return their places, which are not free yet."""
        names = [name for held in (self._used, self._restored) for name in held if name.startswith(beginning)]
        return [self._remove(name) for name in names]

    @property
    def has_free(self) -> bool:
        """Whether a place holds nothing."""
        return bool(self._free)

    def take(self, kept: Place | None) -> Place | None:
        """Return a place for another block: one that holds nothing, or that of the least recently used one.

        kept: the place that must not be taken, as it is being read. None if there is no other.
        """
        if self._free:
            return self._free.pop()
        for name in self._restored_order:
            found = self._restored.get(name)
            if found is None:
                continue
            if found[0] != kept:
                return self._remove(name)
            self.touch(name)
        for name, (place, _) in self._used.items():
            if place != kept:
                return self._remove(name)
        return None

    def take_touched(self) -> list[tuple[Place, Entry]]:
        """Return what was used, and not written, since the last call."""
        touched, self._touched = self._touched, set()
        return [self._used[name] for name in touched]

    def _remove(self, name: bytes) -> Place:
        self._touched.discard(name)
        held_by = self._used if name in self._used else self._restored
        return held_by.pop(name)[0]
