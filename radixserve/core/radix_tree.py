"""The radix tree: which block holds the K/V of which prefix.

A node is a *run*, blocks that follow one another without a branch, or a *tail*, the part-filled last block of an ended
sequence, always a leaf. Each namespace has a root, and one more behind each end of a public prefix that it goes on
from. What lies below one root is looked for apart from all else. The tree knows tokens and block ids, and nothing of
holders.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from radixserve.core.namespace import is_public, tenant_of
from radixserve.core.packed import indices_of, view_of
from radixserve.core.public_prefixes import CachePath
from radixserve.core.radix_node import Node, TreeDepth
from radixserve.core.tree_walk import CachedRun, walk

# Long runs are compared piece by piece, from this length on: most prompts differ soon, or not at all.
MIN_COMPARED_TOKENS = 512

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
    end: the node of the last full block, by its number, and that node's num_removals: while that block is in a node of
    which both are the same, the full blocks still hold what they held.
    """

    block_ids: "array[int]"
    num_tokens: int
    partial_block_id: int | None
    num_removals: int
    end: tuple[int, int] = (-1, 0)


class Removal(NamedTuple):
    """What a tree has forgotten at the end of a leaf.

    block_ids, token_ids: in the order of the path. end: the block above them; -1 if there is none. is_end_of_leaf:
    whether that is the end of a leaf now.
    """

    block_ids: "array[int]"
    token_ids: "array[int]"
    end: int
    is_end_of_leaf: bool


class Place(NamedTuple):
    """A border between blocks: behind the first num_blocks blocks of a node's run. Any change ends its validity.

    digest: the chained one of the block before it; at a root without a parent, which has none, it is not read.
    """

    node: Node
    num_blocks: int
    digest: bytes


