"""A disk that fails, or hangs: the store goes off or waits, and its caller does neither."""

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from radixserve.errors import ConfigError
from radixserve.tiers.disk_store import DiskStore
from radixserve.tiers.files import Files
from radixserve.tiers.segment import SegmentShape
from tests.tiers.blocks import BLOCK_BYTES, blocks_of, name_of, names_of, read, write

BUILD = bytes(32)
CAPACITY = SegmentShape(BUILD, BLOCK_BYTES, 8).file_bytes
OpenStore = Callable[..., DiskStore]


class FailingFiles(Files):
    """Raises an error at each of the named calls, once it is told to."""

    def __init__(self, *calls: str, error: int | Exception = errno.EIO) -> None:
        self.fails = False
        self._calls = calls
        self._error = error

    def _call(self, name: str) -> None:
        if self.fails and name in self._calls:
            raise OSError(self._error, "said by the test") if isinstance(self._error, int) else self._error

    def open(self, path: Path) -> int:
        self._call("open")
        return super().open(path)

    def resize(self, descriptor: int, size: int) -> None:
        self._call("resize")
        super().resize(descriptor, size)

    def read_at(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        self._call("read_at")
        return super().read_at(descriptor, buffer, offset)

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> None:
        self._call("write_at")
        super().write_at(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        self._call("sync")
        super().sync(descriptor)


class HangingFiles(Files):
    """Holds up reads or writes of blocks, or both, until they may pass."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.may_write = threading.Event()
        self.is_reading = threading.Event()
        self.is_writing = threading.Event()

    def read_at(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        if len(buffer) == BLOCK_BYTES:
            self.is_reading.set()
            assert self.may_read.wait(30)
        return super().read_at(descriptor, buffer, offset)

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> None:
        if len(data) == BLOCK_BYTES:
            self.is_writing.set()
            assert self.may_write.wait(30)
        super().write_at(descriptor, data, offset)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    stores = []

    def open_store(files: Files, max_queue_bytes: int = 1 << 20) -> DiskStore:
        store = DiskStore(
            tmp_path / "cache", BLOCK_BYTES, CAPACITY, BUILD, files=files, max_queue_bytes=max_queue_bytes
        )
        stores.append(store)
        assert store.wait_idle(30)
        return store

    yield open_store
    for store in stores:
        store.close(30)


@pytest.fixture
def hanging(open_store: OpenStore) -> Iterator[tuple[DiskStore, HangingFiles]]:
    """A store with room for four blocks in each queue, on a disk that hangs at the first block it reads or writes."""
    files = HangingFiles()
    yield open_store(files, max_queue_bytes=4 * BLOCK_BYTES), files
    files.may_read.set()
    files.may_write.set()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EFBIG, errno.EDQUOT])
def test_a_failed_write_turns_the_store_off_with_one_warning(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    files = FailingFiles("write_at", error=error)
    store = open_store(files)
    write(store, 0, 1)
    assert store.wait_idle(30)
    files.fails = True
    write(store, 2, 3, 4)
    assert store.wait_idle(30)
    write(store, 5)
    assert not store.has_room(0)
    assert store.stats().num_dropped_blocks == 4
    assert not store.stats().is_on
    store.close(30)
    assert len(warnings_in(caplog)) == 1
    assert "is off" in warnings_in(caplog)[0]


def test_what_was_written_before_a_full_disk_is_still_read(open_store: OpenStore) -> None:
    files = FailingFiles("write_at", "resize", error=errno.ENOSPC)
    store = open_store(files)
    write(store, 0, 1)
    assert store.wait_idle(30)
    files.fails = True
    write(store, 2)
    assert store.wait_idle(30)
    assert [store.contains(name_of(number)) for number in range(3)] == [True, True, False]
    np.testing.assert_array_equal(read(store, 0, 1, 2), blocks_of([0, 1]))


def test_a_disk_that_fails_again_and_again_costs_one_warning(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    files = FailingFiles("write_at", "read_at")
    store = open_store(files)
    write(store, 0, 1)
    assert store.wait_idle(30)
    files.fails = True
    write(store, 2)
    assert store.wait_idle(30)
    assert read(store, 0).shape == (0, BLOCK_BYTES)
    store.close(30)
    assert len(warnings_in(caplog)) == 1


def test_a_failed_read_turns_the_store_off_with_one_warning(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    files = FailingFiles("read_at")
    store = open_store(files)
    write(store, 0, 1)
    assert store.wait_idle(30)
    files.fails = True
    assert read(store, 0, 1).shape == (0, BLOCK_BYTES)
    assert read(store, 1).shape == (0, BLOCK_BYTES)
    assert not store.contains(name_of(0))
    assert not store.stats().is_on
    assert store.num_pending_reads == 0
    store.close(30)
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("call", ["read_at", "write_at"])
def test_an_error_that_no_disk_makes_turns_the_store_off_too(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    files = FailingFiles(call, error=MemoryError())
    store = open_store(files)
    write(store, 0, 1)
    assert store.wait_idle(30)
    files.fails = True
    if call == "read_at":
        assert read(store, 0, 1).shape == (0, BLOCK_BYTES)
    else:
        write(store, 2)
        assert store.wait_idle(30)
        assert np.array_equal(read(store, 0, 1), blocks_of([0, 1]))
    assert not store.stats().is_on
    assert store.num_pending_reads == 0
    store.close(30)
    assert len(warnings_in(caplog)) == 1


def test_what_is_forgotten_while_it_is_being_written_is_not_found(
    hanging: tuple[DiskStore, HangingFiles], tmp_path: Path
) -> None:
    """Neither then nor by a later server, and its place holds other blocks."""
    store, files = hanging
    write(store, 0)
    assert files.is_writing.wait(30)
    store.forget(b"")
    files.may_write.set()
    assert store.wait_idle(30)
    assert not store.contains(name_of(0))
    write(store, *range(1, 5))
    assert store.wait_idle(30)
    store.close(30)
    later = DiskStore(tmp_path / "cache", BLOCK_BYTES, CAPACITY, BUILD)
    assert later.wait_idle(30)
    assert [later.contains(name_of(number)) for number in range(5)] == [False, True, True, True, True]
    later.close(30)


@pytest.mark.parametrize("pattern", ["*.kv", "lock", "*"])
@pytest.mark.parametrize("is_written", [False, True])
def test_files_that_are_deleted_turn_the_store_off_with_one_warning(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture, tmp_path: Path, pattern: str, is_written: bool
) -> None:
    store = open_store(Files())
    write(store, 0, 1)
    assert store.wait_idle(30)
    for path in (tmp_path / "cache").rglob(pattern):
        if path.is_file():
            path.unlink()
    if is_written:
        write(store, 2)
    assert wait_until(lambda: not store.stats().is_on)
    assert not store.has_room(0)
    np.testing.assert_array_equal(read(store, 0, 1), blocks_of([0, 1]))
    store.close(30)
    assert ["deleted while the server ran" in message for message in warnings_in(caplog)] == [True]


@pytest.mark.parametrize("call", ["open", "write_at", "resize"])
@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_directory_that_cannot_be_written_leaves_the_store_off_with_one_warning(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture, call: str, error: int
) -> None:
    files = FailingFiles(call, error=error)
    files.fails = True
    store = open_store(files)
    write(store, 0)
    assert read(store, 0).shape == (0, BLOCK_BYTES)
    assert not store.stats().is_on
    assert not store.has_room(1)
    assert store.stats().num_dropped_blocks == 1
    assert len(warnings_in(caplog)) == 1
    files.fails = False
    open_store(files)  # nothing of the failed one is in the way


@pytest.mark.parametrize("call", ["open", "read_at", "resize"])
def test_what_cannot_be_restored_turns_the_store_off(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture, tmp_path: Path, call: str
) -> None:
    files = FailingFiles()
    store = open_store(files)
    write(store, 0)
    store.close(30)
    [segment] = tmp_path.rglob("*.kv")
    segment.write_bytes(segment.read_bytes()[:-1])  # so that its size is to be set

    class FailingAtSegments(FailingFiles):
        def open(self, path: Path) -> int:
            self.fails = path.suffix == ".kv"
            return super().open(path)

    store = open_store(FailingAtSegments(call))
    assert not store.stats().is_on
    assert read(store, 0).shape == (0, BLOCK_BYTES)
    store.close(30)
    assert len(warnings_in(caplog)) == 1


def test_a_disk_that_fails_at_the_end_costs_a_warning(open_store: OpenStore, caplog: pytest.LogCaptureFixture) -> None:
    files = FailingFiles("sync")
    files.fails = True
    store = open_store(files)
    write(store, 0)
    store.close(30)
    assert len(warnings_in(caplog)) == 1
    assert open_store(Files()).contains(name_of(0))


def test_a_caller_never_waits_for_a_disk_that_hangs(hanging: tuple[DiskStore, HangingFiles]) -> None:
    store, files = hanging
    write(store, *range(6))
    assert files.is_writing.wait(30)
    assert store.num_pending_writes == 4
    assert not store.has_room(1)
    assert store.stats().num_dropped_blocks == 2
    assert [store.contains(name_of(number)) for number in range(6)] == [True] * 4 + [False] * 2
    # What is queued is in memory still.
    np.testing.assert_array_equal(read(store, *range(6)), blocks_of(range(4)))
    files.may_write.set()
    assert store.wait_idle(30)
    assert store.has_room(4)
    assert not store.has_room(5)
    store.read(1, names_of(range(3)))
    assert files.is_reading.wait(30)
    store.read(2, names_of(range(3)))
    assert store.num_pending_reads == 4
    # The second read is cut to what its queue takes, and a third has no room at all.
    store.read(3, names_of([0]))
    [done] = store.completed()
    assert (done.ticket, len(done.blocks)) == (3, 0)
    # Writes go on beside a read that hangs.
    write(store, 7)
    assert wait_until(lambda: store.num_pending_writes == 0)
    files.may_read.set()
    assert store.wait_idle(30)
    assert {done.ticket: len(done.blocks) for done in store.completed()} == {1: 3, 2: 1}
    assert store.num_pending_reads == 0


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0)  # let the store's threads run
    return False


def test_closing_waits_no_longer_than_it_may_and_keeps_the_directory_while_a_write_hangs(
    hanging: tuple[DiskStore, HangingFiles], open_store: OpenStore
) -> None:
    store, files = hanging
    write(store, 0, 1)
    assert files.is_writing.wait(30)
    store.close(0.0)
    with pytest.raises(ConfigError, match="another server"):
        open_store(Files())
    files.may_write.set()

    def is_free() -> bool:
        try:
            open_store(Files())
        except ConfigError:
            return False
        return True

    assert wait_until(is_free)


def test_a_block_that_is_being_read_does_not_give_way(open_store: OpenStore) -> None:
    files = HangingFiles()
    files.may_write.set()
    store = open_store(files)
    write(store, 0)
    assert store.wait_idle(30)
    store.read(1, names_of([0]))
    assert files.is_reading.wait(30)
    write(store, *range(1, 10))
    assert wait_until(lambda: store.num_pending_writes == 0)
    files.may_read.set()
    assert store.wait_idle(30)
    [done] = store.completed()
    np.testing.assert_array_equal(done.blocks, blocks_of([0]))
    assert store.stats().num_failed_blocks == 0


def test_what_is_known_of_the_speed_is_that_of_blocks_read_from_the_disk(open_store: OpenStore) -> None:
    files = HangingFiles()
    files.may_read.set()
    store = open_store(files)
    write(store, 0)
    assert read(store, 0).shape == (1, BLOCK_BYTES)
    assert store.seconds_per_block is None
    files.may_write.set()
    assert store.wait_idle(30)
    read(store, 0)
    assert store.seconds_per_block is not None


def test_what_is_forgotten_while_it_is_read_is_not_given_out(hanging: tuple[DiskStore, HangingFiles]) -> None:
    store, files = hanging
    files.may_write.set()
    write(store, 0)
    assert store.wait_idle(30)
    store.read(7, names_of([0]))
    assert files.is_reading.wait(30)
    store.forget(b"")
    write(store, 1, 2, 3)  # the first of them where it was
    while store.num_pending_writes:
        time.sleep(0)  # let the store's threads run
    files.may_read.set()
    assert store.wait_idle(30)
    (done,) = store.completed()
    assert len(done.blocks) == 0
    assert np.array_equal(read(store, 3), blocks_of([3]))


def test_a_block_that_is_forgotten_while_it_waits_does_not_end_the_writes(
    hanging: tuple[DiskStore, HangingFiles],
) -> None:
    store, files = hanging
    files.may_write.set()
    write(store, 0)
    assert store.wait_idle(30)
    for _ in range(20):
        files.may_read.clear()
        store.read(7, names_of([0]))
        write(store, 1)
        for _ in range(100):
            time.sleep(0)  # let the writer find the block, and wait for the read
        store.forget(name_of(1))
        files.may_read.set()
        assert store.wait_idle(30)
        assert len(store.completed()) == 1
    write(store, 2)
    assert store.wait_idle(10)
    assert np.array_equal(read(store, 2), blocks_of([2]))
