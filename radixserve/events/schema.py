"""The messages of KV events, as vLLM's publisher writes them and prefix-aware routers read them.

Each is a msgpack array, an event's first element its type's name. Source: vllm/distributed/kv_events.py.
"""

import msgspec


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that follow one another have entered the cache.

    block_hashes: their names; the one before each is its parent, and parent_block_hash, None at the beginning of a
    prompt, that of the first. token_ids: of all of them, or empty where ids are not told. medium: GPU or CPU.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks have left the cache, the deepest first."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nothing is cached any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What happened in one step, in order. ts: seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = 0
