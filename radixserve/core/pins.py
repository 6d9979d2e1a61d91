"""Pins: prefixes that are kept in the cache for a time, within a share of the blocks.

A pin is *wanted* from the time a request with it is added, and *made* once the request has computed the prefix. Wanted
ones count in the budget, so that none is refused after its prompt was computed. What counts is blocks by their names,
each once, however many pins share it, and before there is a block of that name.
"""

import hashlib
import heapq
import time
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Reversible
from enum import IntEnum, auto
from itertools import count
from math import ceil

import numpy as np

from radixserve.core.block_keys import BlockKeys
from radixserve.core.block_pool import BlockPool
from radixserve.core.cache_observer import CacheObserver
from radixserve.core.packed import indices_of
from radixserve.core.pin import BlockName, Pin, Prefix, WantedPin
from radixserve.core.public_prefixes import CachePath
from radixserve.core.radix_tree import RadixTree
from radixserve.core.sequence import Request, Sequence
from radixserve.errors import PinBudgetExceeded
from radixserve.protocol import PinAt, PinInfo
from radixserve.protocol import Pins as ShownPins

# Of a pin that is refreshed over and over, those whose time is over first are forgotten.
MAX_IDS_OF_A_PIN = 64
# Below so many entries the order of expiry is not swept.
MIN_SWEPT_ENTRIES = 64
# That a refusal names one by one.
MAX_NAMED_PINS = 8


class _End(IntEnum):
    """Why the last pin on a block ended: CHOSEN by its owner, by a reset, or as its tokens are kept elsewhere."""

    CHOSEN = 0
    EXPIRED = auto()
    BROKEN = auto()


