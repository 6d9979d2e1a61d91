"""Where a sequence's blocks lie in the tree, and by which digests they are found there."""

from radixserve.core.public_prefixes import CachePath, PublicPrefixes
from radixserve.core.radix_tree import BlockDigest
from radixserve.core.sequence import Sequence


class BlockKeys:
    """The path of each request, and the chained digests of each sequence's blocks, computed once and kept there."""

    def __init__(self, public_prefixes: PublicPrefixes, block_size: int, digest: BlockDigest) -> None:
        self._public_prefixes = public_prefixes
        self._block_size = block_size
        self._digest = digest

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
            start = len(digests) * self._block_size
            block = sequence.token_ids[start : start + self._block_size].tobytes()
            parent = digests[-1] if digests else b""
            if len(digests) in (0, path.num_public_blocks):
                parent = self._digest(parent, path.namespace_of(len(digests)))
            digests.append(self._digest(parent, block))
        return digests[index]
