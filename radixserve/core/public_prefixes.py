"""Public prefixes: beginnings of prompts that the operator lets all tenants share, and the path that a prompt takes."""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from radixserve.core.namespace import public_namespace_of


class CachePath(NamedTuple):
    """The namespaces of a request's blocks: the first num_public_blocks are public, all others are its own.

    Of a path without public blocks, public is not read.
    """

    own: bytes
    public: bytes = b""
    num_public_blocks: int = 0

    def namespace_of(self, index: int) -> bytes:
        """Return the namespace of the block of that number."""
        return self.public if index < self.num_public_blocks else self.own


class PublicPrefixes:
    """Token ids of public prefixes, each of whole blocks."""

    def __init__(self, prefixes: Iterable[Sequence[int]], block_size: int) -> None:
        packed = {array("i", prefix).tobytes() for prefix in prefixes}
        self._num_bytes_of_block = array("i").itemsize * block_size
        assert all(prefix and len(prefix) % self._num_bytes_of_block == 0 for prefix in packed)
        # Of two that a prompt begins with, the longer one counts; equally long ones are different.
        self._prefixes = sorted(packed, key=len, reverse=True)

    def path_of(self, namespace: bytes, prompt: "array[int]") -> CachePath:
        """Return the path of a prompt: through the longest prefix that it begins with, then through its namespace.

        A prefix counts whole or not at all. How far a prompt follows one that it leaves again stays its tenant's own.
        """
        public = public_namespace_of(namespace) if self._prefixes else None
        if public is None:
            return CachePath(namespace)
        packed = memoryview(prompt).cast("B")[: len(self._prefixes[0])].tobytes()
        num_bytes = next((len(prefix) for prefix in self._prefixes if packed.startswith(prefix)), 0)
        return CachePath(namespace, public, num_bytes // self._num_bytes_of_block)
