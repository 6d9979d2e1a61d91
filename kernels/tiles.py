"""Tile sizes of the Triton kernels: a table of our own, as @triton.autotune needs a GPU and makes the first calls slow.

An entry is chosen by what the compiler specialises on (head size, dtype, kind of GPU), never by the batch, so that
nothing is compiled while requests wait. Each kernel lists its entries as compile cases, to be compiled ahead of time
and held to the limits of the targets.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

# Kinds of GPU that share entries: NVIDIA from sm_80 on, and AMD from gfx942 on.
TargetFamily = Literal["cuda", "hip"]

FAMILIES: tuple[TargetFamily, ...] = ("cuda", "hip")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (64, 80, 96, 128)
# Query heads that share a K/V head are one side of a matrix product, and 16 is the least that tl.dot takes.
MAX_GROUP_SIZE = 16

TRITON_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(slots=True, frozen=True)
class CompileCase:
    """One specialisation of a kernel, for triton.compile.

    fn: the jitted function. signature: the Triton type of each argument, "constexpr" for those in constexprs.
    divisible_by_16: arguments that are always multiples of 16, as the launcher's tensors and their strides are.
    """

    name: str
    family: TargetFamily
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    divisible_by_16: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class DecodeTiles:
    """Tiles of paged decode. A program reads split_tokens of a context, tile_tokens at a time.

    split_tokens is fixed: a row is cut into the same splits, and summed in the same order, whatever shares its batch.
    """

    tile_tokens: int
    split_tokens: int
    num_warps: int
    num_stages: int


@dataclass(slots=True, frozen=True)
class PrefillTiles:
    """Tiles of paged prefill: tile_queries rows, each a token and a query head, against tile_tokens of context."""

    tile_queries: int
    tile_tokens: int
    num_warps: int
    num_stages: int


def target_family() -> TargetFamily:
    """Return the kind of GPU that this build of torch drives."""
    return "hip" if torch.version.hip else "cuda"


def padded_head_dim(head_dim: int) -> int:
    """Return the width of a head's tile, a power of two; what it has beyond the head is masked."""
    return 64 if head_dim <= 64 else 128


def decode_tiles(head_dim: int, dtype: torch.dtype, family: TargetFamily) -> DecodeTiles:
    """Return the tiles of paged decode. Raises ValueError for a head size or dtype that is not supported."""
    check_supported(head_dim, dtype)
    return _DECODE_TILES[family, dtype.itemsize, padded_head_dim(head_dim)]


def prefill_tiles(head_dim: int, dtype: torch.dtype, family: TargetFamily) -> PrefillTiles:
    """Return the tiles of paged prefill. Raises ValueError for a head size or dtype that is not supported."""
    check_supported(head_dim, dtype)
    return _PREFILL_TILES[family, dtype.itemsize, padded_head_dim(head_dim)]


def check_supported(head_dim: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless the attention kernels have tiles for this head size and dtype."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"the head size is {head_dim}; the Triton kernels take {', '.join(map(str, HEAD_DIMS))}")
    if dtype not in DTYPES:
        raise ValueError(f"the dtype is {dtype}; the Triton kernels take {', '.join(map(str, DTYPES))}")


# Keyed by family, bytes of an element and padded head size. Five stages on cuda, because a block's id is loaded before
# its keys are: with fewer, their tiles have no second buffer. float32 wants short tiles and eight warps: at head size
# 128 the operands of its products fill the registers otherwise. Two stages on hip keep within its 64 KiB of shared
# memory.
_DECODE_TILES: dict[tuple[TargetFamily, int, int], DecodeTiles] = {
    ("cuda", 2, 64): DecodeTiles(tile_tokens=64, split_tokens=256, num_warps=4, num_stages=5),
    ("cuda", 2, 128): DecodeTiles(tile_tokens=64, split_tokens=256, num_warps=4, num_stages=5),
    ("cuda", 4, 64): DecodeTiles(tile_tokens=32, split_tokens=256, num_warps=4, num_stages=2),
    ("cuda", 4, 128): DecodeTiles(tile_tokens=32, split_tokens=256, num_warps=8, num_stages=2),
    ("hip", 2, 64): DecodeTiles(tile_tokens=64, split_tokens=256, num_warps=4, num_stages=2),
    ("hip", 2, 128): DecodeTiles(tile_tokens=64, split_tokens=256, num_warps=4, num_stages=2),
    ("hip", 4, 64): DecodeTiles(tile_tokens=32, split_tokens=256, num_warps=4, num_stages=2),
    ("hip", 4, 128): DecodeTiles(tile_tokens=32, split_tokens=256, num_warps=4, num_stages=2),
}
_PREFILL_TILES: dict[tuple[TargetFamily, int, int], PrefillTiles] = {
    ("cuda", 2, 64): PrefillTiles(tile_queries=128, tile_tokens=64, num_warps=8, num_stages=5),
    ("cuda", 2, 128): PrefillTiles(tile_queries=128, tile_tokens=64, num_warps=8, num_stages=5),
    ("cuda", 4, 64): PrefillTiles(tile_queries=64, tile_tokens=32, num_warps=8, num_stages=2),
    ("cuda", 4, 128): PrefillTiles(tile_queries=32, tile_tokens=16, num_warps=8, num_stages=1),
    ("hip", 2, 64): PrefillTiles(tile_queries=128, tile_tokens=64, num_warps=4, num_stages=2),
    ("hip", 2, 128): PrefillTiles(tile_queries=64, tile_tokens=64, num_warps=4, num_stages=2),
    ("hip", 4, 64): PrefillTiles(tile_queries=64, tile_tokens=32, num_warps=4, num_stages=2),
    ("hip", 4, 128): PrefillTiles(tile_queries=32, tile_tokens=32, num_warps=4, num_stages=2),
}
