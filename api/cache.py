"""GET /v1/cache, POST /v1/cache/reset and POST /v1/cache/save."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixserve.api.body import decode_body, read_body
from radixserve.api.records import record_of
from radixserve.api.requests import ResetCacheRequest, SaveCacheRequest
from radixserve.api.responses import (
    CacheBlocks,
    CacheReport,
    CacheRequests,
    CacheReset,
    CacheSaved,
    CacheTier,
    CacheTokens,
    CacheTree,
)
from radixserve.api.service import service_of
from radixserve.errors import EngineUnavailable, InvalidRequest, OperatorOnly, RequestFailed
from radixserve.protocol import CacheStats, CacheWasReset, EngineStats, ResetCache, ShowTenant, TenantStats, TierStats


async def show_cache(request: Request) -> Response:
    """Report blocks and hits as of the engine's latest step; to a tenant its own alone."""
    engine = service_of(request).engine
    if engine.stats is None:
        raise EngineUnavailable("the engine is not ready; it has no cache yet")
    tenant = record_of(request.scope).tenant
    if tenant is None:
        report = cache_report(engine.stats)
    else:
        # Asked for, as the figures of each tenant after each step would make steps dearer with the number of tenants.
        stats = await engine.control(ShowTenant(tenant))
        assert isinstance(stats, TenantStats)
        report = tenant_report(stats)
    return Response(msgspec.json.encode(report), media_type="application/json")


async def reset_cache(request: Request) -> Response:
    """Drop every cached block of the caller's tenant that no running request holds; those are not disturbed.

    A key that names no tenant drops the blocks of all.
    """
    service = service_of(request)
    service.ready()
    # The route takes no fields, so that most clients send no body at all.
    decode_body(await read_body(request) or b"{}", ResetCacheRequest, service.field_check)
    reply = await service.engine.control(ResetCache(record_of(request.scope).tenant))
    assert isinstance(reply, CacheWasReset)
    reset = CacheReset(reply.num_dropped_blocks, reply.num_kept_blocks)
    return Response(msgspec.json.encode(reset), media_type="application/json")


async def save_cache(request: Request) -> Response:
    """Write what is cached, of all tenants, to the disk, and answer when that is done; the operator's alone."""
    service = service_of(request)
    service.ready()
    decode_body(await read_body(request) or b"{}", SaveCacheRequest, service.field_check)
    if record_of(request.scope).tenant is not None:
        raise OperatorOnly("a save writes the cache of all tenants; use an API key without a tenant's name")
    if service.engine.config.kv_cache_dir is None:
        raise InvalidRequest("there is no disk to save the cache to; start the server with --kv-cache-dir")
    progress = await service.engine.save_cache()
    if progress.error is not None:
        raise RequestFailed(f"the cache was not saved: {progress.error}")
    return Response(msgspec.json.encode(CacheSaved(progress.num_saved_blocks)), media_type="application/json")


def cache_report(stats: EngineStats) -> CacheReport:
    """Return the engine's figures in the shape of GET /v1/cache."""
    cache = stats.cache
    return CacheReport(
        block_size=cache.block_size,
        blocks=CacheBlocks(
            total=cache.num_blocks,
            free=cache.num_free_blocks,
            cached=cache.num_cached_blocks,
            in_use=cache.num_in_use_blocks,
            pinned=cache.num_pinned_blocks,
        ),
        tokens=_tokens(cache),
        requests=CacheRequests(running=stats.num_running, waiting=stats.num_waiting),
        tree=CacheTree(nodes=cache.num_tree_nodes, depth=cache.tree_depth),
        tiers=[_tier(tier) for tier in cache.tiers],
    )


def tenant_report(stats: TenantStats) -> CacheReport:
    """Return a tenant's figures in the same shape."""
    return CacheReport(
        block_size=stats.block_size,
        blocks=CacheBlocks(
            total=stats.num_blocks,
            free=stats.num_blocks - stats.num_cached_blocks - stats.num_in_use_blocks,
            cached=stats.num_cached_blocks,
            in_use=stats.num_in_use_blocks,
            pinned=stats.num_pinned_blocks,
        ),
        tokens=_tokens(stats),
        requests=CacheRequests(running=stats.num_running, waiting=stats.num_waiting),
        tiers=[],
    )


def _tier(tier: TierStats) -> CacheTier:
    return CacheTier(
        name=tier.name,
        is_on=tier.is_on,
        capacity_bytes=tier.capacity_bytes,
        used_bytes=tier.used_bytes,
        blocks=tier.num_blocks,
        hit_blocks=tier.num_hit_blocks,
        written_blocks=tier.num_written_blocks,
        read_blocks=tier.num_read_blocks,
        dropped_blocks=tier.num_dropped_blocks,
        failed_blocks=tier.num_failed_blocks,
    )


def _tokens(stats: CacheStats | TenantStats) -> CacheTokens:
    queried, hit = stats.num_queried_tokens, stats.num_hit_tokens
    return CacheTokens(
        queried=queried, hit=hit, hit_rate=hit / queried if queried else 0.0, evicted=stats.num_evicted_tokens
    )
