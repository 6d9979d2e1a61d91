"""The radix tree: which block holds the K/V of which prefix.

One root for each namespace. A node is a *run*, blocks that follow one another without a branch, or a *tail*, the
part-filled last block of an ended sequence, always a leaf. The tree knows tokens and block ids, and nothing of holders.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from radixserve.core.namespace import tenant_of

DIGEST_SIZE = 16
# Entries compared for a hit inside a block, newest first: a node with a thousand children must not cost a thousand.
MAX_CANDIDATES = 8

BlockDigest = Callable[[bytes, bytes], bytes]
Tokens = npt.NDArray[np.int32]


def xxh3_digest(parent: bytes, content: bytes) -> bytes:
    """Return the 16-byte digest of a block's int32 token ids below a parent digest, or of a namespace below b""."""
    return xxhash.xxh3_128_digest(parent + content)


class Match(NamedTuple):
    """What a lookup found of a prefix.

    block_ids: the full blocks, in order. num_tokens: tokens whose K/V were found, those inside one more block included.
    partial_block_id: the block whose first num_tokens % block_size tokens match, or None if there are none.
    num_removals: the tree's at the time of the lookup; once it has moved on, the block ids may be another prefix's.
    """

    block_ids: "array[int]"
    num_tokens: int
    partial_block_id: int | None
    num_removals: int


class CachedRun(NamedTuple):
    """One node, as RadixTree.walk shows it.

    depth: nodes on the path down to this one, 1 below the root. num_tokens_above: position of its first token.
    block_ids: one for each block_size tokens; a tail has fewer tokens and one block.
    """

    namespace: bytes
    depth: int
    num_tokens_above: int
    token_ids: "array[int]"
    block_ids: "array[int]"


@dataclass(slots=True, eq=False)
class Node:
    """A root (no parent, no blocks), a run, or a tail (no digests, fewer tokens than a block).

    num_blocks_above: blocks on the path from the root. digests: DIGEST_SIZE bytes for each block.
    children: runs by the digest of their first block. by_first_token: runs and tails, newest last.
    """

    namespace: bytes
    parent: "Node | None"
    depth: int
    num_blocks_above: int = 0
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    block_ids: "array[int]" = field(default_factory=lambda: array("i"))
    digests: bytearray = field(default_factory=bytearray)
    children: dict[bytes, "Node"] = field(default_factory=dict)
    by_first_token: dict[int, dict["Node", None]] = field(default_factory=dict)

    @property
    def is_tail(self) -> bool:
        """Whether this is a part-filled block."""
        return not self.digests and self.parent is not None

    @property
    def is_leaf(self) -> bool:
        """Whether neither runs nor tails follow."""
        return not self.by_first_token

    def followers(self) -> Iterator["Node"]:
        """All runs and tails right below."""
        return (node for nodes in self.by_first_token.values() for node in nodes)

    def candidates(self, first_token: int) -> Iterator["Node"]:
        """The newest runs and tails right below that begin with a token."""
        return islice(reversed(self.by_first_token.get(first_token, {})), MAX_CANDIDATES)


class Place(NamedTuple):
    """A border between blocks: behind the first num_blocks blocks of a node's run. Any removal ends its validity."""

    node: Node
    num_blocks: int


