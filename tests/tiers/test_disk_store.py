"""Blocks on a disk: what was written comes back, now and after a restart."""

import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from radixserve.errors import ConfigError
from radixserve.tiers.disk_store import DiskStore
from radixserve.tiers.files import Files
from radixserve.tiers.segment import SegmentShape
from tests.tiers.blocks import BLOCK_BYTES, blocks_of, name_of, read, write

BUILD = hashlib.sha256(b"build").digest()
OTHER_BUILD = hashlib.sha256(b"other build").digest()
OpenStore = Callable[..., DiskStore]


def bytes_for(num_slots: int) -> int:
    return SegmentShape(BUILD, BLOCK_BYTES, num_slots).file_bytes


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Open a store of one directory; it has found all that is there."""
    stores = []

    def open_store(
        num_slots: int = 8, *, build: bytes = BUILD, files: Files | None = None, max_queue_bytes: int = 1 << 20
    ) -> DiskStore:
        store = DiskStore(
            tmp_path / "cache", BLOCK_BYTES, bytes_for(num_slots), build, files=files, max_queue_bytes=max_queue_bytes
        )
        stores.append(store)
        assert store.wait_idle(30)
        return store

    yield open_store
    for store in stores:
        store.close(30)


def write_now(store: DiskStore, *numbers: int) -> None:
    write(store, *numbers)
    assert store.wait_idle(30)


def held(store: DiskStore, numbers: range) -> list[int]:
    return [number for number in numbers if store.contains(name_of(number))]


def test_what_was_written_is_read_back(open_store: OpenStore) -> None:
    store = open_store()
    write(store, 0, 1, 2)
    np.testing.assert_array_equal(read(store, 2, 0, 1), blocks_of([2, 0, 1]))
    assert store.wait_idle(30)
    np.testing.assert_array_equal(read(store, 2, 0, 1), blocks_of([2, 0, 1]))
    assert store.stats().num_read_blocks >= 3
    assert store.stats().num_hit_blocks == 6
    assert store.seconds_per_block is not None


def test_a_read_ends_before_the_first_block_that_is_not_there(open_store: OpenStore) -> None:
    store = open_store()
    write_now(store, 0, 2)
    np.testing.assert_array_equal(read(store, 0, 1, 2), blocks_of([0]))
    assert read(store, 1, 2).shape == (0, BLOCK_BYTES)


def test_a_restart_finds_what_was_written(open_store: OpenStore) -> None:
    store = open_store()
    write(store, *range(5))
    store.close(30)
    again = open_store()
    assert held(again, range(8)) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(read(again, *range(5)), blocks_of(range(5)))
    assert again.stats().num_failed_blocks == 0


def test_close_writes_all_that_was_queued(open_store: OpenStore) -> None:
    store = open_store(2000)
    write(store, *range(2000))
    store.close(30)
    assert store.num_pending_writes == 0
    assert len(held(open_store(2000), range(2000))) == 2000


def test_the_least_recently_used_block_gives_way(open_store: OpenStore) -> None:
    store = open_store(4)
    write_now(store, 0, 1, 2, 3)
    read(store, 0)
    write_now(store, 1)
    write_now(store, 4)
    assert held(store, range(5)) == [0, 1, 3, 4]
    write_now(store, 5, 6)
    assert held(store, range(7)) == [1, 4, 5, 6]


def test_of_a_prompts_blocks_the_deepest_gives_way_first(open_store: OpenStore) -> None:
    store = open_store(3)
    write_now(store, 0, 1, 2)
    read(store, 0, 1, 2)
    write_now(store, 3)
    assert held(store, range(4)) == [0, 1, 3]


def test_the_order_of_use_outlives_a_restart(open_store: OpenStore) -> None:
    store = open_store(4)
    write_now(store, 0, 1, 2, 3)
    read(store, 0)
    store.close(30)
    again = open_store(4)
    read(again, 1)
    write_now(again, 4)
    assert held(again, range(5)) == [0, 1, 3, 4]
    write_now(again, 5, 6)
    assert held(again, range(7)) == [1, 4, 5, 6]


def test_random_writes_reads_and_restarts_agree_with_a_plain_list(open_store: OpenStore) -> None:
    random = np.random.default_rng(0)
    store, recent = open_store(5), list[int]()
    for _ in range(300):
        numbers = [int(number) for number in random.choice(12, size=random.integers(1, 6), replace=False)]
        action = random.random()
        if action < 0.45:
            for number in numbers:  # one by one: what is there is used at once, what is queued when it is written
                write_now(store, number)
                recent = [*(other for other in recent if other != number), number][-5:]
        elif action < 0.9:
            k = next((k for k, number in enumerate(numbers) if number not in recent), len(numbers))
            np.testing.assert_array_equal(read(store, *numbers), blocks_of(numbers[:k]))
            used = [number for number in numbers if number in recent]
            recent = [*(other for other in recent if other not in used), *reversed(used)]
        else:
            store.close(30)
            store = open_store(5)
        assert held(store, range(12)) == sorted(recent)


def test_the_files_of_all_builds_stay_within_the_capacity(open_store: OpenStore, tmp_path: Path) -> None:
    def num_bytes() -> int:
        return sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.kv"))

    first = open_store(8)
    write_now(first, *range(20))
    first.close(30)
    assert num_bytes() <= bytes_for(8)
    second = open_store(12, build=OTHER_BUILD)
    assert held(second, range(20)) == []
    write_now(second, *range(100, 130))
    assert held(second, range(100, 130)) == list(range(118, 130))
    assert num_bytes() <= bytes_for(12)
    second.close(30)
    third = open_store(4, build=OTHER_BUILD)
    assert num_bytes() <= bytes_for(4)
    write_now(third, 1)
    assert third.stats().used_bytes <= third.stats().capacity_bytes == bytes_for(4)


def test_other_builds_blocks_stay_while_there_is_room_and_are_never_found(open_store: OpenStore) -> None:
    first = open_store(4)
    write_now(first, 0, 1)
    first.close(30)
    second = open_store(200, build=OTHER_BUILD)
    assert held(second, range(2)) == []
    assert read(second, 0, 1).shape == (0, BLOCK_BYTES)
    second.close(30)
    assert held(open_store(200), range(2)) == [0, 1]


def test_a_large_capacity_claims_no_room_before_it_is_used(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "cache", 4096, 20 << 30, BUILD)
    store.write([name_of(0)], blocks_of([0], 4096))
    store.close(30)
    # st_blocks counts 512 bytes each, whatever the file system's blocks are.
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.kv")) < 1 << 20


def test_only_the_owner_may_read_what_users_wrote(open_store: OpenStore, tmp_path: Path) -> None:
    write_now(open_store(), 0)
    paths = [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]
    assert len(paths) == 4
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_no_token_and_no_text_is_on_the_disk(open_store: OpenStore, tmp_path: Path) -> None:
    """What is there is the header, names, which are hashes, and the blocks themselves."""
    write_now(open_store(), 0)
    [segment] = (tmp_path / "cache").rglob("*.kv")
    content = segment.read_bytes()
    assert content.count(name_of(0)) == 1
    assert content.count(blocks_of([0]).tobytes()) == 1


def test_a_second_server_is_refused(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    with pytest.raises(ConfigError, match=rf"another server \(process {os.getpid()}\) uses .*cache"):
        DiskStore(tmp_path / "cache", BLOCK_BYTES, bytes_for(8), OTHER_BUILD)
    store.close(30)
    open_store()


def test_a_directory_is_free_again_when_its_server_is_killed(open_store: OpenStore, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from radixserve.tiers.disk_store import DiskStore\n"
        f"store = DiskStore(Path(sys.argv[1]), {BLOCK_BYTES}, {bytes_for(8)}, bytes(32))\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cache")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(ConfigError, match=f"process {child.pid}"):
            open_store()
        child.kill()
        child.wait(30)
    write_now(open_store(), 0)


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod go-w"):
        DiskStore(tmp_path, BLOCK_BYTES, bytes_for(8), BUILD)


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="is no directory"):
            DiskStore(path, BLOCK_BYTES, bytes_for(8), BUILD)


def test_a_size_without_room_for_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dir-size"):
        DiskStore(tmp_path / "cache", BLOCK_BYTES, bytes_for(1) - 1, BUILD)
    DiskStore(tmp_path / "cache", BLOCK_BYTES, bytes_for(1), BUILD).close(30)


def test_links_are_not_followed(tmp_path: Path, open_store: OpenStore) -> None:
    """A link in place of a segment is removed, and what it leads to is left alone."""
    store = open_store()
    write_now(store, 0)
    store.close(30)
    [segment] = (tmp_path / "cache").rglob("*.kv")
    target = segment.rename(tmp_path / "elsewhere.kv")
    before = target.read_bytes()
    segment.symlink_to(target)
    again = open_store()
    assert held(again, range(2)) == []
    write_now(again, 1)
    assert held(again, range(2)) == [1]
    assert target.read_bytes() == before


def test_a_link_in_place_of_the_lock_turns_the_store_off(tmp_path: Path, open_store: OpenStore) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "target").write_text("text")
    (tmp_path / "cache" / "lock").symlink_to(tmp_path / "target")
    assert not open_store().stats().is_on
    assert (tmp_path / "target").read_text() == "text"
