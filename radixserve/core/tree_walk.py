"""The tree as it is shown: all runs and tails, in order."""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from radixserve.core.radix_node import Node


class CachedRun(NamedTuple):
    """One node, as a walk shows it.

    depth: nodes on the path down to this one, 1 below the root. num_tokens_above: position of its first token.
    block_ids: one for each block_size tokens; a tail has fewer tokens and one block.
    """

    namespace: bytes
    depth: int
    num_tokens_above: int
    token_ids: "array[int]"
    block_ids: "array[int]"


def walk(roots: Iterable[Node], block_size: int) -> Iterator[CachedRun]:
    """Yield every run and tail below the roots, each before those below it. Not to be continued after a change."""
    roots_behind: dict[int, list[Node]] = {}
    for root in roots:
        roots_behind.setdefault(-1 if root.parent is None else root.parent.number, []).append(root)
    for top in roots_behind.get(-1, ()):
        unseen = [(node, 1) for node in top.followers()]
        while unseen:
            node, depth = unseen.pop()
            num_tokens_above = node.num_blocks_above * block_size
            yield CachedRun(node.namespace, depth, num_tokens_above, node.token_ids[:], node.block_ids[:])
            for above in (node, *roots_behind.get(node.number, ())):
                unseen.extend((other, depth + 1) for other in above.followers())
