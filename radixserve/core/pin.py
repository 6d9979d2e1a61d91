"""What keeps a prefix in the cache for some time, and a request's wish for it."""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from radixserve.core.public_prefixes import CachePath

# The name of a full block; of a part-filled one the name of the block above, the namespace, and its tokens.
BlockName = bytes | tuple[bytes, bytes, bytes]


class Prefix(NamedTuple):
    """What tells a pin from others: whose it is, where its blocks lie, and the SHA-256 digest of its tokens."""

    tenant: str | None
    path: CachePath
    digest: bytes


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix that is pinned, or to be so once a request has computed it.

    names: of all its blocks. block_ids: those of them that are kept, from the first one on; all unless the last one,
    part-filled, cannot be found yet. num_requests: how many are still to compute the prefix.
    expires_at: on the cache's clock, the latest of ids; None while the pin is not made. ids: of those who want it, and
    when the time of each is over. number: that of its entry in the order of expiry.
    """

    prefix: Prefix
    num_tokens: int
    names: list[BlockName]
    block_ids: "array[int]" = field(default_factory=lambda: array("i"))
    num_requests: int = 0
    expires_at: float | None = None
    ids: dict[str, float] = field(default_factory=dict)
    number: int = -1

    @property
    def is_covered(self) -> bool:
        """Whether all blocks of the prefix are kept."""
        return len(self.block_ids) == len(self.names)

    @property
    def tenant(self) -> str | None:
        """Whose it is."""
        return self.prefix.tenant


@dataclass(slots=True, eq=False)
class WantedPin:
    """A request's wish: to know a pin under an id, for ttl seconds. is_made: whether it was granted."""

    pin: Pin
    pin_id: str
    ttl: float
    is_made: bool = False
