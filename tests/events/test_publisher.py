import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from radixserve.errors import ConfigError
from radixserve.events.publisher import EventPublisher
from radixserve.events.schema import AllBlocksCleared, BlockStored
from tests.events.subscriber import Stored, Subscriber, decode


def storing(index: int) -> BlockStored:
    return BlockStored([index.to_bytes(32, "big")], None, [], 16, None, "CPU")


def index_of(payload: bytes) -> int:
    (event,) = decode(payload).events
    assert isinstance(event, Stored)
    (name,) = event.block_hashes
    assert isinstance(name, bytes)
    return int.from_bytes(name, "big")


@pytest.fixture
def endpoints(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"


@pytest.fixture
def publisher(endpoints: tuple[str, str]) -> Iterator[EventPublisher]:
    publisher = EventPublisher(*endpoints, topic="kv", buffer_size=100)
    yield publisher
    publisher.close()


def connect(publisher: EventPublisher, subscriber: Subscriber) -> int:
    """Publish until the subscription has reached the publisher; return how many batches that took."""
    publisher.publish([AllBlocksCleared()])
    count = 1
    while not subscriber.poll(10):
        publisher.publish([AllBlocksCleared()])
        count += 1
    return count


def test_batches_come_numbered_in_order_under_their_topic(
    publisher: EventPublisher, endpoints: tuple[str, str]
) -> None:
    with Subscriber(*endpoints, topic=b"kv") as subscriber:
        num_before = connect(publisher, subscriber)
        for index in range(50):
            publisher.publish([storing(index)])
        batches = [subscriber.receive()]
        while batches[-1][0] < num_before + 49:
            batches.append(subscriber.receive())
        numbers = [number for number, _ in batches]
        assert numbers == list(range(numbers[0], num_before + 50))
        assert [index_of(payload) for _, payload in batches[-50:]] == list(range(50))
        publisher.publish([storing(7)])
        assert subscriber.receive_topic() == b"kv"


@pytest.mark.parametrize("delimiter", [True, False])
def test_a_replay_fills_the_gap_and_ends(
    publisher: EventPublisher, endpoints: tuple[str, str], delimiter: bool
) -> None:
    for index in range(20):
        publisher.publish([storing(index)])
    with Subscriber(*endpoints) as subscriber:
        batches = subscriber.replay(5, delimiter=delimiter)
        assert [(number, index_of(payload)) for number, payload in batches] == [(i, i) for i in range(5, 20)]
        assert subscriber.replay(20, delimiter=delimiter) == []


def test_a_replay_begins_with_what_earlier_batches_came_to(
    publisher: EventPublisher, endpoints: tuple[str, str]
) -> None:
    for index in range(250):
        publisher.publish([storing(index)])
    with Subscriber(*endpoints) as subscriber:
        batches = subscriber.replay(0)
        assert [number for number, _ in batches] == list(range(149, 250))
        assert len(decode(batches[0][1]).events) == 1 + 150
        assert subscriber.replay(149)[0][0] == 149
        assert [number for number, _ in subscriber.replay(150)] == list(range(150, 250))


def test_a_request_that_is_no_number_does_not_end_the_publisher(
    publisher: EventPublisher, endpoints: tuple[str, str]
) -> None:
    publisher.publish([storing(1)])
    with Subscriber(*endpoints) as subscriber:
        subscriber.ask([b"", b"hello"])
        assert len(subscriber.replay(0)) == 1


@pytest.mark.parametrize("topic", [b"kv", b"k", b""])
def test_each_subscription_is_told_of_once(publisher: EventPublisher, endpoints: tuple[str, str], topic: bytes) -> None:
    deadline = time.monotonic() + 10
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(Subscriber(*endpoints, topic=topic))
            while not publisher.take_subscriptions():
                assert time.monotonic() < deadline
    assert not publisher.take_subscriptions()


def test_a_subscription_to_another_topic_is_not_told_of(publisher: EventPublisher, endpoints: tuple[str, str]) -> None:
    with Subscriber(*endpoints, topic=b"kv2") as other:
        for _ in range(20):
            assert not other.poll(5)
            assert not publisher.take_subscriptions()


def test_nobody_who_listens_and_one_who_never_reads_hold_nothing_up(
    publisher: EventPublisher, endpoints: tuple[str, str]
) -> None:
    with Subscriber(*endpoints, max_unread=1) as idle:
        num_before = connect(publisher, idle)
        for index in range(5000):
            publisher.publish([storing(index)])
        with Subscriber(*endpoints) as other:
            while not (batches := other.replay(num_before + 4999)):
                pass
            assert index_of(batches[0][1]) == 4999


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://*:99999",
        "tcp://*:0",
        "tcp://*:-1",
        "tcp://*:*",
        "tcp://*:",
        "tcp://*:5557x",
        "tcp://:5557",
        "tcp://nowhere",
        "*:5557",
        "",
        "inproc://x",
        "udp://*:5557",
        "nonsense://*:5",
        "ipc://",
        "ipc://*",
        "ipc:///no/such",
    ],
)
def test_an_address_that_cannot_be_used_is_an_error_that_names_its_flag(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-events-endpoint is"):
        EventPublisher(endpoint)
    with pytest.raises(ConfigError, match="--kv-events-replay-endpoint is"):
        EventPublisher(f"ipc://{tmp_path}/e", endpoint)


def test_where_events_go_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "radixserve")
    EventPublisher(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r").close()
    EventPublisher("tcp://router:5557").close()
    assert caplog.messages == [
        f"KV events go to ipc://{tmp_path}/e, bound here",
        f"KV events that were missed are asked for at ipc://{tmp_path}/r",
        "KV events go to tcp://router:5557, bound elsewhere",
    ]


def test_an_address_in_use_is_an_error() -> None:
    with socket.create_server(("0.0.0.0", 0)) as other, pytest.raises(ConfigError, match="in use"):
        EventPublisher(f"tcp://*:{other.getsockname()[1]}")


def test_an_address_without_a_wildcard_is_connected_to(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as collector:
        port = collector.bind_to_random_port("tcp://127.0.0.1")
        collector.setsockopt(zmq.SUBSCRIBE, b"")
        publisher = EventPublisher(f"tcp://127.0.0.1:{port}")
        try:
            while not collector.poll(10):
                publisher.publish([storing(3)])
            assert index_of(collector.recv_multipart()[2]) == 3
        finally:
            publisher.close()
