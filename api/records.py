"""What is known of one HTTP request while it is answered, and what is left of it: a log line and metrics."""

import logging
import re
import time
import uuid
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixserve.api.error_responses import CLIENT_CLOSED_REQUEST
from radixserve.api.metrics import Metrics
from radixserve.api.responses import Usage

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_QUIET_ROUTES = frozenset({"/health", "/ready", "/metrics"})


@dataclass(slots=True)
class RequestRecord:
    """One request. request_id is for people and logs: nothing inside the server is found by it.

    status: None until an answer starts. error: what ended an answer that had started.
    """

    request_id: str
    started_at: float = field(default_factory=time.monotonic)
    tenant: str | None = None
    status: int | None = None
    usage: Usage | None = None
    error: str | None = None


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of the request that is being answered."""
    record = scope["state"]["record"]
    assert isinstance(record, RequestRecord)
    return record


class RecordRequests:
    """Middleware, the outermost: keep a RequestRecord, send x-request-id, and log and count each request."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request and record it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(Headers(scope=scope).get("x-request-id")))
        scope.setdefault("state", {})["record"] = record

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_recorded)
        finally:
            self._finish(scope, record)

    def _finish(self, scope: Scope, record: RequestRecord) -> None:
        duration = time.monotonic() - record.started_at
        route = self._metrics.route_of(scope)
        status = record.status or CLIENT_CLOSED_REQUEST
        self._metrics.observe_request(route, scope["method"], status, duration)
        # repr: a path may hold line breaks, which would forge lines of the log.
        line = f"{scope['method']} {scope['path'][:200]!r} {status} in {duration:.3f} s"
        if record.usage is not None:
            usage = record.usage
            cached = usage.prompt_tokens_details.cached_tokens
            line += f", {usage.prompt_tokens} prompt tokens ({cached} cached), {usage.completion_tokens} generated"
        if record.error is not None:
            line += f", ended by an error: {record.error}"
        logger.log(logging.DEBUG if route in _QUIET_ROUTES else logging.INFO, "%s [%s]", line, record.request_id)


def _request_id(sent: str | None) -> str:
    """Return the caller's id if it is short and plain, else a new one."""
    if sent is not None and _REQUEST_ID.fullmatch(sent):
        return sent
    return f"req-{uuid.uuid4().hex}"