class RadixTree:
    """Find blocks by the tokens they hold, in each namespace. Block ids are below num_blocks."""

    def __init__(self, num_blocks: int, block_size: int, digest: BlockDigest = xxh3_digest) -> None:
        self.block_size = block_size
        self.num_blocks = 0
        self.num_removals = 0
        self._digest = digest
        self._num_blocks_of = Counter[str | None]()
        # By the number of the public run that a root continues, and its namespace.
        self._roots: dict[tuple[int, bytes], Node] = {}
        self._roots_of: dict[str | None, dict[tuple[int, bytes], Node]] = {}
        self._num_nodes_of = Counter[str | None]()
        self._depth = TreeDepth()
        self._nodes: dict[int, Node] = {}
        self._next_number = 0
        # Numbers of nodes, -1 for none: packed, and set for a whole run at once. 64 bits do not run out.
        self._owner = array("q", [-1]) * num_blocks

    @property
    def num_nodes(self) -> int:
        """Runs and tails."""
        return len(self._nodes)

    @property
    def depth(self) -> int:
        """Nodes on the longest path, roots left out."""
        return self._depth.depth

    def __contains__(self, block_id: int) -> bool:
        return self._owner[block_id] >= 0

    def namespace_of(self, block_id: int) -> bytes:
        """Return the namespace that a block of the tree is in."""
        return self._node_of(block_id).namespace

    def num_nodes_of(self, tenant: str | None) -> int:
        """How many nodes are in namespaces of a tenant, public ones being None's."""
        return self._num_nodes_of[tenant]

    def roots_of(self, tenant: str | None) -> Iterator[Node]:
        """Yield the roots of a tenant's namespaces, public ones being None's, the newest first."""
        return reversed(self._roots_of.get(tenant, {}).values())

    def node_of(self, block_id: int) -> Node:
        """Return the node that a block of the tree is in."""
        return self._node_of(block_id)

    def num_blocks_of(self, tenant: str | None) -> int:
        """How many of the blocks are in namespaces of a tenant. Public ones are in none's."""
        return self._num_blocks_of[tenant]

    def find(
        self, path: CachePath, token_ids: Tokens, digest_of: Callable[[int], bytes], known: Match | None = None
    ) -> Match:
        """Return the longest prefix of token_ids that is in the tree. Changes nothing.

        digest_of: chained digest of the tokens' block of that number; asked only for whole blocks, once for each run.
        known: what was found of these tokens, or of fewer, before. What of it still holds is not compared again.
        Below a branch only the newest entries are compared for a hit inside a block, so that part may fall short.
        """
        block_ids, node = self._still_known(known)
        num_public = path.num_public_blocks
        if len(block_ids) < num_public:
            top = node or self._roots.get(_root_key(None, path.public))
            # What follows the public blocks in their own namespace is another public prefix's.
            match = self._descend(top, block_ids, token_ids[: num_public * self.block_size], digest_of)
            if len(match.block_ids) < num_public:
                return match
            block_ids = match.block_ids
        if len(block_ids) == num_public:
            node = self._root(path.own, self._node_of(block_ids[-1]) if num_public else None, num_public)
        return self._descend(node, block_ids, token_ids, digest_of)

    def _descend(
        self, node: Node | None, block_ids: "array[int]", token_ids: Tokens, digest_of: Callable[[int], bytes]
    ) -> Match:
        """Go on from a node, which block_ids end in, as far as the tokens of its namespace are those of token_ids."""
        size = self.block_size
        index = 0 if node is None else len(block_ids) - node.num_blocks_above
        while node is not None:
            rest = token_ids[len(block_ids) * size :]
            run = node
            if index == len(node.block_ids):
                below = node.children.get(digest_of(len(block_ids))) if len(rest) >= size else None
                if below is None:
                    return self._match(block_ids, *self._find_inside(node, rest))
                run, index = below, 0
            num_common = count_common(view_of(run.token_ids)[index * size :], rest)
            if run is not node and num_common < size:
                # An equal digest of other tokens.
                return self._match(block_ids, *self._find_inside(node, rest))
            num_full, num_inside = divmod(num_common, size)
            block_ids += run.block_ids[index : index + num_full]
            index += num_full
            if index < len(run.block_ids):
                return self._match(block_ids, num_inside, run.block_ids[index])
            node = run
        return self._match(block_ids, 0, None)

    def place(self, path: CachePath, block_ids: "array[int]", num_blocks: int, digest: bytes) -> Place:
        """Return where the first num_blocks of block_ids, a path of this tree, end. digest: that of the last one."""
        node = self._node_of(block_ids[num_blocks - 1]) if num_blocks else None
        if node is None or num_blocks == path.num_public_blocks:
            namespace = path.namespace_of(num_blocks)
            root = self._root(namespace, node, num_blocks)
            # An empty namespace has no root; this one becomes it when something is added below.
            return Place(root or Node(namespace, node, num_blocks_above=num_blocks), 0, digest)
        return Place(node, num_blocks - node.num_blocks_above, digest)

    def find_run(self, place: Place, digest: bytes, token_ids: "array[int]") -> "array[int]":
        """Return the full blocks of one node right behind a place whose tokens token_ids begins with.

        digest: that of the first block of token_ids.
        """
        node, index, _ = place
        if index == len(node.block_ids):
            if digest not in node.children:
                return array("i")
            node, index = node.children[digest], 0
        rest = view_of(node.token_ids)[index * self.block_size :]
        num_common = count_common(rest, view_of(token_ids))
        return node.block_ids[index : index + num_common // self.block_size]

    def add_run(self, place: Place, digest: bytes, token_ids: "array[int]", block_ids: "array[int]") -> Place | None:
        """Add full blocks behind a place where find_run finds none, and return the place as it is then.

        None, and nothing is changed: there is a block of other tokens with the same digest.
        """
        node, index, _ = place
        if digest == self._digest_behind(place) if index < len(node.block_ids) else digest in node.children:
            return None
        place = self._open(place)
        node = place.node
        if not node.is_root and node.is_leaf:
            node.token_ids += token_ids
            node.block_ids += block_ids
            self._own(node, block_ids)
            self._count_blocks(node, len(block_ids))
        else:
            self._add(node, token_ids, block_ids, digest)
        return place

    def add_tail(self, place: Place, token_ids: "array[int]", block_id: int) -> Place:
        """Add a part-filled block behind a place, and return the place as it is then."""
        place = self._open(place)
        self._add(place.node, token_ids, array("i", [block_id]), b"")
        return place

    def covers(self, place: Place, token_ids: "array[int]") -> bool:
        """Whether an entry right behind a place begins with token_ids, less than a block of them."""
        node, index, _ = place
        num_tokens = len(token_ids)
        if index < len(node.block_ids):
            start = index * self.block_size
            return node.token_ids[start : start + num_tokens] == token_ids
        return any(other.token_ids[:num_tokens] == token_ids for other in node.candidates(token_ids[0]))

    def find_shorter_tails(self, place: Place, token_ids: "array[int]") -> list[int]:
        """Return the blocks of the tails right behind a place whose tokens token_ids begins with and exceeds."""
        node, index, _ = place
        if index < len(node.block_ids):
            return []
        return [
            other.block_ids[0]
            for other in node.candidates(token_ids[0])
            if len(other.token_ids) < len(token_ids) and token_ids[: len(other.token_ids)] == other.token_ids
        ]

    def is_tail(self, block_id: int, num_tokens: int) -> bool:
        """Whether the block, one of the tree's, is a tail of exactly num_tokens tokens."""
        node = self._node_of(block_id)
        return node.is_tail and len(node.token_ids) == num_tokens

    def is_end_of_leaf(self, block_id: int) -> bool:
        """Whether a block of the tree has nothing below it."""
        node = self._node_of(block_id)
        return node.is_leaf and node.block_ids[-1] == block_id

    def last_blocks(self, block_id: int, num_blocks: int) -> "array[int]":
        """Return the last num_blocks of the run that a block of the tree is in, or all if they are fewer."""
        return self._node_of(block_id).block_ids[-num_blocks:]

    def remove(self, block_id: int, num_blocks: int = 1) -> Removal:
        """Forget a block that nothing follows, and as many above it in its run that num_blocks are gone."""
        node = self._node_of(block_id)
        assert node.is_leaf
        node.num_removals += 1
        block_ids = node.block_ids[-num_blocks:]
        assert len(block_ids) == num_blocks
        assert block_ids[-1] == block_id
        self.num_removals += 1
        self._count_blocks(node, -num_blocks)
        for removed in block_ids:
            self._owner[removed] = -1
        if num_blocks == len(node.block_ids):
            above = node.parent
            if above is not None and above.is_root:
                above = above.parent
            self._unlink(node)
            if above is None:
                return Removal(block_ids, node.token_ids, -1, False)
            return Removal(block_ids, node.token_ids, above.block_ids[-1], above.is_leaf)
        del node.block_ids[-num_blocks:]
        token_ids = node.token_ids[-num_blocks * self.block_size :]
        del node.token_ids[-len(token_ids) :]
        return Removal(block_ids, token_ids, node.block_ids[-1], True)

    def walk(self) -> Iterator[CachedRun]:
        """Yield every run and tail, each before those below it. Not to be continued after a change."""
        return walk(self._roots.values(), self.block_size)

    def _match(self, block_ids: "array[int]", num_inside: int, block_id: int | None) -> Match:
        num_tokens = len(block_ids) * self.block_size + num_inside
        match = Match(block_ids, num_tokens, block_id if num_inside else None, self.num_removals)
        if not block_ids:
            return match
        node = self._node_of(block_ids[-1])
        return match._replace(end=(node.number, node.num_removals))

    def _still_known(self, known: Match | None) -> tuple["array[int]", Node | None]:
        """Return the full blocks of an earlier match with the node of the last one, or none if they may be others."""
        if known is not None and known.block_ids:
            node = self._nodes.get(self._owner[known.block_ids[-1]])
            if node is not None and (node.number, node.num_removals) == known.end:
                return known.block_ids[:], node
        return array("i"), None

    def _find_inside(self, node: Node, rest: Tokens) -> tuple[int, int | None]:
        """Return how many tokens of one block below a node rest begins with, and the block."""
        best = (0, False)
        block_id = None
        for other in node.candidates(int(rest[0])) if len(rest) else ():
            num_common = count_common(view_of(other.token_ids)[: self.block_size], rest)
            # Of equal hits a tail that ends right there is the better one: it can be taken over without a copy.
            rank = (num_common, num_common == len(other.token_ids))
            if rank > best:
                best, block_id = rank, other.block_ids[0]
        return best[0], block_id

    def _root(self, namespace: bytes, above: Node | None, num_blocks_above: int) -> Node | None:
        """Return the root of a namespace that begins behind so many blocks, the last one in the run above, if any."""
        root = self._roots.get(_root_key(above, namespace))
        return root if root is not None and root.num_blocks_above == num_blocks_above else None

    def _node_of(self, block_id: int) -> Node:
        return self._nodes[self._owner[block_id]]

    def _own(self, node: Node, block_ids: "array[int]") -> None:
        np.frombuffer(self._owner, np.int64)[indices_of(block_ids)] = node.number

    def _new_node(self, parent: Node, num_blocks_above: int, digest: bytes) -> Node:
        node = Node(parent.namespace, parent, self._next_number, num_blocks_above, digest=digest, height=1)
        self._nodes[node.number] = node
        self._num_nodes_of[tenant_of(node.namespace)] += 1
        self._next_number += 1
        return node

    def _add(self, parent: Node, token_ids: "array[int]", block_ids: "array[int]", digest: bytes) -> None:
        if parent.is_root and parent.is_leaf:
            self._add_root(parent)
            self._depth.replace(parent.parent, None, parent.height)
        node = self._new_node(parent, parent.num_blocks_above + len(parent.block_ids), digest)
        node.token_ids += token_ids
        node.block_ids += block_ids
        self._own(node, block_ids)
        self._count_blocks(node, len(block_ids))
        self._link(node)
        self._depth.replace(parent, None, node.height)

    def _link(self, node: Node) -> None:
        """Make a node known to its parent, in the place of the one that began with the same block if there is one."""
        parent = node.parent
        assert parent is not None
        if not node.is_tail:
            parent.children[node.digest] = node
        parent.by_first_token.setdefault(node.token_ids[0], {})[node.block_ids[0]] = node

    def _unlink(self, node: Node) -> None:
        """Take a leaf out of the tree, and with it what it alone kept apart: its root, or its parent's run in two."""
        parent = node.parent
        assert parent is not None
        if not node.is_tail:
            del parent.children[node.digest]
        siblings = parent.by_first_token[node.token_ids[0]]
        del siblings[node.block_ids[0]]
        if not siblings:
            del parent.by_first_token[node.token_ids[0]]
        self._forget(node)
        self._depth.replace(parent, node.height, None)
        above: Node | None = parent
        if parent.is_root and parent.is_leaf:
            above = parent.parent
            self._remove_root(parent)
            self._depth.replace(above, parent.height, None)
        if above is not None and not above.is_root and len(above.children) == 1 and sum(above.heights.values()) == 1:
            self._merge(above)

    def _digest_behind(self, place: Place) -> bytes:
        """Return the chained digest of the block behind a place inside a run."""
        node, index, digest = place
        block = node.token_ids[index * self.block_size : (index + 1) * self.block_size]
        return self._digest(digest, block.tobytes())

    def _open(self, place: Place) -> Place:
        """Make a place one to add to, at the end of a node, and return it as it is then."""
        root, _, digest = place
        if root.is_root and root.parent is not None:
            inside = Place(root.parent, root.num_blocks_above - root.parent.num_blocks_above, digest)
            root.parent = self._split(inside).node
            return place
        return self._split(place)

    def _split(self, place: Place) -> Place:
        """End a run at a place, and return the place as it is then.

        The node keeps the lower part: however many nodes follow it, they need not be told.
        """
        lower, index, digest = place
        if index == len(lower.block_ids):
            return place
        assert lower.parent is not None
        lower_digest = self._digest_behind(place)
        upper = self._new_node(lower.parent, lower.num_blocks_above, lower.digest)
        upper.token_ids += lower.token_ids[: index * self.block_size]
        upper.block_ids += lower.block_ids[:index]
        del lower.token_ids[: index * self.block_size]
        del lower.block_ids[:index]
        self._own(upper, upper.block_ids)
        self._link(upper)
        lower.parent, lower.digest, lower.num_blocks_above = upper, lower_digest, lower.num_blocks_above + index
        self._link(lower)
        self._depth.insert_above(upper, lower)
        return Place(upper, index, digest)

    def _merge(self, upper: Node) -> None:
        """Make one run of a node and the only one that follows it."""
        (lower,) = upper.followers()
        lower.token_ids = upper.token_ids + lower.token_ids
        lower.block_ids = upper.block_ids + lower.block_ids
        lower.parent, lower.digest, lower.num_blocks_above = upper.parent, upper.digest, upper.num_blocks_above
        self._own(lower, upper.block_ids)
        self._link(lower)
        self._forget(upper)
        self._depth.replace(lower.parent, upper.height, lower.height)

    def _add_root(self, root: Node) -> None:
        key = _root_key(root.parent, root.namespace)
        self._roots[key] = root
        self._roots_of.setdefault(tenant_of(root.namespace), {})[key] = root

    def _remove_root(self, root: Node) -> None:
        key, tenant = _root_key(root.parent, root.namespace), tenant_of(root.namespace)
        del self._roots[key], self._roots_of[tenant][key]
        if not self._roots_of[tenant]:
            del self._roots_of[tenant]

    def _forget(self, node: Node) -> None:
        del self._nodes[node.number]
        tenant = tenant_of(node.namespace)
        self._num_nodes_of[tenant] -= 1
        if not self._num_nodes_of[tenant]:
            del self._num_nodes_of[tenant]

    def _count_blocks(self, node: Node, change: int) -> None:
        self.num_blocks += change
        if not is_public(node.namespace):
            self._num_blocks_of[tenant_of(node.namespace)] += change


def _root_key(above: Node | None, namespace: bytes) -> tuple[int, bytes]:
    return -1 if above is None else above.number, namespace


def count_common(left: Tokens, right: Tokens) -> int:
    """Return how many leading tokens are equal, in time proportional to that."""
    num_tokens = min(len(left), len(right))
    start, end = 0, MIN_COMPARED_TOKENS
    while start < num_tokens:
        end = min(end, num_tokens)
        differs: npt.NDArray[Any] = left[start:end] != right[start:end]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, end = end, 8 * end
    return num_tokens
