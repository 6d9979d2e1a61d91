"""Blocks on a disk, across restarts."""

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from radixserve.core.block_store import BlockBytes, ReadDone, check_blocks
from radixserve.protocol import TierStats
from radixserve.tiers.block_files import BlockFiles
from radixserve.tiers.block_index import BlockIndex, Place
from radixserve.tiers.files import Files
from radixserve.tiers.read_rate import ReadRate
from radixserve.tiers.segment import Entry, digest_of

_log = logging.getLogger(__name__)

_MAX_QUEUE_BYTES = 256 << 20
_RESTORED_AT_ONCE = 256  # slots that the index takes in under one lock
_MAX_WAIT_FOR_READS = 0.05
_SECONDS_UNTIL_CHECK = 1.0  # whether the files are still there, when nothing is written


class DiskStore:
    """A BlockStore in a directory, which no other process uses meanwhile; the least recently used block gives way.

    What an earlier server of the same build has left is found as soon as its segment's table has been read, which
    happens in the background; a block itself is read, and held to its digest, when it is asked for. Reads have a thread
    of their own, and a write lets reads that are waiting go first, for at most 0.05 s.
    What was written outlives a kill at once, and a loss of power after `close`: nothing is synced before, as a block
    that is lost costs its computation and no more.
    When a write fails, or the files are deleted, the store is off: it takes no blocks any more, and still gives back
    what it has. When a read fails, it gives back nothing any more, either. One warning says so.
    Where a block is damaged, those asked for behind it are not trusted, and count as not there: no prompt finds them
    without it, and damage seldom comes alone. So what is computed instead is written again.

    build: SHA-256 of what the blocks' bytes depend on beside their names' tokens; see identity.py.
    max_queue_bytes: of blocks that wait to be written, and of blocks asked for and not fetched, each.
    Raises ConfigError as BlockFiles does. A directory that cannot be made or written leaves the store off.
    """

    def __init__(
        self,
        directory: Path,
        block_bytes: int,
        capacity_bytes: int,
        build: bytes,
        *,
        files: Files | None = None,
        max_queue_bytes: int = _MAX_QUEUE_BYTES,
    ) -> None:
        self._directory = directory
        self._block_bytes = block_bytes
        self._capacity_bytes = capacity_bytes
        self._max_queued = max(max_queue_bytes // block_bytes, 1)
        # Held for a few operations at a time, never during input or output; all that follows is changed under it.
        self._state = threading.Condition()
        self._index = BlockIndex()
        self._writes: OrderedDict[bytes, BlockBytes] = OrderedDict()  # the first one is being written
        self._reads: deque[tuple[int, list[bytes]]] = deque()  # the first one is being read
        self._erasures: list[Place] = []  # of blocks that were forgotten
        self._forgotten: list[bytes] = []  # owners, while what an earlier server has left is being restored
        self._done: list[ReadDone] = []
        self._num_pending_reads = 0
        self._place_read: Place | None = None
        self._rate = ReadRate()
        self._num_hits = 0
        self._num_written = 0
        self._num_read = 0
        self._num_dropped = 0
        self._num_failed = 0
        self._is_on = True
        self._is_readable = True
        self._is_restoring = True
        self._deadline: float | None = None  # of closing, by time.monotonic
        self._threads: list[threading.Thread] = []
        try:
            self._files = BlockFiles(directory, block_bytes, capacity_bytes, build, files or Files())
        except OSError as error:
            self._turn_off(error)
            return
        self._threads = [
            threading.Thread(target=self._run, args=[work], name=f"kv-disk-{name}", daemon=True)
            for name, work in (("writer", self._write_all), ("reader", self._read_all))
        ]
        self._num_running = len(self._threads)
        for thread in self._threads:
            thread.start()

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def num_pending_writes(self) -> int:
        return len(self._writes)

    @property
    def num_pending_reads(self) -> int:
        return self._num_pending_reads

    @property
    def seconds_per_block(self) -> float | None:
        return self._rate.seconds_per_block

    def contains(self, name: bytes) -> bool:
        # A block leaves the queue after it has entered the index, so one of the two has it.
        return self._deadline is None and self._is_readable and (name in self._writes or name in self._index)

    def has_room(self, num_blocks: int) -> bool:
        return self._takes_blocks and len(self._writes) + num_blocks <= self._max_queued

    def write(self, names: Sequence[bytes], blocks: BlockBytes) -> None:
        check_blocks(names, blocks, self._block_bytes)
        with self._state:
            if not self._takes_blocks:
                self._num_dropped += len(names)
                return
            for name, block in zip(names, blocks, strict=True):
                if name in self._writes or self._index.touch(name):
                    continue
                if len(self._writes) < self._max_queued:
                    self._writes[name] = block
                else:
                    self._num_dropped += 1
            self._state.notify_all()

    def read(self, ticket: int, names: Sequence[bytes]) -> None:
        with self._state:
            taken = list(names[: max(self._max_queued - self._num_pending_reads, 0)])
            if not taken or not self._threads or self._deadline is not None:
                self._done.append(ReadDone(ticket, self._new_blocks(0)))
                return
            for name in reversed(taken):
                self._index.touch(name)
            self._reads.append((ticket, taken))
            self._num_pending_reads += len(taken)
            self._state.notify_all()

    def completed(self) -> list[ReadDone]:
        if not self._done:
            return []
        with self._state:
            done, self._done = self._done, []
            self._num_pending_reads -= sum(len(read.blocks) for read in done)
        return done

    def forget(self, owner: bytes) -> None:
        with self._state:
            for name in [name for name in self._writes if name.startswith(owner)]:
                del self._writes[name]
            self._erasures += self._index.remove_all(owner)
            if self._is_restoring:
                self._forgotten.append(owner)
            self._state.notify_all()

    def stats(self) -> TierStats:
        with self._state:
            num_blocks = len(self._index) if self._is_readable else 0
            return TierStats(
                name="disk",
                capacity_bytes=self._capacity_bytes,
                used_bytes=num_blocks * self._block_bytes,
                num_blocks=num_blocks,
                num_hit_blocks=self._num_hits,
                num_written_blocks=self._num_written,
                num_read_blocks=self._num_read,
                num_dropped_blocks=self._num_dropped,
                num_failed_blocks=self._num_failed,
                is_on=self._takes_blocks,
            )

    def stats_of_stores(self) -> list[TierStats]:
        return [self.stats()]

    def wait_idle(self, timeout: float) -> bool:
        """Wait until all that was there is found and all that was queued is done; return whether it was in time."""
        with self._state:
            return self._state.wait_for(
                lambda: not (self._is_restoring or self._writes or self._reads or self._erasures), timeout=timeout
            )

    def close(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._state:
            if self._deadline is not None:
                return
            self._deadline = deadline
            self._state.notify_all()
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    @property
    def _takes_blocks(self) -> bool:
        return self._is_on and self._deadline is None

    @property
    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _run(self, work: Callable[[], None]) -> None:
        """Work until the store is closed, or a disk that fails; the last thread to end closes the files."""
        try:
            work()
        except Exception as error:  # of any kind: a store without its threads must not say that it is on
            self._turn_off(error)
        with self._state:
            self._num_running -= 1
            is_last = self._num_running == 0
        if is_last:
            with contextlib.suppress(OSError):  # what could not be written has been told of by sync
                self._files.close()

    def _write_all(self) -> None:
        self._restore()
        while self._wait_for_writes():
            self._erase()
            if (queued := self._next_write()) is not None:
                self._write_block(*queued)
            else:
                self._files.check()
        self._write_last_uses()
        if not self._is_late:
            self._files.sync()

    def _restore(self) -> None:
        num_damaged = 0
        batch: list[tuple[Place, Entry | None]] = []
        for found in self._files.restore():
            if found is None:
                num_damaged += 1
                continue
            batch.append(found)
            if len(batch) == _RESTORED_AT_ONCE:
                self._take_in(batch)
                batch = []
            if not self._is_on or self._is_late:
                return
        self._take_in(batch)
        with self._state:
            restored = self._index.restored()
        restored.sort(key=lambda entry: entry.last_used)
        with self._state:
            self._index.set_restored_order(entry.name for entry in restored)
            self._num_failed += num_damaged
            self._is_restoring = False
            self._forgotten.clear()
            self._state.notify_all()
        if num_damaged > 0:
            _log.warning("%s: %d blocks or files are damaged and ignored", self._directory, num_damaged)

    def _take_in(self, batch: list[tuple[Place, Entry | None]]) -> None:
        with self._state:
            for place, entry in batch:
                if entry is None:
                    self._index.free(place)
                elif entry.name.startswith(tuple(self._forgotten)):
                    self._erasures.append(place)
                else:
                    self._index.restore(place, entry)

    def _wait_for_writes(self) -> bool:
        """Wait for a block to write or to erase, or a second, and for reads to go first; False: the store is closed."""
        with self._state:
            self._state.wait_for(
                lambda: self._writes or self._erasures or self._deadline is not None, timeout=_SECONDS_UNTIL_CHECK
            )
            self._state.wait_for(lambda: not self._reads or self._deadline is not None, timeout=_MAX_WAIT_FOR_READS)
            # What was waited for may be forgotten by now; then there will be more.
            return self._deadline is None or (not self._is_late and bool(self._writes or self._erasures))

    def _erase(self) -> None:
        """Let no later server find what was forgotten, and then let its places hold other blocks."""
        with self._state:
            places = self._erasures[:]
        for place in places:
            self._files.erase_entry(place)
        with self._state:
            del self._erasures[: len(places)]
            for place in places:
                self._index.free(place)
            self._state.notify_all()

    def _next_write(self) -> tuple[bytes, BlockBytes] | None:
        with self._state:
            return next(iter(self._writes.items()), None)

    def _write_block(self, name: bytes, block: BlockBytes) -> None:
        with self._state:
            is_there = self._index.touch(name)
            has_free = self._index.has_free
        if is_there:  # restored since it was queued
            self._end_write(name)
            return
        added = [] if has_free else self._files.grow()
        with self._state:
            for free in added:
                self._index.free(free)
            place = self._index.take(self._place_read)
            used = self._index.new_use()
        if place is None:
            with self._state:
                self._num_dropped += 1
            self._end_write(name)
            return
        entry = Entry(name, digest_of(block), used)
        self._files.write_block(place, block)
        self._files.write_entry(place, entry)
        with self._state:
            if name in self._writes:
                self._index.put(place, entry)
                self._num_written += 1
            else:  # forgotten meanwhile, or the store is off
                self._erasures.append(place)
        self._end_write(name)

    def _end_write(self, name: bytes) -> None:
        with self._state:
            self._writes.pop(name, None)  # it is gone if the store has been turned off
            self._state.notify_all()

    def _write_last_uses(self) -> None:
        """Let the next server know what was used last. A block's own bytes are not written for it."""
        with self._state:
            touched = self._index.take_touched()
        for place, entry in touched:
            if self._is_late:
                break
            self._files.write_entry(place, entry)

    def _read_all(self) -> None:
        while (queued := self._next_read()) is not None:
            ticket, names = queued
            blocks, num_found = self._new_blocks(0), 0
            try:
                blocks = self._new_blocks(len(names))
                while num_found < len(names) and self._read_block(names, num_found, blocks[num_found]):
                    num_found += 1
            except Exception as error:  # of any kind: somebody waits for the end of this read
                self._is_readable = False
                self._turn_off(error)
            with self._state:
                self._reads.popleft()
                self._done.append(ReadDone(ticket, blocks[:num_found]))
                self._num_pending_reads -= len(names) - num_found
                self._num_hits += num_found
                self._state.notify_all()

    def _next_read(self) -> tuple[int, list[bytes]] | None:
        """Wait for a read; None when the store is closed."""
        with self._state:
            self._state.wait_for(lambda: self._reads or self._deadline is not None)
            return None if self._deadline is not None else self._reads[0]

    def _read_block(self, names: list[bytes], index: int, block: BlockBytes) -> bool:
        """Read the block of a name into an array; return whether it is there and what was written.

        If it is not what was written, it and those of the names behind are forgotten.
        """
        name = names[index]
        with self._state:
            queued = self._writes.get(name)
            found = self._index.find(name)
            if not self._is_readable or (queued is None and found is None):
                return False
            self._place_read = found[0] if found is not None else None
        if queued is not None:
            block[:] = queued
            return True
        assert found is not None
        place, entry = found
        started = time.perf_counter()
        is_right = self._files.read_block(place, block) and digest_of(block) == entry.digest
        seconds = time.perf_counter() - started
        with self._state:
            self._place_read = None
            still_found = self._index.find(name)
            if still_found is None or still_found[0] != place:
                return False  # forgotten meanwhile, and its place perhaps given to another block
            if is_right:
                self._num_read += 1
                self._rate.record(1, seconds)
                return True
            for lost in names[index:]:
                if lost in self._index:
                    self._index.forget(lost)
            self._num_failed += 1
            is_first = self._num_failed == 1
        if is_first:
            _log.warning("%s: a block is damaged and ignored; further ones are only counted", self._directory)
        return False

    def _turn_off(self, error: Exception) -> None:
        """Take no more blocks; warn of it once."""
        with self._state:
            was_on, self._is_on = self._is_on, False
            self._is_restoring = False
            self._num_dropped += len(self._writes)
            self._writes.clear()
            self._state.notify_all()
        if was_on:
            unexpected = None if isinstance(error, OSError) else error
            reason = repr(error) if unexpected else error
            _log.warning("the K/V cache's disk tier in %s is off: %s", self._directory, reason, exc_info=unexpected)

    def _new_blocks(self, num_blocks: int) -> BlockBytes:
        return np.empty((num_blocks, self._block_bytes), dtype=np.uint8)
