"""A node of the radix tree, and how deep the tree is."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

# Entries compared for a hit inside a block, newest first: a node with a thousand children must not cost a thousand.
MAX_CANDIDATES = 8


@dataclass(slots=True, eq=False)
class Node:
    """A root (no blocks), a run, or a tail (no digest, fewer tokens than a block).

    parent: of a root None, or the public run at whose end it is. number: names the node in the tree; a root has none.
    num_blocks_above: blocks on the path to the node.
    digest: the chained one of the first block; those of a run's other blocks follow from its tokens.
    children: runs by their digest. by_first_token: runs and tails by their first block, newest last.
    num_removals: how often the last block was taken off; the path to the node stays as it is for as long as the node.
    height: runs and tails on the longest way down, itself included. heights: how many right below have which, the
    roots among them too.
    """

    namespace: bytes
    parent: "Node | None"
    number: int = -1
    num_blocks_above: int = 0
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    block_ids: "array[int]" = field(default_factory=lambda: array("i"))
    digest: bytes = b""
    num_removals: int = 0
    children: dict[bytes, "Node"] = field(default_factory=dict)
    by_first_token: dict[int, dict[int, "Node"]] = field(default_factory=dict)
    height: int = 0
    heights: dict[int, int] = field(default_factory=dict)

    @property
    def is_tail(self) -> bool:
        """Whether this is a part-filled block."""
        return not self.digest and not self.is_root

    @property
    def is_root(self) -> bool:
        """Whether a namespace begins here."""
        return self.number < 0

    @property
    def is_leaf(self) -> bool:
        """Whether nothing follows, in no namespace."""
        return not self.heights

    def followers(self) -> Iterator["Node"]:
        """All runs and tails right below, of the same namespace."""
        return (node for nodes in self.by_first_token.values() for node in nodes.values())

    def candidates(self, first_token: int) -> Iterator["Node"]:
        """The newest runs and tails right below that begin with a token."""
        return islice(reversed(self.by_first_token.get(first_token, {}).values()), MAX_CANDIDATES)


class TreeDepth:
    """How many runs and tails the longest path has, known without a walk: each node counts those below it by height."""

    def __init__(self) -> None:
        self._root_heights: dict[int, int] = {}

    @property
    def depth(self) -> int:
        """Nodes on the longest path, roots left out."""
        return max(self._root_heights, default=0)

    def insert_above(self, upper: Node, lower: Node) -> None:
        """Take in that a node has come between another and what that followed."""
        _count(upper.heights, lower.height, 1)
        upper.height = lower.height + 1
        self.replace(upper.parent, lower.height, upper.height)

    def replace(self, node: Node | None, old: int | None, new: int | None) -> None:
        """Take in that a node has a follower of a new height in place of one of an old, and what that changes above.

        None: there was no such follower, or is none now; as the node, what roots without a parent follow.
        """
        while old != new:
            heights = self._root_heights if node is None else node.heights
            if new is not None:
                _count(heights, new, 1)
            if old is not None:
                _count(heights, old, -1)
            if node is None:
                return
            old, new = node.height, max(heights, default=0) + (not node.is_root)
            node.height = new
            node = node.parent


def _count(counts: dict[int, int], key: int, change: int) -> None:
    counts[key] = counts.get(key, 0) + change
    if not counts[key]:
        del counts[key]
