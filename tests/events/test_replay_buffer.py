import threading

import msgspec
import pytest

from radixserve.events.replay_buffer import ReplayBuffer
from radixserve.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from tests.events.subscriber import Router


def name(index: int) -> bytes:
    return index.to_bytes(32, "big")


def number(index: int) -> bytes:
    return index.to_bytes(8, "big")


def add(buffer: ReplayBuffer, index: int, *events: Event) -> None:
    buffer.add(number(index), msgspec.msgpack.encode(EventBatch(0.0, list(events))))


def storing(index: int, parent: int | None = None, token_ids: tuple[int, ...] = ()) -> BlockStored:
    return BlockStored([name(index)], None if parent is None else name(parent), list(token_ids), 2, None, "GPU")


def read(buffer: ReplayBuffer, start: int = 0) -> Router:
    router = Router()
    for _, payload in buffer.batches_from(number(start)):
        router.read(payload)
    return router


@pytest.mark.parametrize("max_batches", range(1, 8))
def test_what_is_stored_is_told_whatever_is_kept(max_batches: int) -> None:
    buffer = ReplayBuffer(max_batches)
    add(buffer, 0, AllBlocksCleared())
    add(buffer, 1, storing(1, None, (1, 2)), storing(2, 1, (3, 4)))
    add(buffer, 2, storing(3, 1, (5, 6)))
    add(buffer, 3, BlockRemoved([name(2)], "GPU"))
    add(buffer, 4, storing(2, 1, (3, 4)), storing(4, 2, (7, 8)))
    router = read(buffer)
    assert router.parents == {name(1): None, name(2): name(1), name(3): name(1), name(4): name(2)}
    assert router.token_ids[name(4)] == [7, 8]
    assert len(buffer.batches_from(number(0))) == min(max_batches + 1, 5)
    add(buffer, 5, AllBlocksCleared())
    assert not read(buffer).parents


def test_a_reader_beside_the_writer_sees_a_state_that_there_was() -> None:
    buffer = ReplayBuffer(5)
    num_batches = 3000
    is_done = threading.Event()

    def write() -> None:
        for index in range(num_batches):
            add(buffer, index, storing(index))
        is_done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not is_done.is_set():
        batches = buffer.batches_from(number(0))
        router = Router()
        for _, payload in batches:
            router.read(payload)
        last = int.from_bytes(batches[-1][0], "big") if batches else -1
        assert router.parents.keys() == {name(index) for index in range(last + 1)}
    writer.join()
    # What could not be put away while it was read is by the next batch.
    add(buffer, num_batches, storing(num_batches))
    assert len(buffer.batches_from(number(0))) == 6
