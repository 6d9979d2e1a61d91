"""What was cached and is not any more: enough to say of a prompt how much of it was, since when, and why it went."""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from radixserve.core.block_keys import BlockKeys
from radixserve.core.block_use import BlockUse
from radixserve.core.cache_observer import CacheObserver, RemovalReason
from radixserve.core.packed import indices_of
from radixserve.core.pins import Pins
from radixserve.core.radix_tree import Removal
from radixserve.core.sequence import Sequence
from radixserve.protocol import LossReason, LostPrefix

# A piece takes 400 bytes beside the 16 of each of its blocks.
MIN_BLOCKS_PER_PIECE = 16
# What goes from the same path within a second is one piece.
MAX_SECONDS = 1.0

_NUM_BYTES = 16


@dataclass(slots=True, eq=False)
class _Piece:
    """Blocks that followed one another on a path when they went, of one reason.

    digests: their chained ones, the deepest first, as they go: so those above are appended. above: the digest of the
    block above them, b"" if there is none. since: when the first to go went. lost_at, last_used: of the uppermost.
    """

    digests: bytearray
    above: bytes
    reason: LossReason
    since: float
    lost_at: float
    last_used: float

    @property
    def num_blocks(self) -> int:
        return len(self.digests) // _NUM_BYTES

    @property
    def first(self) -> bytes:
        """The digest of the uppermost block."""
        return bytes(self.digests[-_NUM_BYTES:])

    def num_common(self, digests: list[bytes], start: int) -> int:
        """Return how many of its blocks, from the uppermost down, are those with digests from start on."""

        def differs(number: int) -> bool:
            end = len(self.digests) - number * _NUM_BYTES
            return self.digests[end - _NUM_BYTES : end] != digests[start + number]

        # They are chained, so none agrees below one that differs.
        return bisect_left(range(min(self.num_blocks, len(digests) - start)), True, key=differs)


class LostPrefixes(CacheObserver):
    """Remembers which whole blocks, of num_blocks, were evicted or reset, until they are computed again.

    max_lost_blocks: so many at most, in pieces of MIN_BLOCKS_PER_PIECE on average; the oldest are forgotten first. At
    most 40 bytes a block, and less than 20 where prompts are long. Namespaces are told apart by the digests.
    """

    def __init__(
        self,
        block_size: int,
        keys: BlockKeys,
        use: BlockUse,
        pins: Pins,
        num_blocks: int,
        max_lost_blocks: int,
    ) -> None:
        self._block_size = block_size
        self._keys = keys
        self._use = use
        self._pins = pins
        self._max_blocks = max_lost_blocks
        self._max_pieces = max_lost_blocks // MIN_BLOCKS_PER_PIECE
        # Of the blocks in the tree.
        self._digests = np.zeros((num_blocks, _NUM_BYTES), np.uint8)
        self._pieces: OrderedDict[bytes, _Piece] = OrderedDict()
        self._newest: _Piece | None = None
        self._num_blocks = 0

    @property
    def num_pieces(self) -> int:
        """Pieces that are remembered."""
        return len(self._pieces)

    @property
    def num_blocks(self) -> int:
        """Blocks of all pieces."""
        return self._num_blocks

    def behind(self, sequence: Sequence, num_hit_tokens: int) -> LostPrefix | None:
        """Return what of a sequence was lost right behind its hit. Pure."""
        num_full = sequence.num_tokens // self._block_size
        index = num_hit_tokens // self._block_size
        if index >= num_full or not self._pieces:
            return None
        self._keys.digest_of(sequence, num_full - 1)
        digests = sequence.digests
        first = piece = self._pieces.get(digests[index])
        while piece is not None:
            index += piece.num_common(digests, index)
            piece = self._pieces.get(digests[index]) if index < num_full else None
        if first is None:
            return None
        return LostPrefix(
            num_tokens=index * self._block_size - num_hit_tokens,
            reason=first.reason,
            seconds_ago=self._use.now() - first.lost_at,
            idle_seconds=first.lost_at - first.last_used,
        )

    def enter(self, sequence: Sequence, index: int, block_ids: "array[int]") -> None:
        end = index + len(block_ids)
        self._keys.digest_of(sequence, end - 1)
        digests = sequence.digests[index:end]
        packed = np.frombuffer(b"".join(digests), np.uint8)
        self._digests[indices_of(block_ids)] = packed.reshape(-1, _NUM_BYTES)
        if not self._pieces.keys().isdisjoint(digests):
            self._take_back(digests)

    def remove(self, removal: Removal, reason: RemovalReason) -> None:
        # A part-filled block has no digest, and is less than what a prompt is explained by.
        if reason is RemovalReason.COVERED or len(removal.token_ids) < len(removal.block_ids) * self._block_size:
            return
        digests = self._digests[indices_of(removal.block_ids)[::-1]].tobytes()
        above = self._digests[removal.end].tobytes() if removal.end >= 0 else b""
        uppermost = removal.block_ids[0]
        loss, now, last_used = self._loss(uppermost, reason), self._use.now(), self._use.last_used(uppermost)
        below = self._newest
        if (
            below is not None
            and below.above == digests[:_NUM_BYTES]
            and below.reason == loss
            and below.last_used == last_used
            and now - below.since <= MAX_SECONDS
        ):
            self._pop(below.first)
            below.digests += digests
            below.above, below.lost_at = above, now
            self._add(below)
        else:
            self._newest = _Piece(bytearray(digests), above, loss, now, now, last_used)
            self._add(self._newest)
        while len(self._pieces) > self._max_pieces or self._num_blocks > self._max_blocks:
            self._pop(next(iter(self._pieces)))

    def _loss(self, block_id: int, reason: RemovalReason) -> LossReason:
        if reason is RemovalReason.RESET:
            return "reset"
        if self._pins.was_expired(block_id):
            return "expired"
        return "unpinned" if self._pins.was_broken(block_id) else "evicted"

    def _take_back(self, digests: list[bytes]) -> None:
        """Forget the blocks with these digests, which follow one another."""
        index = 0
        while index < len(digests):
            piece = self._pop(digests[index])
            if piece is None:
                index += 1
                continue
            num_common = piece.num_common(digests, index)
            index += num_common
            del piece.digests[-num_common * _NUM_BYTES :]
            piece.above = digests[index - 1]
            if piece.digests:
                self._add(piece)

    def _add(self, piece: _Piece) -> None:
        self._pop(piece.first)
        self._pieces[piece.first] = piece
        self._num_blocks += piece.num_blocks

    def _pop(self, first: bytes) -> _Piece | None:
        piece = self._pieces.pop(first, None)
        if piece is not None:
            self._num_blocks -= piece.num_blocks
        return piece
