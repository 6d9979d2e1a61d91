"""Which prefixes are pinned until when, as the laws of pins say, beside what a cache makes of them."""

from array import array
from collections.abc import Callable, Set
from dataclasses import dataclass
from itertools import count
from math import ceil

from radixserve.core.kv_cache import KVCache
from radixserve.core.public_prefixes import CachePath
from radixserve.core.sequence import Request, Sequence
from radixserve.errors import PinBudgetExceeded
from radixserve.protocol import PinAt

# A block by what it holds: the namespaces of its path, and all tokens up to its last one.
Name = tuple[tuple[bytes, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Prefix:
    """A prefix that a tenant can pin: the namespaces of its blocks, and its tokens."""

    tenant: str | None
    namespaces: tuple[bytes, ...]
    token_ids: tuple[int, ...]

    def names(self, block_size: int) -> set[Name]:
        """Return the names of its blocks."""
        return {
            (self.namespaces[: index + 1], self.token_ids[: (index + 1) * block_size])
            for index in range(len(self.namespaces))
        }


class PinModel:
    """Follows the pins of a cache whose clock stands still but for pass_time.

    expires_at: of each prefix that is pinned, the latest of its ids. prompts: of these, one that begins with it. users:
    the requests that have ever wanted a pin.
    """

    def __init__(self, cache: KVCache, path_of: Callable[[Sequence], CachePath], clock: Callable[[], float]) -> None:
        self.cache = cache
        self.expires_at: dict[Prefix, float] = {}
        self.prompts: dict[Prefix, Sequence] = {}
        self.wanted: dict[Request, list[tuple[Prefix, PinAt]]] = {}
        self.users: set[Request] = set()
        self._path_of = path_of
        self._clock = clock
        self._ids = count()
        self._ids_of: dict[Prefix, dict[str, float]] = {}

    def want(self, sequence: Sequence, num_tokens: int, ttl: float) -> bool:
        """Let a request want a pin. False: it is refused, as it must be if, and only if, it breaks the budget."""
        pin = PinAt(f"p{next(self._ids)}", num_tokens, ttl)
        prefix = self._prefix(sequence, num_tokens)
        num_names = len(self.names() | prefix.names(self.cache.block_size))
        try:
            self.cache.pins.reserve(sequence, [pin])
        except PinBudgetExceeded:
            assert num_names > self.cache.pins.max_blocks
            return False
        assert num_names <= self.cache.pins.max_blocks
        self.wanted.setdefault(sequence.request, []).append((prefix, pin))
        self.users.add(sequence.request)
        return True

    def make(self, sequence: Sequence) -> None:
        """Make what a sequence's request wants of what was just computed and committed."""
        self.cache.pins.make(sequence)
        for prefix, pin in self.wanted.get(sequence.request, [])[:]:
            if pin.num_tokens <= sequence.num_computed_tokens:
                self.wanted[sequence.request].remove((prefix, pin))
                self._ids_of.setdefault(prefix, {})[pin.pin_id] = self._clock() + pin.ttl
                self.expires_at[prefix] = max(self._ids_of[prefix].values())
                self.prompts[prefix] = sequence

    def forget_all_but(self, requests: set[Request]) -> None:
        """Let all other requests have ended."""
        for request in self.wanted.keys() - requests:
            self.cache.pins.forget(request)
            del self.wanted[request]

    def expire(self) -> None:
        """End the pins whose time is over."""
        self.cache.pins.expire()
        self._drop({prefix for prefix, expires_at in self.expires_at.items() if expires_at <= self._clock()})

    def unpin(self, index: int, tenant: str | None) -> None:
        """Let a tenant end some pin, which it may if it is its own, or if it is the tenant without a name."""
        prefix = list(self.expires_at)[index % len(self.expires_at)]
        ids = self._ids_of[prefix]
        pin_id = sorted(ids)[index % len(ids)]
        is_allowed = tenant in (None, prefix.tenant) and ids[pin_id] > self._clock()
        assert self.cache.pins.unpin(pin_id, tenant) == is_allowed
        if is_allowed:
            del ids[pin_id]
            self.expires_at[prefix] = max(ids.values(), default=0.0)
            self._drop({prefix} if self.expires_at[prefix] <= self._clock() else set())

    def reset(self, tenant: str | None) -> None:
        """Take in that the cache of a tenant, or of all for None, was dropped."""
        self._drop({prefix for prefix in self.expires_at if tenant in (None, prefix.tenant)})

    def take_in_broken(self) -> int:
        """Take in which pins are not there any more, and return how many."""
        shown = {pin.pin_id for pin in self.cache.pins.show(None).pins}
        ended = {prefix for prefix in self.expires_at if shown.isdisjoint(self._ids_of[prefix].keys())}
        self._drop(ended)
        return len(ended)

    def names(self) -> set[Name]:
        """Return the names of all blocks that are pinned or to be so."""
        wanted = {prefix for pins in self.wanted.values() for prefix, _ in pins}
        names = (prefix.names(self.cache.block_size) for prefix in self.expires_at.keys() | wanted)
        return set().union(*names)

    def pinned_blocks(self) -> set[int]:
        """Return the blocks that the cache says are pinned."""
        return {block_id for block_id in range(self.cache.num_blocks) if self.cache.is_pinned(block_id)}

    def check(self, requests: set[Request], findable: Set[int], *, finds_all: bool) -> None:
        """What must hold between two steps. requests: of sequences that run. findable: the blocks of the tree.

        finds_all: whether no two blocks have the same digest.
        """
        block_size, pinned = self.cache.block_size, self.pinned_blocks()
        assert self.cache.stats().num_pinned_blocks == len(pinned) <= len(self.names()) <= self.cache.pins.max_blocks
        assert pinned <= findable
        shown = self.cache.pins.show(None)
        assert shown.max_blocks == self.cache.pins.max_blocks
        assert {pin.pin_id: pin.seconds_left for pin in shown.pins} == {
            pin_id: expires_at - self._clock()
            for ids in self._ids_of.values()
            for pin_id, expires_at in ids.items()
            if expires_at > self._clock()
        }
        num_blocks_of = {pin.pin_id: pin.num_blocks for pin in shown.pins}
        for prefix, prompt in self.prompts.items() if finds_all else ():
            request = Request("", prompt.request.params, b"", 0, seed=0, path=self._path_of(prompt))
            match = self.cache.match(Sequence(request, 0, array("i", [*prefix.token_ids, 2])))
            assert pinned.issuperset(match.block_ids)
            # A part-filled block that a sequence still writes to is not found yet, and not evicted either.
            if prompt.request not in requests:
                assert match.num_tokens == len(prefix.token_ids)
                told = {num_blocks_of[pin_id] for pin_id in self._ids_of[prefix].keys() & num_blocks_of.keys()}
                assert told == {len(prefix.namespaces)}
            else:
                assert match.num_tokens >= len(prefix.token_ids) // block_size * block_size

    def _drop(self, prefixes: set[Prefix]) -> None:
        for prefix in prefixes:
            del self.expires_at[prefix], self.prompts[prefix], self._ids_of[prefix]

    def _prefix(self, sequence: Sequence, num_tokens: int) -> Prefix:
        path = self._path_of(sequence)
        namespaces = tuple(path.namespace_of(index) for index in range(ceil(num_tokens / self.cache.block_size)))
        return Prefix(sequence.request.tenant, namespaces, tuple(sequence.token_ids[:num_tokens]))
