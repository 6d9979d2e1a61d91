"""What cached prompts hold where another one leaves them."""

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from radixserve.core.block_use import BlockUse
from radixserve.core.packed import view_of
from radixserve.core.radix_node import Node
from radixserve.core.radix_tree import Place, Tokens, count_common

MAX_PROMPTS = 4
# Runs and tails looked at right below one, and in all: a few milliseconds, however wide the tree is.
MAX_FOLLOWERS = 512
MAX_NODES = 4096


class Continuation(NamedTuple):
    """What a cached prompt holds behind a place. first_block, last_block: those that token_ids begin and end in."""

    token_ids: "array[int]"
    first_block: int
    last_block: int


class _Branch(NamedTuple):
    """A way down: token_ids, of which first_block is the first one's, then those of a node from its block start on."""

    token_ids: "array[int]"
    first_block: int
    node: Node
    start: int = 0


class Continuations:
    """The cached prompts that go on behind a place and share the most tokens with a prompt's rest there.

    num_common: that many tokens. Below a wide node the newest entries are looked at, and no others.
    """

    def __init__(self, place: Place, rest: Tokens, block_size: int, use: BlockUse) -> None:
        self._block_size = block_size
        self._use = use
        self._num_unlooked = MAX_NODES
        node, index, _ = place
        if index < len(node.block_ids):
            entries = [_Branch(array("i"), node.block_ids[index], node, index)]
        else:
            first_token = int(rest[0]) if len(rest) and int(rest[0]) in node.by_first_token else None
            entries = [_Branch(array("i"), below.block_ids[0], below) for below in self._followers(node, first_token)]
        nums_common = [
            count_common(view_of(entry.node.token_ids)[entry.start * block_size :], rest) for entry in entries
        ]
        self.num_common = max(nums_common, default=0)
        self._entries = [
            entry for entry, num_common in zip(entries, nums_common, strict=True) if num_common == self.num_common
        ]

    def take(self, max_tokens: int) -> list[Continuation]:
        """Return MAX_PROMPTS at most, all different, each down to a leaf or its max_tokensth token.

        One for each of the entries that were used last; if these are fewer, then what leaves them deeper down.
        """
        taken: list[Continuation] = []
        unseen = self._last_used_first(self._entries)
        while unseen and len(taken) < MAX_PROMPTS:
            continuation, aside = self._descend(unseen.pop(0), max_tokens)
            # Siblings can differ in nothing but what is cut off.
            if all(continuation.token_ids != other.token_ids for other in taken):
                taken.append(continuation)
            unseen += self._last_used_first(aside)
        return taken

    def _descend(self, branch: _Branch, max_tokens: int) -> tuple[Continuation, list[_Branch]]:
        """Follow what was used last, and return it with what was left aside."""
        token_ids, first_block, node, start = branch
        aside: list[_Branch] = []
        while True:
            first_token = start * self._block_size
            shown = node.token_ids[first_token : first_token + max_tokens - len(token_ids)]
            token_ids = token_ids + shown
            last_block = node.block_ids[start + (len(shown) - 1) // self._block_size]
            below = [] if len(token_ids) == max_tokens else list(self._followers(node))
            if not below:
                return Continuation(token_ids, first_block, last_block), aside
            branches = self._last_used_first(_Branch(token_ids, first_block, other) for other in below)
            aside += branches[1:MAX_PROMPTS]
            node, start = branches[0].node, 0

    def _followers(self, node: Node, first_token: int | None = None) -> Iterator[Node]:
        """Yield what follows a node, the newest first, or of it only what begins with a token."""
        alike = node.by_first_token.values() if first_token is None else [node.by_first_token[first_token]]
        newest = (other for others in reversed(alike) for other in reversed(others.values()))
        for other in islice(newest, min(self._num_unlooked, MAX_FOLLOWERS)):
            self._num_unlooked -= 1
            yield other

    def _last_used_first(self, branches: Iterable[_Branch]) -> list[_Branch]:
        return sorted(
            branches, key=lambda branch: self._use.last_used(branch.node.block_ids[branch.start]), reverse=True
        )
