"""KV events of an engine, from its settings."""

import importlib.util
from typing import TYPE_CHECKING

from radixserve.config import EngineConfig
from radixserve.core.kv_cache import KVCache
from radixserve.errors import ConfigError
from radixserve.events.cache_events import CacheEvents

if TYPE_CHECKING:
    from radixserve.events.publisher import EventPublisher


class KVEvents:
    """The events of one cache, and who publishes them."""

    def __init__(self, events: CacheEvents, publisher: "EventPublisher") -> None:
        self._events = events
        self._publisher = publisher

    def publish(self) -> None:
        """Publish what has happened since the last call, if anything, without waiting for anyone."""
        events = self._events.take()
        if events:
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
    followed = KVEvents(events, publisher)
    followed.publish()
    return followed
