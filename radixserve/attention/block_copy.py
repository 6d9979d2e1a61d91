"""Copy blocks of the K/V cache with torch alone."""

import torch

from radixserve.attention.backend import KVLayer


def copy_blocks(layers: list[KVLayer], sources: list[int], destinations: list[int]) -> None:
    """Copy whole blocks in every layer, as if all sources were read before any destination is written."""
    read, written = torch.tensor([sources, destinations], device=layers[0].key.device)
    for layer in layers:
        for cache in (layer.key, layer.value):
            cache.index_copy_(0, written, cache.index_select(0, read))
