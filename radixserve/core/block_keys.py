"""Where a sequence's blocks lie in the tree, by which digests they are found there, and their names outside of it."""

import hashlib
from functools import lru_cache

from radixserve.core.block_store import OWNER_BYTES
from radixserve.core.namespace import is_public, tenant_of
from radixserve.core.public_prefixes import CachePath, PublicPrefixes
from radixserve.core.radix_tree import BlockDigest
from radixserve.core.sequence import Sequence


class BlockKeys:
    """The path of each request, and the chained digests and names of each sequence's blocks, computed once and kept.

    A digest is fast, and finds a block whose tokens are then compared. A name goes where tokens do not, to a disk or
    another process, so it is cryptographic: equal names are equal builds, namespaces and tokens, from the first one on.
    It begins with its owner's mark, so that all that is one tenant's can be dropped where nothing else tells of it.
    build: what K/V depends on beside the tokens.
    """

    def __init__(
        self, public_prefixes: PublicPrefixes, block_size: int, digest: BlockDigest, build: bytes = b""
    ) -> None:
        self._public_prefixes = public_prefixes
        self._block_size = block_size
        self._digest = digest
        self._build_name = _sha256(b"radixserve block names 1", build)

    def path_of(self, sequence: Sequence) -> CachePath:
        """Return the path of a sequence's blocks."""
        request = sequence.request
        if request.path is None:
            # Of the prompt alone, so that a sequence keeps its path while its answer grows.
            prompt = sequence.token_ids[: request.num_prompt_tokens]
            request.path = self._public_prefixes.path_of(request.namespace, prompt)
        return request.path

    def digest_of(self, sequence: Sequence, index: int) -> bytes:
        """Return the chained digest of a sequence's block of that number, which must be full."""
        digests, path = sequence.digests, self.path_of(sequence)
        while len(digests) <= index:
            parent = digests[-1] if digests else b""
            if len(digests) in (0, path.num_public_blocks):
                parent = self._digest(parent, path.namespace_of(len(digests)))
            digests.append(self._digest(parent, self._block(sequence, len(digests))))
        return digests[index]

    def name_of(self, sequence: Sequence, index: int) -> bytes:
        """Return the name, NAME_BYTES long, of a sequence's block of that number, which must be full."""
        names, path = sequence.names, self.path_of(sequence)
        while len(names) <= index:
            parent = names[-1] if names else self._build_name
            owner = parent[:OWNER_BYTES]
            if len(names) in (0, path.num_public_blocks):
                namespace = path.namespace_of(len(names))
                owner = owner_of(None if is_public(namespace) else tenant_of(namespace))
                parent = _sha256(parent, namespace)
            names.append(owner + _sha256(parent, self._block(sequence, len(names))))
        return names[index]

    def _block(self, sequence: Sequence, index: int) -> bytes:
        start = index * self._block_size
        return sequence.token_ids[start : start + self._block_size].tobytes()


@lru_cache(maxsize=1024)
def owner_of(tenant: str | None) -> bytes:
    """Return what the names of a tenant's blocks begin with; zeros for None, and in names of public blocks."""
    return bytes(OWNER_BYTES) if tenant is None else hashlib.sha256(tenant.encode()).digest()[:OWNER_BYTES]


def _sha256(parent: bytes, content: bytes) -> bytes:
    """Return the name of what follows a parent. A namespace and a block are told apart by where they can follow."""
    return hashlib.sha256(len(parent).to_bytes(4, "little") + parent + content).digest()
