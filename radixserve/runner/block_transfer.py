"""Copy whole blocks between the pool, on any device, and the host's memory."""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from radixserve.attention.backend import KVLayer

# A step can copy out as many blocks as it computes, a gigabyte; on the device, where that much is not left beside the
# pool, so much of them is gathered at a time.
MAX_GATHERED_BYTES = 64 * 2**20
# Blocks are moved as the widest words that they are whole numbers of: scattering bytes takes three times as long.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def copy_out(layers: Sequence[KVLayer], block_ids: "array[int]") -> npt.NDArray[np.uint8]:
    """Return blocks, packed as BlockLoads are: [n, block_bytes], in the host's memory.

    What crosses over from a device is gathered there first, in parts of MAX_GATHERED_BYTES.
    """
    caches = _words_of(layers)
    ids = torch.tensor(block_ids, device=caches[0].device)
    packed = torch.empty((len(block_ids), len(caches), caches[0].shape[1]), dtype=caches[0].dtype)
    num_at_once = max(MAX_GATHERED_BYTES // packed[0].nbytes, 1)
    for start in range(0, len(ids), num_at_once):
        part, part_ids = packed[start : start + num_at_once], ids[start : start + num_at_once]
        gathered = part if part.device == ids.device else torch.empty_like(part, device=ids.device)
        for index, cache in enumerate(caches):
            gathered[:, index] = cache.index_select(0, part_ids)
        if gathered is not part:
            part.copy_(gathered)
    blocks: npt.NDArray[np.uint8] = packed.flatten(1).view(torch.uint8).numpy()
    return blocks


def copy_in(layers: Sequence[KVLayer], block_ids: "array[int]", blocks: npt.NDArray[np.uint8]) -> None:
    """Write packed blocks into the pool. blocks: [n, block_bytes], contiguous, the i-th for block_ids[i]."""
    caches = _words_of(layers)
    ids = torch.tensor(block_ids, device=caches[0].device)
    packed = torch.from_numpy(blocks).view(caches[0].dtype).to(ids.device).view(len(block_ids), len(caches), -1)
    for index, cache in enumerate(caches):
        cache.index_copy_(0, ids, packed[:, index])


def _words_of(layers: Sequence[KVLayer]) -> list[torch.Tensor]:
    """Return views of all caches in the order in which a block is packed, each [num_blocks, words]."""
    caches = [cache.flatten(1) for layer in layers for cache in (layer.key, layer.value)]
    num_bytes = caches[0].shape[1] * caches[0].itemsize
    word = next(word for word in _WORDS if num_bytes % word.itemsize == 0)
    return [cache.view(word) for cache in caches]
