"""KV events of an engine, from its settings."""

import importlib.util
from typing import TYPE_CHECKING

from radixserve.config import EngineConfig
from radixserve.core.kv_cache import KVCache
from radixserve.errors import ConfigError
from radixserve.events.cache_events import CacheEvents

if TYPE_CHECKING:
    from radixserve.events.publisher import EventPublisher


# How soon an engine without work sees a subscriber, and how often it tells one of them all that is cached.
SECONDS_BETWEEN_SNAPSHOTS = 1.0


class KVEvents:
    """The events of one cache, and who publishes them.

    A new subscriber, or one that has connected again, may know of another life of the engine, or of nothing: the batch
    after it has come clears what it knew and lists all that is cached.
    """

    def __init__(self, cache: KVCache, events: CacheEvents, publisher: "EventPublisher") -> None:
        self._cache = cache
        self._events = events
        self._publisher = publisher
        self._is_awaited = False
        self._next_snapshot_at = cache.clock()

    def seconds_until_news(self) -> float:
        """Return how long an engine without work may sleep: 0 if a subscriber is to be told what is cached."""
        self._is_awaited = self._publisher.take_subscriptions() or self._is_awaited
        seconds = max(self._next_snapshot_at - self._cache.clock(), 0.0)
        return seconds if self._is_awaited else max(seconds, SECONDS_BETWEEN_SNAPSHOTS)

    def publish(self) -> None:
        """Publish what has happened since the last call, if anything, without waiting for anyone."""
        is_due = self.seconds_until_news() == 0
        events = self._events.take()
        if is_due:
            self._publisher.publish(events, self._events.snapshot(self._cache.walk()))
            self._is_awaited = False
            # All of it takes time to tell, and whoever can reach the address can come as often as he likes.
            self._next_snapshot_at = self._cache.clock() + SECONDS_BETWEEN_SNAPSHOTS
        elif events:
            self._publisher.publish(events)

    def close(self) -> None:
        """Publish what is left and end the publisher."""
        self.publish()
        self._publisher.close()


def open_publisher(config: EngineConfig) -> "EventPublisher | None":
    """Open the configured sockets; None if there are none. Raises ConfigError."""
    if config.kv_events_endpoint is None:
        return None
    if importlib.util.find_spec("zmq") is None:
        raise ConfigError("--kv-events-endpoint needs pyzmq, which is not installed: pip install 'radixserve[events]'")
    # What needs pyzmq is imported only where it is there.
    from radixserve.events.publisher import DEFAULT_BUFFER_SIZE, EventPublisher  # noqa: PLC0415

    return EventPublisher(
        config.kv_events_endpoint,
        config.kv_events_replay_endpoint,
        topic=config.kv_events_topic or "",
        buffer_size=config.kv_events_buffer or DEFAULT_BUFFER_SIZE,
    )


def follow(cache: KVCache, publisher: "EventPublisher", config: EngineConfig, *, device: str) -> KVEvents:
    """Publish what becomes of a cache's blocks from now on; at once, that nothing is cached yet."""
    events = CacheEvents(
        cache.keys,
        cache.num_blocks,
        cache.block_size,
        medium="GPU" if device.startswith("cuda") else "CPU",
        with_token_ids=config.kv_events_token_ids,
    )
    cache.add_observer(events)
    followed = KVEvents(cache, events, publisher)
    followed.publish()
    return followed