class Pins(CacheObserver):
    """All pins of a cache. They end when their time is over, by their owner, or broken for a request that is alone.

    max_blocks: that they may keep. clock: seconds, from any beginning on.
    num_broken: how many were.
    """

    def __init__(
        self,
        pool: BlockPool,
        tree: RadixTree,
        keys: BlockKeys,
        max_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_blocks = max_blocks
        self.num_broken = 0
        self._pool = pool
        self._tree = tree
        self._keys = keys
        self._clock = clock
        self._pins: dict[Prefix, Pin] = {}
        self._pin_of: dict[str, Pin] = {}
        self._num_pins_of = Counter[BlockName]()
        # Those names, each by itself: the pins of a talk have nearly all of theirs in common, and share them so.
        self._same_name = dict[BlockName, BlockName]()
        # (when, number, pin), the pin's own number if the entry is still meant: one for each that is made, and not
        # later than its time is over.
        self._expiry: list[tuple[float, int, Pin]] = []
        self._numbers = count()
        self._ends = bytearray(pool.num_blocks)

    @property
    def num_blocks(self) -> int:
        """How many blocks are kept."""
        return self._pool.num_pinned

    @property
    def num_budgeted_blocks(self) -> int:
        """How many blocks count in the budget: those kept, and those to be."""
        return len(self._num_pins_of)

    def num_blocks_of(self, tenant: str | None) -> int:
        """How many blocks pins of a tenant keep, in time proportional to these and all pins."""
        return _num_distinct(pin.block_ids for pin in self._pins.values() if pin.tenant == tenant)

    def is_pinned(self, block_id: int) -> bool:
        """Whether a pin keeps a block."""
        return self._pool.num_pins(block_id) > 0

    def was_expired(self, block_id: int) -> bool:
        """Whether the last pin on a block of the tree, or one just removed, ended as its time was over."""
        return self._ends[block_id] == _End.EXPIRED

    def was_broken(self, block_id: int) -> bool:
        """Whether the last pin on a block of the tree, or one just removed, was broken."""
        return self._ends[block_id] == _End.BROKEN

    def reserve(self, sequence: Sequence, wanted: list[PinAt]) -> None:
        """Let a new request, whose one sequence is given, want pins. Raises PinBudgetExceeded; then it wants none."""
        tenant = sequence.request.tenant
        pins = [self._pin_at(sequence, at.num_tokens) for at in wanted]
        new = {pin.prefix: pin for pin in pins if pin.prefix not in self._pins}
        num_new = len({name for pin in new.values() for name in pin.names} - self._num_pins_of.keys())
        if self.num_budgeted_blocks + num_new > self.max_blocks:
            raise self._budget_exceeded(tenant, num_new)
        self._pins.update(new)
        for pin in new.values():
            pin.names = [self._same_name.setdefault(name, name) for name in pin.names]
            self._num_pins_of.update(pin.names)
        for pin, at in zip(pins, wanted, strict=True):
            known = self._pins[pin.prefix]
            known.num_requests += 1
            sequence.request.pins.append(WantedPin(known, at.pin_id, at.ttl))

    def make(self, sequence: Sequence) -> None:
        """Make the pins that a sequence's request wants of what it has computed and committed now."""
        request = sequence.request
        for wanted in request.pins:
            if not wanted.is_made and wanted.pin.num_tokens <= sequence.num_computed_tokens:
                wanted.is_made = True
                wanted.pin.num_requests -= 1
                self._refresh(wanted.pin, wanted.pin_id, self._clock() + wanted.ttl)
                self._cover(sequence, wanted.pin)
        request.pins = [wanted for wanted in request.pins if not (wanted.is_made and wanted.pin.is_covered)]

    def cover_tails(self, sequence: Sequence) -> None:
        """Keep the part-filled last blocks of pins that a sequence's request has made, if they can be found now."""
        for wanted in sequence.request.pins:
            if wanted.pin.expires_at is not None:
                self._cover(sequence, wanted.pin)

    def forget(self, request: Request) -> None:
        """Let an ended request want nothing any more."""
        for wanted in request.pins:
            if not wanted.is_made:
                wanted.pin.num_requests -= 1
                self._drop_if_unwanted(wanted.pin)
        request.pins = []

    def replace_tail(self, block_id: int, covering_id: int) -> None:
        """Let the pins on a tail go over to a block of the tree that holds its tokens and more."""
        for pin in self._pins.values():
            if pin.block_ids and pin.block_ids[-1] == block_id:
                pin.block_ids[-1] = covering_id
                self._pool.pin(array("i", [covering_id]))
                self._pool.unpin(array("i", [block_id]))

    def seconds_until_expiry(self) -> float | None:
        """Return when the next pin's time is over, 0 if expire has something to do; None if there is no pin."""
        entry = self._next_expiry()
        return None if entry is None else max(entry[0] - self._clock(), 0.0)

    def expire(self) -> None:
        """End the pins whose time is over. Their blocks are cached like any other."""
        while (entry := self._next_expiry()) is not None and entry[0] <= self._clock():
            self._end(entry[2], _End.EXPIRED)

    def unpin(self, pin_id: str, tenant: str | None) -> bool:
        """Let a tenant, or anyone if that is None, give an id up. False: there is none such, or its time is over.

        The pin ends with the last of its ids whose time is not over.
        """
        pin = self._pin_of.get(pin_id)
        if pin is None or tenant not in (None, pin.tenant) or pin.ids[pin_id] <= self._clock():
            return False
        del pin.ids[pin_id], self._pin_of[pin_id]
        latest = max(pin.ids.values(), default=0.0)
        if latest <= self._clock():
            self._end(pin, _End.CHOSEN)
        else:
            self._set_expiry(pin, latest)
        return True

    def reset(self, tenant: str | None) -> None:
        """End all pins of a tenant, or of all tenants if that is None. What requests want, they still do."""
        for pin in list(self._pins.values()):
            if tenant in (None, pin.tenant) and pin.expires_at is not None:
                self._end(pin, _End.CHOSEN)

    def break_for(self, num_blocks: int, held: "array[int]") -> bool:
        """End pins so that num_blocks more can be evicted, held left out: the fewest found, those that end first.

        False, and nothing is changed: all pins together do not keep so many.
        """
        chosen: list[Pin] = []
        ended, spared, num_freed = Counter[int](), set(held), 0

        def num_freed_by(pin: Pin) -> int:
            return sum(
                ended[block_id] == self._pool.num_pins(block_id)
                and block_id not in spared
                and self._pool.is_cached(block_id)
                for block_id in pin.block_ids
            )

        for pin in self._made():
            ended.update(pin.block_ids)
            chosen.append(pin)
            num_freed += num_freed_by(pin)
            if num_freed >= num_blocks:
                break
        if num_freed < num_blocks:
            return False
        for pin in sorted(chosen, key=lambda pin: len(pin.block_ids)):
            num_spared = num_freed_by(pin)
            if num_freed - num_spared >= num_blocks:
                chosen.remove(pin)
                ended.subtract(pin.block_ids)
                num_freed -= num_spared
        for pin in chosen:
            self._end(pin, _End.BROKEN)
        self.num_broken += len(chosen)
        return True

    def show(self, tenant: str | None) -> ShownPins:
        """Return the pins of a tenant, or of all tenants if that is None, under each id whose time is not over."""
        now = self._clock()
        shown = [
            PinInfo(pin_id, pin.num_tokens, len(pin.block_ids), expires_at - now)
            for pin in self._made()
            if tenant in (None, pin.tenant)
            for pin_id, expires_at in pin.ids.items()
            if expires_at > now
        ]
        num_listed = _num_distinct(
            pin.names for pin in self._pins.values() if tenant in (None, pin.tenant) and pin.expires_at is not None
        )
        return ShownPins(shown, self.max_blocks, self.num_budgeted_blocks - num_listed)

    def show_one(self, pin_id: str, tenant: str | None) -> ShownPins:
        """Return a pin of a tenant's, or anyone's if that is None, alone; nothing if there is none of that id."""
        now, pin = self._clock(), self._pin_of.get(pin_id)
        if pin is None or tenant not in (None, pin.tenant) or pin.ids[pin_id] <= now:
            return ShownPins([], self.max_blocks, self.num_budgeted_blocks)
        shown = PinInfo(pin_id, pin.num_tokens, len(pin.block_ids), pin.ids[pin_id] - now)
        return ShownPins([shown], self.max_blocks, self.num_budgeted_blocks - len(pin.names))

    # Of what becomes of the cache's blocks, only new content matters here.

    def enter(self, sequence: Sequence, index: int, block_ids: "array[int]") -> None:
        self._set_ends(block_ids, _End.CHOSEN)

    def enter_tail(self, sequence: Sequence, block_id: int) -> None:
        self._set_ends(array("i", [block_id]), _End.CHOSEN)

    def _pin_at(self, sequence: Sequence, num_tokens: int) -> Pin:
        """Return the pin of a sequence's first num_tokens tokens, a new one that is not kept if there is none."""
        num_blocks = -(-num_tokens // self._tree.block_size)
        path = self._keys.path_of(sequence)
        if num_blocks <= path.num_public_blocks:
            path = CachePath(b"", path.public, num_blocks)
        # Names cost a hash a block; who comes back turn after turn with what is pinned already needs only this one.
        digest = hashlib.sha256(memoryview(sequence.token_ids)[:num_tokens]).digest()
        prefix = Prefix(sequence.request.tenant, path, digest)
        return self._pins.get(prefix) or Pin(prefix, num_tokens, self._names(sequence, num_tokens))

    def _names(self, sequence: Sequence, num_tokens: int) -> list[BlockName]:
        """Return the names of the blocks that hold a sequence's first num_tokens tokens."""
        block_size = self._tree.block_size
        num_full = num_tokens // block_size
        names: list[BlockName] = [self._keys.name_of(sequence, index) for index in range(num_full)]
        tail = sequence.token_ids[num_full * block_size : num_tokens]
        if tail:
            above = self._keys.name_of(sequence, num_full - 1) if num_full else b""
            namespace = self._keys.path_of(sequence).namespace_of(num_full)
            names.append((above, namespace, tail.tobytes()))
        return names

    def _refresh(self, pin: Pin, pin_id: str, expires_at: float) -> None:
        """Let a pin live until then at least, under one more id."""
        if len(pin.ids) == MAX_IDS_OF_A_PIN:
            # Before the new one is there, whose maker is still to be told of it.
            first = min(pin.ids, key=pin.ids.__getitem__)
            del pin.ids[first], self._pin_of[first]
        pin.ids[pin_id] = expires_at
        self._pin_of[pin_id] = pin
        if pin.expires_at is None:
            self._set_expiry(pin, expires_at)
        else:
            pin.expires_at = max(pin.expires_at, expires_at)

    def _set_expiry(self, pin: Pin, expires_at: float) -> None:
        pin.number = next(self._numbers)
        pin.expires_at = expires_at
        if len(self._expiry) > 2 * len(self._pins) + MIN_SWEPT_ENTRIES:
            # Pins that ended before their time have left theirs behind.
            self._expiry = [entry for entry in self._expiry if entry[1] == entry[2].number]
            heapq.heapify(self._expiry)
        heapq.heappush(self._expiry, (expires_at, pin.number, pin))

    def _cover(self, sequence: Sequence, pin: Pin) -> None:
        """Keep those blocks of a pin's prefix, which a sequence begins with, that can be found and are not kept yet."""
        if pin.is_covered:
            return
        match = self._tree.find(
            self._keys.path_of(sequence),
            np.frombuffer(sequence.token_ids, np.int32, pin.num_tokens),
            lambda index: self._keys.digest_of(sequence, index),
        )
        block_ids = match.block_ids
        if match.partial_block_id is not None and match.num_tokens == pin.num_tokens:
            block_ids = block_ids + array("i", [match.partial_block_id])
        found = block_ids[len(pin.block_ids) :]
        self._pool.pin(found)
        pin.block_ids += found

    def _end(self, pin: Pin, end: _End) -> None:
        for pin_id in pin.ids:
            del self._pin_of[pin_id]
        pin.ids.clear()
        # Deepest first, so that the order of eviction begins with the ends of leaves.
        block_ids, pin.block_ids = pin.block_ids[::-1], array("i")
        self._set_ends(self._pool.unpin(block_ids), end)
        pin.expires_at, pin.number = None, -1
        self._drop_if_unwanted(pin)

    def _drop_if_unwanted(self, pin: Pin) -> None:
        """Let the blocks of a pin that is neither made nor wanted be no part of the budget."""
        if pin.num_requests or pin.expires_at is not None:
            return
        del self._pins[pin.prefix]
        for name in pin.names:
            self._num_pins_of[name] -= 1
            if not self._num_pins_of[name]:
                del self._num_pins_of[name], self._same_name[name]

    def _next_expiry(self) -> tuple[float, int, Pin] | None:
        """Return the entry of the pin whose time is over first, once those that mean nothing any more are gone."""
        while self._expiry:
            expires_at, number, pin = entry = self._expiry[0]
            if number == pin.number and pin.expires_at == expires_at:
                return entry
            heapq.heappop(self._expiry)
            if number == pin.number and pin.expires_at is not None:
                heapq.heappush(self._expiry, (pin.expires_at, number, pin))
        return None

    def _made(self) -> list[Pin]:
        """Return the pins that are made, those that end first in front."""
        made = [(pin.expires_at, pin.number, pin) for pin in self._pins.values() if pin.expires_at is not None]
        return [pin for _, _, pin in sorted(made)]

    def _set_ends(self, block_ids: "array[int]", end: _End) -> None:
        np.frombuffer(self._ends, np.uint8)[indices_of(block_ids)] = end

    def _budget_exceeded(self, tenant: str | None, num_new: int) -> PinBudgetExceeded:
        made = [pin for pin in self._made() if pin.tenant == tenant]
        named = [
            f"{max(pin.ids, key=pin.ids.__getitem__)} ({_blocks(len(pin.block_ids))}, "
            f"{ceil(max(pin.ids.values()) - self._clock())} s left)"
            for pin in made[:MAX_NAMED_PINS]
        ]
        if len(made) > MAX_NAMED_PINS:
            named.append(f"{len(made) - MAX_NAMED_PINS} more")
        num_made = _num_distinct(pin.names for pin in made)
        num_own = _num_distinct(pin.names for pin in self._pins.values() if pin.tenant == tenant)
        parts = [f"your pins {', '.join(named)}"] if named else []
        parts += [f"{_blocks(num_own - num_made)} for your requests under way"] if num_own > num_made else []
        num_others = self.num_budgeted_blocks - num_own
        parts += [f"{_blocks(num_others)} of others"] if num_others else []
        held = f"held by {'; '.join(parts)}" if parts else "and nothing is pinned"
        return PinBudgetExceeded(
            f"the pin needs {num_new} more K/V blocks, and pins may keep {self.max_blocks} of {self._pool.num_blocks}, "
            f"of which {self.num_budgeted_blocks} are taken, {held}; unpin something, wait, or pin a shorter prefix"
        )


def _num_distinct(paths: Iterable[Reversible[Hashable]]) -> int:
    """Return how many different blocks are on paths. Who shares one shares all above it, so few are looked at twice."""
    seen = set[Hashable]()
    for path in paths:
        for block in reversed(path):
            if block in seen:
                break
            seen.add(block)
    return len(seen)


def _blocks(number: int) -> str:
    return "1 block" if number == 1 else f"{number} blocks"
