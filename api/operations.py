"""GET /health, /ready, /metrics and /version: what runs the server asks these."""

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from radixserve.api.records import record_of
from radixserve.api.responses import HealthStatus, VersionReport
from radixserve.api.service import service_of
from radixserve.errors import EngineUnavailable, OperatorOnly
from radixserve.version import __version__

_UNHEALTHY = frozenset({"restarting", "dead"})


async def health(request: Request) -> Response:
    """Answer 200 while the engine is alive, loading included; 503 while it is being started again, or is gone."""
    status = service_of(request).engine.status
    if status in _UNHEALTHY:
        raise EngineUnavailable(f"the engine is {status}")
    return _status(status)


async def ready(request: Request) -> Response:
    """Answer 200 if requests are taken now, else 503."""
    service_of(request).ready()
    return _status("ready")


async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format. Raises OperatorOnly: they add up what all tenants do."""
    if record_of(request.scope).tenant is not None:
        raise OperatorOnly("the metrics are of all tenants; read them with a key that names none")
    return Response(service_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def version(_: Request) -> Response:
    """Return the version of the package."""
    return Response(msgspec.json.encode(VersionReport(__version__)), media_type="application/json")


def _status(status: str) -> Response:
    return Response(msgspec.json.encode(HealthStatus(status)), media_type="application/json")
