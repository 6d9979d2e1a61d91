"""Prometheus metrics: the engine's figures as they are at the scrape, and counts of HTTP requests."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from radixserve.protocol import EngineStats, TierStats

_OTHER = "other"
# What callers choose must not grow the number of series.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("requests_running", "Sequences that are running", lambda stats: stats.num_running),
    ("requests_waiting", "Sequences that wait", lambda stats: stats.num_waiting),
    ("kv_blocks", "K/V blocks in all", lambda stats: stats.cache.num_blocks),
    ("kv_blocks_free", "K/V blocks that hold nothing", lambda stats: stats.cache.num_free_blocks),
    ("kv_blocks_cached", "K/V blocks that only the tree holds", lambda stats: stats.cache.num_cached_blocks),
    ("kv_blocks_in_use", "K/V blocks that a sequence holds", lambda stats: stats.cache.num_in_use_blocks),
    ("kv_blocks_pinned", "K/V blocks under a pin, cached or in use", lambda stats: stats.cache.num_pinned_blocks),
    ("cache_tree_nodes", "Nodes of the radix tree", lambda stats: stats.cache.num_tree_nodes),
    ("cache_tree_depth", "Depth of the radix tree", lambda stats: stats.cache.tree_depth),
)

# They start again from 0 with the engine; Prometheus' rate() takes that for the reset it is.
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("steps", "Steps of the engine", lambda stats: stats.num_steps),
    ("preemptions", "Sequences put back into the queue", lambda stats: stats.num_preemptions),
    ("computed_tokens", "Tokens whose K/V were computed", lambda stats: stats.num_computed_tokens),
    ("generated_tokens", "Tokens of answers", lambda stats: stats.num_generated_tokens),
    ("requests_started", "Requests that have begun to run", lambda stats: stats.num_started_requests),
    ("queue_seconds", "Time for which started requests had waited", lambda stats: stats.queue_seconds),
    ("overtakes", "Times that a waiting request was overtaken", lambda stats: stats.num_overtakes),
    ("cache_queried_tokens", "Prompt tokens looked up in the cache", lambda stats: stats.cache.num_queried_tokens),
    ("cache_hit_tokens", "Prompt tokens found in the cache", lambda stats: stats.cache.num_hit_tokens),
    ("cache_evicted_tokens", "Tokens whose K/V were given up", lambda stats: stats.cache.num_evicted_tokens),
    ("cache_broken_pins", "Pins ended for a request that was alone", lambda stats: stats.cache.num_broken_pins),
)


# Each with a label that names the tier.
_TIER_GAUGES: tuple[tuple[str, str, Callable[[TierStats], float]], ...] = (
    ("tier_capacity_bytes", "Bytes that a tier may take", lambda tier: tier.capacity_bytes),
    ("tier_used_bytes", "Bytes that a tier takes", lambda tier: tier.used_bytes),
    ("tier_blocks", "K/V blocks in a tier", lambda tier: tier.num_blocks),
    ("tier_on", "Whether a tier takes blocks", lambda tier: tier.is_on),
)
_TIER_COUNTERS: tuple[tuple[str, str, Callable[[TierStats], float]], ...] = (
    ("tier_hit_blocks", "K/V blocks that a tier has given back", lambda tier: tier.num_hit_blocks),
    ("tier_written_blocks", "K/V blocks that were written to a tier", lambda tier: tier.num_written_blocks),
    ("tier_read_blocks", "K/V blocks that were read from a tier's medium", lambda tier: tier.num_read_blocks),
    ("tier_dropped_blocks", "K/V blocks that a tier had no time for", lambda tier: tier.num_dropped_blocks),
    ("tier_failed_blocks", "K/V blocks that were not what was written", lambda tier: tier.num_failed_blocks),
)


class EngineCollector(Collector):
    """Reads the engine's latest stats at each scrape; nothing while there is no engine."""

    def __init__(self, read_stats: Callable[[], EngineStats | None]) -> None:
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each figure."""
        stats = self._read_stats()
        if stats is None:
            return
        for name, description, read in _GAUGES:
            yield GaugeMetricFamily(f"radixserve_{name}", description, value=read(stats))
        for name, description, read in _COUNTERS:
            yield CounterMetricFamily(f"radixserve_{name}", description, value=read(stats))
        for name, description, read_tier in _TIER_GAUGES:
            yield _by_tier(GaugeMetricFamily(f"radixserve_{name}", description, labels=["tier"]), stats, read_tier)
        for name, description, read_tier in _TIER_COUNTERS:
            yield _by_tier(CounterMetricFamily(f"radixserve_{name}", description, labels=["tier"]), stats, read_tier)


def _by_tier(
    family: GaugeMetricFamily | CounterMetricFamily, stats: EngineStats, read: Callable[[TierStats], float]
) -> Metric:
    for tier in stats.cache.tiers:
        family.add_metric([tier.name], read(tier))
    return family


class Metrics:
    """The metrics of one server, in a registry of their own.

    routes: endpoint to path, the values of the label `route`; any other request is "other".
    """

    def __init__(self, routes: Mapping[Any, str], read_stats: Callable[[], EngineStats | None]) -> None:
        self._routes = routes
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(read_stats))
        self._requests = Counter(
            "radixserve_http_requests",
            "HTTP requests that were answered; status 499: the client went away",
            ("route", "method", "status"),
            registry=self._registry,
        )
        self._durations = Histogram(
            "radixserve_http_request_duration_seconds",
            "Time from a request to the end of its answer",
            ("route",),
            buckets=_DURATION_BUCKETS,
            registry=self._registry,
        )
        self._first_tokens = Histogram(
            "radixserve_time_to_first_token_seconds",
            "Time from a request to the first token of its answer",
            ("route",),
            buckets=_DURATION_BUCKETS,
            registry=self._registry,
        )

    def route_of(self, scope: Scope) -> str:
        """Return the path, as declared, of the route that answered a request."""
        return self._routes.get(scope.get("endpoint"), _OTHER)

    def observe_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        self._requests.labels(route, method if method in _METHODS else _OTHER, status).inc()
        self._durations.labels(route).observe(seconds)

    def observe_first_token(self, route: str, seconds: float) -> None:
        """Count the time that a caller waited for the first token."""
        self._first_tokens.labels(route).observe(seconds)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
