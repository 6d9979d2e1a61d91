"""GET /v1/cache/tree: what is cached, as a tree."""

import codecs
from array import array

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixserve.api.records import record_of
from radixserve.api.responses import CacheTreeNode, CacheTreeView
from radixserve.api.service import service_of
from radixserve.errors import IntrospectionOff, InvalidRequest
from radixserve.protocol import ShowTree, TreeNode, TreeView
from radixserve.tokenizer.tokenizer import Tokenizer

# The engine builds the view between two steps, so it must not take long.
MAX_DEPTH = 1_000
MAX_NODES = 10_000
DEFAULT_DEPTH = 32
DEFAULT_NODES = 1_000
_DECODE_UTF_8 = codecs.getincrementaldecoder("utf-8")


async def show_tree(request: Request) -> Response:
    """Show what the caller's tenant has cached, down to a depth. Raises IntrospectionOff, InvalidRequest."""
    service = service_of(request)
    if not service.engine.config.enable_cache_introspection:
        raise IntrospectionOff(
            "the tree shows what prompts hold; the operator lets callers see it by --enable-cache-introspection"
        )
    max_depth = _number(request, "depth", DEFAULT_DEPTH, MAX_DEPTH)
    max_nodes = _number(request, "max_nodes", DEFAULT_NODES, MAX_NODES)
    view = await service.engine.control(ShowTree(record_of(request.scope).tenant, max_depth, max_nodes))
    assert isinstance(view, TreeView)
    # Now, as a request that ends meanwhile takes its name with it.
    names = [[service.engine.name_of(request_id) for request_id in node.request_ids] for node in view.nodes]
    body = await service.run_in_worker(_encode, view, names, service.engine.tokenizer)
    return Response(body, media_type="application/json")


def preview_text(tokenizer: Tokenizer, token_ids: bytes, *, begins_text: bool) -> str:
    """Return the text of packed int32 token ids that may begin or end inside a character: it is left out there.

    begins_text: whether nothing stands before them, so that they cannot begin inside a character.
    """
    data = b"".join(tokenizer.token_bytes(token_id) for token_id in array("i", token_ids))
    start = 0
    # The rest of a character that began before has up to three bytes, each 10xxxxxx.
    while not begins_text and start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return _DECODE_UTF_8("replace").decode(data[start:])


def _number(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > len(str(most)) or not 1 <= int(text) <= most:
        raise InvalidRequest(f"{name} is {text[:50]!r}; it must be a whole number from 1 to {most}", param=name)
    return int(text)


def _encode(view: TreeView, names: list[list[str | None]], tokenizer: Tokenizer) -> bytes:
    nodes: list[CacheTreeNode] = []
    path: list[int] = []
    for number, (node, requests) in enumerate(zip(view.nodes, names, strict=True)):
        del path[node.depth - 1 :]
        nodes.append(_node(node, number, path[-1] if path else None, requests, tokenizer))
        path.append(number)
    return msgspec.json.encode(CacheTreeView(nodes, view.num_nodes))


def _node(
    node: TreeNode, number: int, parent: int | None, requests: list[str | None], tokenizer: Tokenizer
) -> CacheTreeNode:
    return CacheTreeNode(
        id=number,
        parent=parent,
        depth=node.depth,
        position=node.num_tokens_above,
        tokens=node.num_tokens,
        blocks=node.num_blocks,
        preview=preview_text(tokenizer, node.preview_token_ids, begins_text=not node.num_tokens_above),
        preview_tokens=len(node.preview_token_ids) // 4,
        holders=node.num_holders,
        # One that has ended since has no name, and holds nothing any more.
        requests=sorted({name for name in requests if name is not None}),
        idle_seconds=round(node.seconds_idle, 3),
        hits=node.num_hits,
        pinned_blocks=node.num_pinned_blocks,
        tail=node.is_tail,
    )
