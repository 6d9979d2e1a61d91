"""Counters of the cache: tokens looked up, found and given up, of all tenants together and of each."""

from collections import defaultdict
from dataclasses import dataclass

from radixserve.core.namespace import is_public, tenant_of


@dataclass(slots=True)
class Counts:
    """Tokens looked up, found and given up. They only ever grow."""

    num_queried: int = 0
    num_hit: int = 0
    num_evicted: int = 0


class TokenCounts:
    """What was counted of all, and of each tenant. Public tokens are nobody's, but they count for who finds them."""

    def __init__(self) -> None:
        self.all = Counts()
        self._of_tenant: defaultdict[str | None, Counts] = defaultdict(Counts)

    def of(self, tenant: str | None) -> Counts:
        """Return a tenant's counts, to be read."""
        return self._of_tenant.get(tenant, Counts())

    def query(self, tenant: str | None, num_queried: int, num_hit: int) -> None:
        """Count the tokens of a tenant's new request, and those of them that were found."""
        for counts in (self.all, self._of_tenant[tenant]):
            counts.num_queried += num_queried
            counts.num_hit += num_hit

    def evict(self, namespace: bytes, num_tokens: int) -> None:
        """Count tokens of a namespace that were given up."""
        self.all.num_evicted += num_tokens
        if not is_public(namespace):
            self._of_tenant[tenant_of(namespace)].num_evicted += num_tokens
