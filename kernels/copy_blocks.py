"""Copy whole blocks of many cache tensors with one launch."""

import math
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from radixserve.kernels.tiles import FAMILIES, CompileCase

# A block is copied as 32-bit words, whatever its dtype.
_WORD_BYTES = 4
_BLOCK = 1024
_NUM_WARPS = 4


# Where the ids begin depends on their number; specialised on, it would have the kernel compiled again.
@triton.jit(do_not_specialize_on_alignment=["sources", "destinations"])
def copy_blocks_kernel(
    read_addresses: tl.tensor,
    written_addresses: tl.tensor,
    sources: tl.tensor,
    destinations: tl.tensor,
    num_words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Copy BLOCK words of one block of one tensor. Tensors come as addresses, as there is one a layer."""
    copy, tensor = tl.program_id(0), tl.program_id(1)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + copy).to(tl.int64) * num_words
    destination = tl.load(destinations + copy).to(tl.int64) * num_words
    read = tl.load(read_addresses + tensor).to(tl.pointer_type(tl.int32))
    written = tl.load(written_addresses + tensor).to(tl.pointer_type(tl.int32))
    # Without the hint, addresses that come from memory are read and written one word at a time.
    read, written = tl.multiple_of(read, 16), tl.multiple_of(written, 16)
    is_in = words < num_words
    tl.store(written + destination + words, tl.load(read + source + words, mask=is_in), mask=is_in)


def copy_blocks(caches: Sequence[torch.Tensor], sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Copy blocks sources[i] to destinations[i] in every cache, in place, as if all sources were read first.

    caches: tensors alike, [num_blocks, ...], contiguous, whose blocks have a multiple of 4 bytes. No block is a
    destination twice; one that is a source too is copied aside before anything is written, so chains and swaps are
    right. Raises ValueError for other tensors, ids out of range and a block that is a destination twice.
    """
    _check(caches, sources, destinations)
    if not sources:
        return
    overwritten = sorted(set(sources) & set(destinations))
    place_aside = {block: place for place, block in enumerate(overwritten)}
    aside = [cache.new_empty((len(overwritten), *cache.shape[1:])) for cache in caches]
    _launch(caches, aside, list(place_aside.items()))
    copies = list(zip(sources, destinations, strict=True))
    _launch(caches, caches, [copy for copy in copies if copy[0] not in place_aside])
    _launch(aside, caches, [(place_aside[source], to) for source, to in copies if source in place_aside])


def compile_cases() -> Iterator[CompileCase]:
    """Yield the one configuration, which serves every dtype and shape."""
    for family in FAMILIES:
        tables = dict.fromkeys(("read_addresses", "written_addresses", "sources", "destinations"), "*i64")
        yield CompileCase(
            name="copy_blocks",
            family=family,
            fn=copy_blocks_kernel,
            signature=tables | {"num_words": "i32", "BLOCK": "constexpr"},
            constexprs={"BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
            num_stages=1,
            divisible_by_16=("num_words",),
        )


def _check(caches: Sequence[torch.Tensor], sources: Sequence[int], destinations: Sequence[int]) -> None:
    if not caches:
        raise ValueError("there are no caches to copy in")
    first = caches[0]
    for cache in caches:
        if cache.shape != first.shape or cache.dtype != first.dtype or cache.device != first.device:
            raise ValueError(
                f"a cache is {cache.dtype} {list(cache.shape)} on {cache.device}, another {first.dtype} "
                f"{list(first.shape)} on {first.device}; they must be alike"
            )
        if not cache.is_contiguous() or cache.data_ptr() % 16:
            raise ValueError(f"a cache has strides {cache.stride()}; it must be contiguous, and aligned to 16 bytes")
    if first.dim() < 2 or _block_bytes(first) % _WORD_BYTES:
        raise ValueError(f"a cache is {first.dtype} {list(first.shape)}; a block must be whole 32-bit words")
    if len(sources) != len(destinations) or len(set(destinations)) != len(destinations):
        raise ValueError(
            f"blocks {list(sources)} cannot go to {list(destinations)}: give each source its own destination"
        )
    if any(not 0 <= block < first.shape[0] for block in (*sources, *destinations)):
        raise ValueError(
            f"copies {list(sources)} to {list(destinations)} name a block beyond the {first.shape[0]} there are"
        )


def _block_bytes(cache: torch.Tensor) -> int:
    return math.prod(cache.shape[1:]) * cache.itemsize


def _launch(read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], copies: Sequence[tuple[int, int]]) -> None:
    if not copies:
        return
    device = read[0].device
    num_words = _block_bytes(read[0]) // _WORD_BYTES
    addresses = torch.tensor([[tensor.data_ptr() for tensor in tensors] for tensors in (read, written)], device=device)
    ids = torch.tensor(copies, device=device).T.contiguous()  # [2, num_copies]
    copy_blocks_kernel[(len(copies), len(read), triton.cdiv(num_words, _BLOCK))](
        addresses[0],
        addresses[1],
        ids[0],
        ids[1],
        num_words,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=True,
    )
