"""GET /v1/cache and POST /v1/cache/reset."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixserve.api.body import decode_body, read_body
from radixserve.api.requests import ResetCacheRequest
from radixserve.api.responses import CacheBlocks, CacheReport, CacheRequests, CacheReset, CacheTokens, CacheTree
from radixserve.api.service import service_of
from radixserve.errors import EngineUnavailable
from radixserve.protocol import EngineStats, ResetCache


async def show_cache(request: Request) -> Response:
    """Report blocks and hits, as of the engine's latest step."""
    stats = service_of(request).engine.stats
    if stats is None:
        raise EngineUnavailable("the engine is not ready; it has no cache yet")
    return Response(msgspec.json.encode(cache_report(stats)), media_type="application/json")


async def reset_cache(request: Request) -> Response:
    """Drop every cached block that no running request holds; the running ones are not disturbed."""
    service = service_of(request)
    service.ready()
    # The route takes no fields, so that most clients send no body at all.
    decode_body(await read_body(request) or b"{}", ResetCacheRequest, service.field_check)
    reply = await service.engine.control(ResetCache())
    reset = CacheReset(reply.num_dropped_blocks, reply.num_kept_blocks)
    return Response(msgspec.json.encode(reset), media_type="application/json")


def cache_report(stats: EngineStats) -> CacheReport:
    """Return the engine's figures in the shape of GET /v1/cache."""
    cache = stats.cache
    queried, hit = cache.num_queried_tokens, cache.num_hit_tokens
    return CacheReport(
        block_size=cache.block_size,
        blocks=CacheBlocks(
            total=cache.num_blocks,
            free=cache.num_free_blocks,
            cached=cache.num_cached_blocks,
            in_use=cache.num_in_use_blocks,
            pinned=0,
        ),
        tokens=CacheTokens(
            queried=queried, hit=hit, hit_rate=hit / queried if queried else 0.0, evicted=cache.num_evicted_tokens
        ),
        requests=CacheRequests(running=stats.num_running, waiting=stats.num_waiting),
        tree=CacheTree(nodes=cache.num_tree_nodes, depth=cache.tree_depth),
        tiers=[],
    )
