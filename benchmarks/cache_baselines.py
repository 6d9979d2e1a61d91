"""Prefix caches to measure the radix tree against, in the two usual ways and as small as they can be.

Both find, share, give back and evict blocks as an engine needs it, on ordinary Python objects, and leave out what the
measured paths do not reach: hits inside a block, copies, forks.
"""

import heapq
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count

from radixserve.core.radix_tree import xxh3_digest

TokenIds = list[int]


@dataclass(slots=True)
class Block:
    """What the dictionary knows of a block."""

    block_id: int
    key: bytes = b""
    refcount: int = 0


class DigestDictionary:
    """One entry for each block, by the chained digest of everything up to its end, and a queue of unheld blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._by_key: dict[bytes, Block] = {}
        self._unheld: OrderedDict[int, Block] = OrderedDict((index, Block(index)) for index in range(num_blocks))

    def digests(self, token_ids: TokenIds) -> list[bytes]:
        """Return the chained digests of the full blocks."""
        keys = []
        parent = b""
        for end in range(self._block_size, len(token_ids) + 1, self._block_size):
            parent = xxh3_digest(parent, array("i", token_ids[end - self._block_size : end]).tobytes())
            keys.append(parent)
        return keys

    def attach(self, keys: list[bytes]) -> list[Block]:
        """Hold the blocks of the longest cached prefix."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        for block in found:
            if not block.refcount:
                del self._unheld[block.block_id]
            block.refcount += 1
        return found

    def take(self, num_blocks: int) -> list[Block]:
        """Give out new blocks, evicting the longest unheld ones."""
        taken = []
        for _ in range(num_blocks):
            _, block = self._unheld.popitem(last=False)
            if block.key:
                del self._by_key[block.key]
                block.key = b""
            block.refcount = 1
            taken.append(block)
        return taken

    def commit(self, keys: list[bytes], blocks: list[Block]) -> None:
        """Let others find computed blocks."""
        for key, block in zip(keys, blocks, strict=True):
            block.key = key
            self._by_key[key] = block

    def release(self, blocks: list[Block]) -> None:
        """Give blocks back, deepest first."""
        for block in reversed(blocks):
            block.refcount -= 1
            if not block.refcount:
                self._unheld[block.block_id] = block


@dataclass(slots=True)
class TreeNode:
    """A run of whole blocks. num_locks: sequences that hold it, or a node below it."""

    parent: "TreeNode | None" = None
    token_ids: TokenIds = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    children: dict[tuple[int, ...], "TreeNode"] = field(default_factory=dict)
    num_locks: int = 0
    last_used: int = 0


class LockedTree:
    """A radix tree compared token by token, whose nodes count the sequences that hold them; leaves go by age."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._root = TreeNode(num_locks=1)
        self._free = list(range(num_blocks))
        self._clock = count()
        self._leaves: list[tuple[int, int, TreeNode]] = []

    def attach(self, token_ids: TokenIds) -> tuple[TreeNode, list[int]]:
        """Lock the longest cached prefix, and return where it ends and its blocks."""
        node, num_found, block_ids = self._root, 0, list[int]()
        while child := node.children.get(self._key(token_ids, num_found)):
            num_common = self._num_common_blocks(child, token_ids, num_found)
            if num_common < len(child.block_ids):
                child = self._split(child, num_common)
            block_ids.extend(child.block_ids)
            num_found += num_common * self._block_size
            node = child
        self._lock(node, 1)
        return node, block_ids

    def take(self, num_blocks: int) -> list[int]:
        """Give out new blocks, evicting the leaves that were not used for longest."""
        while len(self._free) < num_blocks:
            _, _, leaf = heapq.heappop(self._leaves)
            if leaf.num_locks or leaf.children or leaf.parent is None:
                continue
            self._free.extend(leaf.block_ids)
            parent, leaf.parent = leaf.parent, None
            del parent.children[self._key(leaf.token_ids, 0)]
            self._note_leaf(parent)
        taken = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        return taken

    def commit(self, node: TreeNode, token_ids: TokenIds, block_ids: list[int]) -> TreeNode:
        """Let others find computed blocks right below a locked node, and lock them in its place."""
        child = TreeNode(node, token_ids, block_ids, num_locks=1)
        node.children[self._key(token_ids, 0)] = child
        return child

    def release(self, node: TreeNode) -> None:
        """Give a path back."""
        self._lock(node, -1)

    def _key(self, token_ids: TokenIds, start: int) -> tuple[int, ...]:
        return tuple(token_ids[start : start + self._block_size])

    def _num_common_blocks(self, node: TreeNode, token_ids: TokenIds, start: int) -> int:
        num_common = 0
        for left, right in zip(node.token_ids, token_ids[start:], strict=False):
            if left != right:
                break
            num_common += 1
        return num_common // self._block_size

    def _split(self, node: TreeNode, num_blocks: int) -> TreeNode:
        num_tokens = num_blocks * self._block_size
        upper = TreeNode(node.parent, node.token_ids[:num_tokens], node.block_ids[:num_blocks], {}, node.num_locks)
        assert node.parent is not None
        node.parent.children[self._key(upper.token_ids, 0)] = upper
        node.parent, node.token_ids, node.block_ids = upper, node.token_ids[num_tokens:], node.block_ids[num_blocks:]
        upper.children[self._key(node.token_ids, 0)] = node
        return upper

    def _lock(self, node: TreeNode, change: int) -> None:
        now = next(self._clock)
        end: TreeNode | None = node
        while end is not None:
            end.num_locks += change
            end.last_used = now
            end = end.parent
        self._note_leaf(node)

    def _note_leaf(self, node: TreeNode) -> None:
        if not node.num_locks and not node.children and node.parent is not None:
            heapq.heappush(self._leaves, (node.last_used, id(node), node))
