"""The tiers that the settings ask for."""

from collections.abc import Callable
from pathlib import Path

from radixserve.config import EngineConfig
from radixserve.core.block_store import BlockStore
from radixserve.runner.startup import StartedExecutor
from radixserve.tiers.chain import Chain
from radixserve.tiers.disk_store import DiskStore
from radixserve.tiers.identity import BlockFormat, build_identity
from radixserve.tiers.memory_store import MemoryStore

DEFAULT_DIR_BYTES = 20 * 2**30
# What a directory holds is found in the background. Mostly that takes no longer, and then the start-up table tells it.
_RESTORE_SECONDS = 2.0
# How a block's bytes are ordered: see BlockLoads.
_LAYOUT = "layer, key and value, head, token, element"


def open_store(
    config: EngineConfig, started: StartedExecutor, weights: Callable[[], bytes]
) -> tuple[BlockStore | None, bytes]:
    """Return the store below the pool, if there is to be one, and the identity of the blocks in it.

    weights: returns the digest of the model's, for which a disk is asked alone. Raises ConfigError if a directory is
    another server's, or not ours alone. One that cannot be written leaves its tier off, with a warning.
    """
    stores: list[BlockStore] = []
    build = b""
    if config.kv_cache_host_memory is not None:
        stores.append(MemoryStore(started.bytes_per_block, config.kv_cache_host_memory))
    if config.kv_cache_dir is not None:
        build = build_identity(
            weights(),
            BlockFormat(
                weights_dtype=started.weights_dtype,
                activation_dtype=started.dtype,
                kv_dtype=started.kv_cache_dtype,
                block_size=config.block_size,
                block_bytes=started.bytes_per_block,
                layout=_LAYOUT,
            ),
        )
        capacity = config.kv_cache_dir_size or DEFAULT_DIR_BYTES
        disk = DiskStore(Path(config.kv_cache_dir), started.bytes_per_block, capacity, build)
        disk.wait_idle(_RESTORE_SECONDS)
        stores.append(disk)
    if len(stores) > 1:
        return Chain(stores), build
    return (stores[0] if stores else None), build
