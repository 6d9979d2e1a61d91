"""A request that has come in: what every route that reads a body begins with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from radixserve.api.body import decode_body, read_body
from radixserve.api.records import record_of
from radixserve.api.requests import ModelRequest
from radixserve.api.service import Service, service_of
from radixserve.protocol import EngineReady

Shape = TypeVar("Shape", bound=ModelRequest)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Incoming:
    """A body, not decoded yet, whose it is, and the engine that was ready when it came."""

    service: Service
    ready: EngineReady
    body: bytes
    tenant: str | None

    def decode(self, shape: type[Shape]) -> Shape:
        """Return the body as a request for the model that is served. Raises InvalidRequest or ModelNotFound."""
        request = decode_body(self.body, shape, self.service.field_check)
        self.service.check_model(request.model, self.ready)
        return request

    async def in_worker(self, prepare: "Callable[[Incoming], T]") -> T:
        """Return prepare(self), run off the event loop: to check a long text and encode it is slow."""
        return await self.service.run_in_worker(prepare, self)


async def receive(request: Request) -> Incoming:
    """Read a request's body. Raises EngineUnavailable before it does, and BodyTooLarge."""
    service = service_of(request)
    ready = service.ready()
    body = await read_body(request)
    return Incoming(service, ready, body, record_of(request.scope).tenant)
