"""Whatever has become of the files, a block that is given back is the one that was written."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixserve.tiers.disk_store import DiskStore
from radixserve.tiers.files import Files
from radixserve.tiers.segment import SegmentShape
from tests.tiers.blocks import BLOCK_BYTES, blocks_of, name_of, read, write

BUILD = bytes(range(32))
ENTRY_BYTES = 72
NUM_BLOCKS = 12
SHAPE = SegmentShape(BUILD, BLOCK_BYTES, 16)


def open_store(directory: Path, files: Files | None = None) -> DiskStore:
    store = DiskStore(directory, BLOCK_BYTES, SHAPE.file_bytes, BUILD, files=files)
    assert store.wait_idle(30)
    return store


def right_blocks(directory: Path, numbers: range = range(NUM_BLOCKS)) -> list[int]:
    """Return which blocks a new server gives back; all of them must be right. It must be able to go on writing."""
    store = open_store(directory)
    found = []
    for number in numbers:
        blocks = read(store, number)
        np.testing.assert_array_equal(blocks, blocks_of([number])[: len(blocks)])
        found += [number] * len(blocks)
    write(store, 1000)
    assert store.wait_idle(30)
    np.testing.assert_array_equal(read(store, 1000), blocks_of([1000]))
    assert store.stats().is_on
    store.close(30)
    return found


def blocks_found(directory: Path) -> int:
    """Return how many blocks a new server thinks it has before it reads any."""
    store = open_store(directory)
    num_blocks = store.stats().num_blocks
    store.close(30)
    return num_blocks


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Path, bytes]:
    """The directory of a store of twelve blocks, its only segment, and the segment's content."""
    store = open_store(tmp_path / "cache")
    write(store, *range(NUM_BLOCKS))
    store.close(30)
    [segment] = (tmp_path / "cache").rglob("*.kv")
    return tmp_path / "cache", segment, segment.read_bytes()


def test_of_200_flipped_bytes_none_is_served(written: tuple[Path, Path, bytes]) -> None:
    directory, segment, content = written
    random = np.random.default_rng(0)
    used = SHAPE.blocks_start + NUM_BLOCKS * BLOCK_BYTES
    header = content.index(BUILD) + len(BUILD) + 32
    table_end = header + SHAPE.num_slots * ENTRY_BYTES
    assert table_end <= SHAPE.blocks_start
    regions = [(0, header, 0), (header, table_end, NUM_BLOCKS - 1), (SHAPE.blocks_start, used, NUM_BLOCKS - 1)]
    num_lost = [0, 0, 0]
    for index in range(200):
        start, end, num_kept = regions[index % 3]
        flipped = bytearray(content)
        flipped[int(random.integers(start, end))] ^= int(random.integers(1, 256))
        segment.write_bytes(flipped)
        found = right_blocks(directory)
        assert len(found) >= num_kept
        num_lost[index % 3] += NUM_BLOCKS - len(found)
    # Every flip in a header or block costs something; four of the slots are empty, and a flip there costs nothing.
    assert num_lost[0] == 67 * NUM_BLOCKS
    assert 0 < num_lost[1] <= 67
    assert num_lost[2] == 66


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:40],
        lambda content: content[:100],
        lambda content: content[: SHAPE.blocks_start],
        lambda content: content[:-1],
        lambda content: content + b"more" * 5000,
        lambda content: bytes(len(content)),
        lambda content: b"\xff" * len(content),
        lambda content: content[1:] + b"\0",
        lambda content: content[: len(content) // 2] * 2,
        lambda content: np.random.default_rng(0).bytes(len(content)),
    ],
)
def test_a_file_that_is_not_what_was_written_is_used_as_far_as_it_is(
    written: tuple[Path, Path, bytes], damage: Callable[[bytes], bytes]
) -> None:
    directory, segment, content = written
    segment.write_bytes(damage(content))
    right_blocks(directory)
    assert segment.stat().st_size == SHAPE.file_bytes


