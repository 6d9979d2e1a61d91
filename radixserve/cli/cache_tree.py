"""What `radixserve cache tree` shows: GET /v1/cache/tree as a tree of texts."""

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from radixserve.api.responses import CacheTreeNode, CacheTreeView
from radixserve.bench.server import Server
from radixserve.cli.cache_text import printable
from radixserve.diagnosis.wording import duration
from radixserve.errors import ServerCallFailed

PATH = "/v1/cache/tree"
_GUIDE_WIDTH = 4
# Columns that the deepest label keeps.
_LABEL_WIDTH = 44


async def read_tree(server: Server, depth: int | None, max_nodes: int | None, *, width: int) -> Any:
    """Return the server's answer. depth: None takes as many levels as lines of that width can be indented by."""
    query = f"?depth={depth or _num_levels(width)}" + ("" if max_nodes is None else f"&max_nodes={max_nodes}")
    return await server.get(PATH + query)


def tree_view(figures: CacheTreeView, console: Console) -> RenderableType:
    """Return what is printed: a line for each node, cut to the console's width. Raises ServerCallFailed for no tree."""
    if not figures.total_nodes:
        return "nothing is cached"
    root = Tree("", hide_root=True, guide_style="dim")
    num_levels = _num_levels(console.width)
    # What the nodes below each one are added to.
    branches: list[Tree] = []
    for node in figures.nodes:
        if node.parent is not None and node.parent >= len(branches):
            raise ServerCallFailed("the server's answer is not of the expected form: a node comes before its parent")
        above = root if node.parent is None else branches[node.parent]
        label = _label(node, console.encoding)
        if node.depth > num_levels:
            label = Text.assemble((f"level {node.depth}  ", "dim"), label, no_wrap=True, overflow="ellipsis", end="")
        branch = above.add(label)
        # Deeper than lines can be indented, nodes stand below one another.
        branches.append(branch if node.depth < num_levels else above)
    num_left_out = figures.total_nodes - len(figures.nodes)
    if not num_left_out:
        return root
    more = "1 more node is" if num_left_out == 1 else f"{num_left_out:,} more nodes are"
    return Group(root, f"{more} deeper, or too many: see --depth and --max-nodes")


def _num_levels(width: int) -> int:
    """Return how deep lines of that width can be indented."""
    return max(1, (width - _LABEL_WIDTH) // _GUIDE_WIDTH)


def _label(node: CacheTreeNode, encoding: str) -> Text:
    label = Text(no_wrap=True, overflow="ellipsis", end="")
    label.append(f"{node.tokens:,} tokens", style="bold")
    if node.tail:
        label.append(" (tail)", style="dim")
    if node.holders:
        users = f" by {printable(', '.join(node.requests), encoding)}" if node.requests else ""
        label.append(f"  in use{f' x{node.holders}' if node.holders > 1 else ''}{users}", style="green")
    else:
        label.append(f"  idle {duration(node.idle_seconds)}", style="dim")
    if node.pinned_blocks:
        share = "" if node.pinned_blocks == node.blocks else f" {node.pinned_blocks:,} of {node.blocks:,} blocks"
        label.append(f"  pinned{share}", style="yellow")
    if node.hits:
        label.append(f"  {node.hits:,} hit{'s' if node.hits > 1 else ''}", style="cyan")
    rest = "..." if node.preview_tokens < node.tokens else ""
    label.append(f"  {printable(node.preview, encoding)}{rest}")
    return label
