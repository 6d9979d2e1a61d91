"""The most that any eviction can hit on a trace whose future is known.

Belady's rule, evict what is used again farthest in the future, holds on a tree too. Whoever uses a node uses all nodes
above it, so no node is used again later than one below it: the farthest next use is always found at a leaf, and what
is cached stays a tree.

The nodes of one path whose next use is the same request lie together, and that request's path runs through all of
them. So the state is no tree but a number for each later request: how many cached nodes wait for it. They are its hits.
Source: Belady 1966 (A study of replacement algorithms for a virtual-storage computer).
"""

import heapq
from array import array
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixserve.replay.trace import Trace

Nodes = npt.NDArray[np.int32]


class Use(NamedTuple):
    """One request on the tree of all requests.

    num_ids: nodes on its path. num_known: those on the path of an earlier request. next_users: which request uses a
    node of it next, with the number of nodes, in the order of the path; num_requests stands for none.
    """

    num_ids: int
    num_known: int
    next_users: list[tuple[int, int]]


def look_ahead(trace: Trace) -> list[Use]:
    """Return, for each request, who uses its path again."""
    paths, num_known, num_nodes = _paths(trace)
    next_user = np.full(num_nodes, len(paths), np.int32)
    uses = []
    for number in range(len(paths) - 1, -1, -1):
        path = paths[number]
        users = next_user[path]
        next_user[path] = number
        starts = np.flatnonzero(np.diff(users, prepend=-1))
        lengths = np.diff(starts, append=len(path))
        next_users = list(zip(users[starts].tolist(), lengths.tolist(), strict=True))
        uses.append(Use(len(path), num_known[number], next_users))
    uses.reverse()
    return uses


def optimum(uses: list[Use], capacity_ids: int) -> list[int]:
    """Return how many ids of each request the best eviction finds in a cache that holds capacity_ids.

    A request's own path stays in the cache while it runs. capacity_ids must be at least trace.max_ids.
    """
    waiting_for = [0] * (len(uses) + 1)
    # Negative, so that the heap's front is the farthest. A request may stand in it after its turn, with nothing left.
    farthest: list[int] = []
    num_free = capacity_ids
    num_hits = []
    for number, use in enumerate(uses):
        num_hit = waiting_for[number]
        waiting_for[number] = 0
        num_hits.append(num_hit)
        num_free -= use.num_ids - num_hit
        while num_free < 0:
            user = -farthest[0]
            num_evicted = min(-num_free, waiting_for[user])
            waiting_for[user] -= num_evicted
            num_free += num_evicted
            if not waiting_for[user]:
                heapq.heappop(farthest)
        for user, num_nodes in use.next_users:
            if not waiting_for[user]:
                heapq.heappush(farthest, -user)
            waiting_for[user] += num_nodes
    return num_hits


def _paths(trace: Trace) -> tuple[list[Nodes], list[int], int]:
    """Return the nodes on each request's path, how many of them were known before it, and how many there are."""
    # By node above and id, packed into one integer: of ten million of them, pairs would take a gigabyte.
    node_of: dict[int, int] = {}
    roots: dict[bytes, int] = {}
    # The ids and the path of each namespace's last request, which most often is the beginning of the next one.
    last: dict[bytes, tuple[Nodes, Nodes]] = {}
    paths, num_known = [], []
    num_nodes = 0
    for namespace, packed_ids, _ in trace.requests:
        ids = np.frombuffer(packed_ids, np.int32)
        last_ids, last_path = last.get(namespace, (ids[:0], ids[:0]))
        num_common = _count_common(ids, last_ids)
        if namespace not in roots:
            roots[namespace] = num_nodes
            num_nodes += 1
        node = int(last_path[num_common - 1]) if num_common else roots[namespace]
        path = array("i")
        first_new = num_nodes
        for block in packed_ids[num_common:]:
            node = node_of.setdefault(node << 31 | block, num_nodes)
            num_nodes += node == num_nodes
            path.append(node)
        nodes = np.concatenate([last_path[:num_common], np.frombuffer(path, np.int32)])
        last[namespace] = ids, nodes
        paths.append(nodes)
        num_known.append(int(np.count_nonzero(nodes < first_new)))
    return paths, num_known, num_nodes


def _count_common(left: Nodes, right: Nodes) -> int:
    num_compared = min(len(left), len(right))
    differs = np.flatnonzero(left[:num_compared] != right[:num_compared])
    return int(differs[0]) if len(differs) else num_compared
