"""Batches for who has missed them: the latest as they were, those before as one that says what they came to."""

import threading
import time
from array import array
from collections import deque

import msgspec

from radixserve.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch

_decode = msgspec.msgpack.Decoder(EventBatch).decode


class ReplayBuffer:
    """Keeps the last max_batches batches, and which blocks all those before had stored.

    One thread adds, and never waits; another one may read. Numbers are 8 big-endian bytes, and count up.
    """

    def __init__(self, max_batches: int) -> None:
        self._max_batches = max_batches
        self._batches: deque[tuple[bytes, bytes]] = deque()
        # Of what lies before those: the last number, and what was stored then.
        self._number_before: bytes | None = None
        self._stored_before = _StoredBlocks()
        self._lock = threading.Lock()

    def add(self, number: bytes, payload: bytes) -> None:
        """Take in the next batch, as it was published."""
        self._batches.append((number, payload))
        # While the other thread looks at what lies before, nothing is put there: the next batch makes up for it.
        if len(self._batches) > self._max_batches and self._lock.acquire(blocking=False):
            try:
                while len(self._batches) > self._max_batches:
                    self._number_before, payload = self._batches.popleft()
                    self._stored_before.add(payload)
            finally:
                self._lock.release()

    def batches_from(self, start: bytes) -> list[tuple[bytes, bytes]]:
        """Return the batches from a number on, in order.

        If some of them are not kept, the first one stands for all before the others: it has the number of the last one
        that is not, and clears whatever its reader knew.
        """
        with self._lock:
            # Copied at once, though the other thread may add to it.
            batches = self._batches.copy()
            first = []
            if self._number_before is not None and start <= self._number_before:
                batch = EventBatch(time.time(), self._stored_before.events())
                first = [(self._number_before, msgspec.msgpack.encode(batch))]
        # Of equal length and big-endian, numbers compare as their bytes do.
        return first + [(number, payload) for number, payload in batches if number >= start]


class _StoredBlocks:
    """The blocks that are stored after some batches."""

    def __init__(self) -> None:
        # By its name, the block's parent and token ids. In the order in which they were stored, so parents come first.
        self._blocks: dict[bytes, tuple[bytes | None, array[int]]] = {}
        self._block_size = 0
        self._medium: str | None = None

    def add(self, payload: bytes) -> None:
        """Take in the next batch."""
        for event in _decode(payload).events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved(names, _):
                    for name in names:
                        del self._blocks[name]
                case AllBlocksCleared():
                    self._blocks.clear()

    def events(self) -> list[Event]:
        """Return events after which exactly these blocks are stored, whatever was before."""
        runs: list[tuple[bytes | None, list[bytes], array[int]]] = []
        for name, (parent, token_ids) in self._blocks.items():
            if runs and runs[-1][1][-1] == parent:
                runs[-1][1].append(name)
                runs[-1][2].extend(token_ids)
            else:
                runs.append((parent, [name], token_ids[:]))
        stored = [
            BlockStored(names, parent, token_ids.tolist(), self._block_size, None, self._medium)
            for parent, names, token_ids in runs
        ]
        return [AllBlocksCleared(), *stored]

    def _store(self, event: BlockStored) -> None:
        size = self._block_size = event.block_size
        self._medium = event.medium
        parent = event.parent_block_hash
        for index, name in enumerate(event.block_hashes):
            self._blocks[name] = (parent, array("i", event.token_ids[index * size : (index + 1) * size]))
            parent = name
