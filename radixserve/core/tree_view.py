"""What a tenant may see of the tree: its own runs and tails, those used last if they are many."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice
from math import inf

from radixserve.core.kv_cache import KVCache
from radixserve.core.radix_node import Node
from radixserve.core.sequence import Sequence
from radixserve.protocol import ShowTree, TreeNode, TreeView

PREVIEW_TOKENS = 48
# To find those used last, so many nodes are looked at, the newest below each other first: MIN_LOOKS take some
# milliseconds.
MIN_LOOKS = 4096
LOOKS_PER_NODE = 8


def show_tree(cache: KVCache, command: ShowTree, running: Iterable[Sequence]) -> TreeView:
    """Return the tenant's nodes. running: its sequences that hold blocks.

    Takes time proportional to max_nodes and the sequences' number, however large the tree is.
    """
    chosen = _Chosen(cache, command)
    request_ids: dict[int, dict[str, None]] = {}
    for sequence in running:
        node = chosen.deepest(cache, sequence)
        if node is not None:
            request_ids.setdefault(node.number, {})[sequence.request.request_id] = None
    nodes = [
        _tree_node(cache, node, depth, list(request_ids.get(node.number, ()))) for node, depth in chosen.depth_first()
    ]
    return TreeView(nodes, cache.tree.num_nodes_of(command.tenant))


class _Chosen:
    """The nodes that are shown: with each the one above it, if that is the tenant's too."""

    def __init__(self, cache: KVCache, command: ShowTree) -> None:
        self._cache = cache
        self._num_unlooked = max(MIN_LOOKS, LOOKS_PER_NODE * command.max_nodes)
        self._depths: dict[int, int] = {}
        # Below a node, by its number; -1 for those at the top. The last used first, as they are chosen.
        self._below: dict[int, list[Node]] = {}
        self._queue: list[tuple[float, int, Node, int, int]] = []
        self._num_queued = 0
        roots_behind: dict[int, list[Node]] = {}
        for root in self._look(cache.tree.roots_of(command.tenant)):
            roots_behind.setdefault(-1 if root.parent is None else root.parent.number, []).append(root)
        for root in roots_behind.pop(-1, ()):
            self._put(root, -1, 1)
        if command.tenant is not None:
            # What they go on from is not the tenant's.
            for root in (root for roots in roots_behind.values() for root in roots):
                self._put(root, -1, 1)
        while self._queue and len(self._depths) < command.max_nodes:
            _, _, node, above, depth = heappop(self._queue)
            if depth > command.max_depth:
                continue
            self._depths[node.number] = depth
            self._below.setdefault(above, []).append(node)
            for parent in (node, *roots_behind.get(node.number, ())):
                self._put(parent, node.number, depth + 1)

    def deepest(self, cache: KVCache, sequence: Sequence) -> Node | None:
        """Return the last node on a sequence's path that is shown."""
        block_ids = cache.findable_blocks(sequence)
        node: Node | None = cache.tree.node_of(block_ids[-1]) if block_ids else None
        while node is not None and node.number not in self._depths:
            node = node.parent
        return node

    def depth_first(self) -> Iterator[tuple[Node, int]]:
        """Yield the nodes with their depths, each before those below it."""
        unseen = self._below.get(-1, [])[::-1]
        while unseen:
            node = unseen.pop()
            yield node, self._depths[node.number]
            unseen += self._below.get(node.number, [])[::-1]

    def _put(self, parent: Node, above: int, depth: int) -> None:
        """Queue what follows a node or a root, to be shown below the node of that number."""
        newest = (node for nodes in reversed(parent.by_first_token.values()) for node in reversed(nodes.values()))
        for node in self._look(newest):
            block_id = node.block_ids[0]
            last_used = inf if self._cache.num_holders(block_id) else self._cache.use.last_used(block_id)
            self._num_queued += 1
            heappush(self._queue, (-last_used, self._num_queued, node, above, depth))

    def _look(self, nodes: Iterator[Node]) -> Iterator[Node]:
        for node in islice(nodes, self._num_unlooked):
            self._num_unlooked -= 1
            yield node


def _tree_node(cache: KVCache, node: Node, depth: int, request_ids: list[str]) -> TreeNode:
    # Whoever holds a block holds those above it, and a pin covers them: the first one says most.
    first = node.block_ids[0]
    num_holders = cache.num_holders(first)
    return TreeNode(
        depth=depth,
        num_tokens_above=node.num_blocks_above * cache.block_size,
        num_tokens=len(node.token_ids),
        num_blocks=len(node.block_ids),
        preview_token_ids=node.token_ids[:PREVIEW_TOKENS].tobytes(),
        num_holders=num_holders,
        request_ids=request_ids,
        seconds_idle=0.0 if num_holders else cache.use.seconds_idle(first),
        num_hits=cache.use.num_hits(first),
        num_pinned_blocks=bisect_left(node.block_ids, True, key=lambda block_id: not cache.is_pinned(block_id)),
        is_tail=node.is_tail,
    )