@pytest.mark.parametrize("num_kept", range(NUM_BLOCKS + 1))
def test_a_file_that_was_cut_off_keeps_the_blocks_before_the_cut(
    written: tuple[Path, Path, bytes], num_kept: int
) -> None:
    directory, segment, content = written
    segment.write_bytes(content[: SHAPE.blocks_start + num_kept * BLOCK_BYTES + BLOCK_BYTES // 2])
    assert blocks_found(directory) == num_kept
    segment.write_bytes(content[: SHAPE.blocks_start + num_kept * BLOCK_BYTES + BLOCK_BYTES // 2])
    assert right_blocks(directory) == list(range(num_kept))


def test_entries_and_blocks_count_in_their_own_place_alone(written: tuple[Path, Path, bytes]) -> None:
    directory, segment, content = written
    table = content.index(name_of(0))
    swapped = bytearray(content)
    swapped[table : table + 64], swapped[table + 64 : table + 128] = (
        content[table + 64 : table + 128],
        content[table : table + 64],
    )
    segment.write_bytes(swapped)
    assert blocks_found(directory) == NUM_BLOCKS - 2
    assert right_blocks(directory) == list(range(2, NUM_BLOCKS))


def test_a_segment_of_another_build_or_number_is_not_used(written: tuple[Path, Path, bytes]) -> None:
    directory, segment, content = written
    other = DiskStore(directory, BLOCK_BYTES, 1 << 24, bytes(32))
    write(other, 0)
    assert other.wait_idle(30)
    other.close(30)
    [foreign] = (directory / bytes(32).hex()).iterdir()
    foreign.rename(segment)
    assert right_blocks(directory) == []
    segment.unlink()
    segment.with_name("000001.kv").write_bytes(content)
    assert right_blocks(directory) == []


def test_damage_is_told_in_one_line(written: tuple[Path, Path, bytes], caplog: pytest.LogCaptureFixture) -> None:
    directory, segment, content = written
    damaged = bytearray(content)
    entry = content.index(name_of(0))
    damaged[entry] ^= 1
    damaged[entry + ENTRY_BYTES] ^= 1
    segment.write_bytes(damaged)
    store = open_store(directory)
    assert store.stats().num_failed_blocks == 2
    store.close(30)
    [record] = caplog.records
    assert (record.levelno, "2 blocks or files are damaged" in record.message) == (logging.WARNING, True)


def test_what_was_read_behind_a_damaged_block_is_written_again(written: tuple[Path, Path, bytes]) -> None:
    directory, segment, content = written
    segment.write_bytes(content[: SHAPE.blocks_start] + bytes(len(content) - SHAPE.blocks_start))
    store = open_store(directory)
    assert len(read(store, *range(NUM_BLOCKS - 2))) == 0
    assert [store.contains(name_of(number)) for number in range(NUM_BLOCKS)] == [False] * (NUM_BLOCKS - 2) + [True] * 2
    write(store, *range(NUM_BLOCKS - 2))
    assert store.wait_idle(30)
    store.close(30)
    assert right_blocks(directory) == list(range(NUM_BLOCKS - 2))


def test_what_was_read_behind_a_missing_block_stays(written: tuple[Path, Path, bytes]) -> None:
    store = open_store(written[0])
    assert len(read(store, 0, 99, 1, 2)) == 1
    assert all(store.contains(name_of(number)) for number in range(NUM_BLOCKS))
    store.close(30)


class DyingFiles(Files):
    """Stops in the middle of the write of that number, as a process that is killed does, and does nothing more."""

    def __init__(self, num_writes: int) -> None:
        self._num_left = num_writes

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            super().write_at(descriptor, data[: len(data) // 2], offset)
        if self._num_left <= 0:
            raise OSError("killed")
        super().write_at(descriptor, data, offset)


def test_a_kill_within_any_write_costs_one_block(tmp_path: Path) -> None:
    """Writes that overwrite others' slots too: 24 blocks into 16."""
    for num_writes in range(3, 52):
        directory = tmp_path / str(num_writes)
        store = open_store(directory, DyingFiles(num_writes))
        write(store, *range(24))
        assert store.wait_idle(30)
        num_written = store.stats().num_written_blocks
        store.close(30)
        found = right_blocks(directory, range(24))
        # The one that was to give way may still be there, or be half overwritten.
        assert set(range(max(num_written - 15, 0), num_written)) <= set(found) <= set(range(num_written + 1))


# Imported once, for fifty children. Each writes blocks whose content follows from their number, over and over.
CHILDREN = """
import json, os, sys
from pathlib import Path
from radixserve.tiers.disk_store import DiskStore
from tests.tiers.blocks import blocks_of, names_of

directory, block_bytes, capacity_bytes, build = json.loads(sys.argv[1])
for line in sys.stdin:
    first = int(line)
    if os.fork() > 0:
        os.wait()
        print("dead", flush=True)
        continue
    store = DiskStore(Path(directory), block_bytes, capacity_bytes, bytes.fromhex(build), max_queue_bytes=1 << 16)
    blocks = [(names_of([number]), blocks_of([number], block_bytes)) for number in range(first, first + 40)]
    print(os.getpid(), flush=True)
    while True:
        for number, (name, block) in enumerate(blocks):
            store.write(name, block)
            store.wait_idle(30)
            print(number, flush=True)
"""


def test_a_server_killed_at_50_random_moments_leaves_right_blocks_alone(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    directory, block_bytes = tmp_path / "cache", 1000
    shape = SegmentShape(BUILD, block_bytes, 24)
    settings = json.dumps([str(directory), block_bytes, shape.file_bytes, BUILD.hex()])
    command = [sys.executable, "-c", CHILDREN, settings]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    num_found = 0
    with subprocess.Popen(command, **pipes) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for kill in range(50):
            first = kill * 10
            print(first, file=parent.stdin, flush=True)
            pid = int(parent.stdout.readline())
            for _ in range(int(random.integers(0, 60))):
                parent.stdout.readline()
            os.kill(pid, signal.SIGKILL)
            # The kill may have cut off a line before.
            assert any(line.endswith("dead\n") for line in iter(parent.stdout.readline, ""))
            store = DiskStore(directory, block_bytes, shape.file_bytes, BUILD)
            assert store.wait_idle(30)
            for number in range(max(first - 30, 0), first + 40):
                blocks = read(store, number)
                np.testing.assert_array_equal(blocks, blocks_of([number], block_bytes)[: len(blocks)])
                num_found += len(blocks)
            store.close(30)
        parent.stdin.close()
    assert num_found > 500
