"""The sequences that wait, a queue for each tenant, and whose turn it is to start one.

Tenants take turns: each starts one request a turn. A turn is counted in requests and not in what they cost, as the
cost depends on what the cache holds. So who starts next is known from who came when (but for requests that let a turn
pass because they wait for a prefix of their own tenant), and a tenant learns nothing from its order but that others are
waiting too. Which of its requests takes a tenant's turn is for its own queue to say.

Source: start-time fair queueing (Goyal, Vin and Cheng 1997), with requests of one length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from radixserve.core.kv_cache import KVCache, Match
from radixserve.core.policy import Policy
from radixserve.core.sequence import Sequence
from radixserve.core.tiers.tiers import CacheTiers
from radixserve.core.waiting import WaitingQueue


@dataclass(slots=True, eq=False)
class _Tenant:
    """number: how many tenants were seen before it. turn: the one in which it is to start its next new request.

    latest_start: how many new requests, of all tenants, had started before its own last one; -1 before the first.
    """

    queue: WaitingQueue
    number: int
    turn: int = 0
    latest_start: int = -1


class TenantQueues:
    """Sequences that hold no blocks, new ones and preempted ones, of all tenants.

    A sequence's request must not start while it is in a queue, as that changes its rank. tiers: what lies below the
    cache, if anything does.
    """

    def __init__(self, policy: Policy, cache: KVCache, tiers: CacheTiers | None = None) -> None:
        self._policy = policy
        self._cache = cache
        self._tiers = tiers
        self._tenants: dict[str | None, _Tenant] = {}
        self._latest_turn = 0
        self._num_started = 0

    def __len__(self) -> int:
        return sum(len(tenant.queue) for tenant in self._tenants.values())

    def num_waiting(self, tenant: str | None) -> int:
        """How many sequences of one tenant wait."""
        return len(self._tenants[tenant].queue) if tenant in self._tenants else 0

    def num_new(self, tenant: str | None) -> int:
        """How many requests of one tenant have not begun to run. Preempted ones are not among them."""
        return self._tenants[tenant].queue.num_new if tenant in self._tenants else 0

    def add(self, sequence: Sequence) -> None:
        """Put a sequence where its rank says, in its tenant's queue."""
        name = sequence.request.tenant
        if name not in self._tenants:
            self._tenants[name] = _Tenant(WaitingQueue(self._policy, self._cache), len(self._tenants))
        tenant = self._tenants[name]
        if not tenant.queue.num_new:
            # Turns that went by while it had nothing to start are lost: they are no debt of the others.
            tenant.turn = max(tenant.turn, self._latest_turn)
        tenant.queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, which must be in its tenant's queue."""
        self._tenants[sequence.request.tenant].queue.remove(sequence)

    def start(self, sequence: Sequence) -> None:
        """Take out a sequence that is to run now; its request has not started yet if it is new."""
        if not sequence.request.has_started:
            tenant = self._tenants[sequence.request.tenant]
            self._latest_turn = tenant.turn
            tenant.turn += 1
            tenant.latest_start = self._num_started
            self._num_started += 1
        self.remove(sequence)

    def awaits_blocks(self, sequence: Sequence, match: Match) -> bool:
        """Whether a sequence, of which match is cached, waits for more to be read from a tier; if so, it is read."""
        return self._tiers is not None and self._tiers.awaits(sequence, match)

    def has_one_before(self, sequence: Sequence) -> bool:
        """Whether someone waits who goes before a running sequence."""
        return any(tenant.queue.has_one_before(sequence) for tenant in self._tenants.values())

    def num_new_ahead(self, sequence: Sequence) -> int:
        """How many requests of the same tenant and priority came before a new one and have not run yet.

        0 for one that has run.
        """
        return self._tenants[sequence.request.tenant].queue.num_new_ahead(sequence)

    def candidates(self) -> Iterator[tuple[Sequence, Match]]:
        """Yield who is to start, one after the other, with what the cache has of it.

        The caller starts each or leaves it where it is. A tenant's turn stays its own while it has others in the round
        (see WaitingQueue.rounds); then the next tenant's comes. Sequences may be removed meanwhile, and none added.
        """
        found = {
            tenant: chain.from_iterable(tenant.queue.rounds()) for tenant in self._tenants.values() if tenant.queue
        }
        while found:
            tenant = min(found, key=_place)
            candidate = next(found[tenant], None)
            if candidate is not None:
                yield candidate
            if candidate is None or not tenant.queue:
                del found[tenant]


def _place(tenant: _Tenant) -> tuple[int, ...]:
    """Return where a tenant's first sequence stands among those of all tenants, the lowest first.

    What was begun goes before what is new: the one by arrival, as it gave way in that order, the other by turns.
    """
    rank = tenant.queue.first_rank
    if rank.is_new:
        return rank.priority, 1, tenant.turn, tenant.latest_start, tenant.number
    return rank.priority, 0, rank.arrival, rank.choice_index