class RadixTree:
    """Find blocks by the tokens they hold, in each namespace. Block ids are below num_blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_nodes = 0
        self.num_blocks = 0
        self.num_removals = 0
        self.depth = 0
        self._num_nodes_at = Counter[int]()
        self._num_blocks_of = Counter[str | None]()
        self._roots: dict[bytes, Node] = {}
        self._owner: list[Node | None] = [None] * num_blocks

    def __contains__(self, block_id: int) -> bool:
        return self._owner[block_id] is not None

    def tenant_of(self, block_id: int) -> str | None:
        """Return whose namespace a block of the tree is in."""
        node = self._owner[block_id]
        assert node is not None
        return tenant_of(node.namespace)

    def num_blocks_of(self, tenant: str | None) -> int:
        """How many of the blocks are in namespaces of a tenant."""
        return self._num_blocks_of[tenant]

    def find(self, namespace: bytes, token_ids: Tokens, digest_of: Callable[[int], bytes]) -> Match:
        """Return the longest prefix of token_ids that is in the tree. Changes nothing.

        digest_of: chained digest of the tokens' block of that number; asked only for whole blocks, once for each run.
        Below a branch only the newest entries are compared for a hit inside a block, so that part may fall short.
        """
        size = self.block_size
        block_ids = array("i")
        node = self._roots.get(namespace)
        while node is not None:
            rest = token_ids[len(block_ids) * size :]
            child = node.children.get(digest_of(len(block_ids))) if len(rest) >= size else None
            num_common = _count_common(child.token_ids, rest) if child is not None else 0
            if child is None or num_common < size:
                # No such block, or one with an equal digest and other tokens.
                return self._match(block_ids, *self._find_inside(node, rest))
            block_ids += child.block_ids[: num_common // size]
            if num_common < len(child.token_ids):
                return self._match(block_ids, num_common % size, child.block_ids[num_common // size])
            node = child
        return self._match(block_ids, 0, None)

    def place(self, namespace: bytes, block_ids: "array[int]", num_blocks: int) -> Place:
        """Return where the first num_blocks of block_ids, a path of this tree, end."""
        if not num_blocks:
            # An empty namespace has no root; this one becomes it when something is added below.
            return Place(self._roots.get(namespace) or Node(namespace, parent=None, depth=0), 0)
        node = self._owner[block_ids[num_blocks - 1]]
        assert node is not None
        return Place(node, num_blocks - node.num_blocks_above)

    def find_block(self, place: Place, digest: bytes) -> tuple[int, "array[int]"] | None:
        """Return id and tokens of the full block with that digest right behind a place. The tokens may be others."""
        node, index = place
        if index < len(node.block_ids):
            if node.digests[index * DIGEST_SIZE : (index + 1) * DIGEST_SIZE] != digest:
                return None
        elif digest in node.children:
            node, index = node.children[digest], 0
        else:
            return None
        return node.block_ids[index], node.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def add_block(self, place: Place, digest: bytes, token_ids: "array[int]", block_id: int) -> None:
        """Add a full block behind a place where find_block finds none. The place stays valid."""
        self._split(place)
        node = place.node
        if node.parent is not None and node.is_leaf:
            node.token_ids += token_ids
            node.block_ids.append(block_id)
            node.digests += digest
            self._owner[block_id] = node
            self._count_block(node, 1)
        else:
            self._add(node, token_ids, block_id, digest)

    def add_tail(self, place: Place, token_ids: "array[int]", block_id: int) -> None:
        """Add a part-filled block behind a place. The place stays valid."""
        self._split(place)
        self._add(place.node, token_ids, block_id, b"")

    def covers(self, place: Place, token_ids: "array[int]") -> bool:
        """Whether an entry right behind a place begins with token_ids, less than a block of them."""
        node, index = place
        num_tokens = len(token_ids)
        if index < len(node.block_ids):
            start = index * self.block_size
            return node.token_ids[start : start + num_tokens] == token_ids
        return any(other.token_ids[:num_tokens] == token_ids for other in node.candidates(token_ids[0]))

    def find_shorter_tails(self, place: Place, token_ids: "array[int]") -> list[int]:
        """Return the blocks of the tails right behind a place whose tokens token_ids begins with and exceeds."""
        node, index = place
        if index < len(node.block_ids):
            return []
        return [
            other.block_ids[0]
            for other in node.candidates(token_ids[0])
            if len(other.token_ids) < len(token_ids) and token_ids[: len(other.token_ids)] == other.token_ids
        ]

    def is_tail(self, block_id: int, num_tokens: int) -> bool:
        """Whether the block, one of the tree's, is a tail of exactly num_tokens tokens."""
        node = self._owner[block_id]
        assert node is not None
        return node.is_tail and len(node.token_ids) == num_tokens

    def remove(self, block_id: int) -> int:
        """Forget a block that nothing follows, and return how many tokens it held."""
        node = self._owner[block_id]
        assert node is not None
        assert node.is_leaf
        assert node.block_ids[-1] == block_id
        self.num_removals += 1
        self._count_block(node, -1)
        self._owner[block_id] = None
        if len(node.block_ids) == 1:
            self._unlink(node)
            return len(node.token_ids)
        node.block_ids.pop()
        del node.token_ids[-self.block_size :]
        del node.digests[-DIGEST_SIZE:]
        return self.block_size

    def walk(self) -> Iterator[CachedRun]:
        """Yield every node, each before those below it. Not to be continued after a change."""
        for namespace, root in self._roots.items():
            unseen = list(root.followers())
            while unseen:
                node = unseen.pop()
                num_tokens_above = node.num_blocks_above * self.block_size
                yield CachedRun(namespace, node.depth, num_tokens_above, node.token_ids[:], node.block_ids[:])
                unseen.extend(node.followers())

    def _match(self, block_ids: "array[int]", num_inside: int, block_id: int | None) -> Match:
        num_tokens = len(block_ids) * self.block_size + num_inside
        return Match(block_ids, num_tokens, block_id if num_inside else None, self.num_removals)

    def _find_inside(self, node: Node, rest: Tokens) -> tuple[int, int | None]:
        """Return how many tokens of one block below a node rest begins with, and the block."""
        best = (0, False)
        block_id = None
        for other in node.candidates(int(rest[0])) if len(rest) else ():
            num_common = _count_common(other.token_ids[: self.block_size], rest)
            # Of equal hits a tail that ends right there is the better one: it can be taken over without a copy.
            rank = (num_common, num_common == len(other.token_ids))
            if rank > best:
                best, block_id = rank, other.block_ids[0]
        return best[0], block_id

    def _add(self, parent: Node, token_ids: "array[int]", block_id: int, digest: bytes) -> None:
        node = Node(parent.namespace, parent, parent.depth + 1, parent.num_blocks_above + len(parent.block_ids))
        node.token_ids += token_ids
        node.block_ids.append(block_id)
        node.digests += digest
        self._owner[block_id] = node
        self._count_block(node, 1)
        self._link(node)

    def _link(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        if parent.parent is None:
            self._roots[parent.namespace] = parent
        if not node.is_tail:
            parent.children[bytes(node.digests[:DIGEST_SIZE])] = node
        parent.by_first_token.setdefault(node.token_ids[0], {})[node] = None
        self._count(node.depth, 1)

    def _unlink(self, node: Node) -> None:
        """Take a leaf out of the tree, and with it what it alone kept apart: its root, or its parent's run in two."""
        parent = node.parent
        assert parent is not None
        if not node.is_tail:
            del parent.children[bytes(node.digests[:DIGEST_SIZE])]
        siblings = parent.by_first_token[node.token_ids[0]]
        del siblings[node]
        if not siblings:
            del parent.by_first_token[node.token_ids[0]]
        self._count(node.depth, -1)
        if parent.parent is None:
            if parent.is_leaf:
                del self._roots[parent.namespace]
        elif len(parent.children) == 1 and sum(1 for _ in islice(parent.followers(), 2)) == 1:
            self._merge(parent)

    def _split(self, place: Place) -> None:
        """End a node's run at a place. The node keeps the upper part, so a place in it stays valid."""
        upper, index = place
        if index == len(upper.block_ids):
            return
        lower = Node(
            upper.namespace,
            upper,
            upper.depth + 1,
            upper.num_blocks_above + index,
            upper.token_ids[index * self.block_size :],
            upper.block_ids[index:],
            upper.digests[index * DIGEST_SIZE :],
            upper.children,
            upper.by_first_token,
        )
        del upper.token_ids[index * self.block_size :]
        del upper.block_ids[index:]
        del upper.digests[index * DIGEST_SIZE :]
        upper.children, upper.by_first_token = {}, {}
        self._adopt(lower, lower, 1)
        self._link(lower)

    def _merge(self, upper: Node) -> None:
        """Make one run of a node and the only one that follows it."""
        (lower,) = upper.followers()
        upper.token_ids += lower.token_ids
        upper.block_ids += lower.block_ids
        upper.digests += lower.digests
        upper.children, upper.by_first_token = lower.children, lower.by_first_token
        self._count(lower.depth, -1)
        self._adopt(upper, lower, -1)

    def _adopt(self, owner: Node, moved: Node, num_deeper: int) -> None:
        """Point the blocks and followers of a moved run at the node that has them now, and shift what is below."""
        for block_id in moved.block_ids:
            self._owner[block_id] = owner
        below = list(moved.followers())
        for node in below:
            node.parent = owner
        while below:
            node = below.pop()
            self._count(node.depth, -1)
            node.depth += num_deeper
            self._count(node.depth, 1)
            below.extend(node.followers())

    def _count_block(self, node: Node, change: int) -> None:
        self.num_blocks += change
        self._num_blocks_of[tenant_of(node.namespace)] += change

    def _count(self, depth: int, change: int) -> None:
        """Count nodes by depth, so that the depth of the tree is known without a walk."""
        self.num_nodes += change
        self._num_nodes_at[depth] += change
        self.depth = max(self.depth, depth)
        while self.depth and not self._num_nodes_at[self.depth]:
            self.depth -= 1


def _count_common(left: "array[int]", right: Tokens) -> int:
    """Return how many leading tokens are equal."""
    num_tokens = min(len(left), len(right))
    differs: npt.NDArray[Any] = np.frombuffer(left, np.int32, num_tokens) != right[:num_tokens]
    first = int(differs.argmax())
    return first if differs[first] else num_tokens
