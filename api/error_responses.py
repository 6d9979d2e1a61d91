"""OpenAI's error shape for everything that is not a 2xx."""

import logging
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixserve.errors import RequestError, RequestFailed

logger = logging.getLogger(__name__)

# Seconds. A queue moves with every step; an engine that loads or is started again takes longer.
RETRY_AFTER = {429: "1", 503: "5"}

_CODES = {404: "not_found", 405: "method_not_allowed"}
_INTERNAL_ERROR = RequestFailed("the server failed on this request; its log has the details")

# nginx's number for a client that closed its connection; seen in logs and metrics only, as nobody is left to read it.
CLIENT_CLOSED_REQUEST = 499


class ErrorBody(msgspec.Struct, frozen=True):
    """What is wrong, of which kind, in which field, and the kind's short name."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The whole body of an error answer, and the data of an error event in a stream."""

    error: ErrorBody


def encode_error(error: RequestError) -> bytes:
    """Return the JSON of an error."""
    return msgspec.json.encode(ErrorEnvelope(ErrorBody(error.message, error.type, error.param, error.code)))


def error_response(error: RequestError) -> Response:
    """Return the answer to a request that failed, with Retry-After where trying again can help."""
    headers = {"www-authenticate": "Bearer"} if error.status == HTTPStatus.UNAUTHORIZED else {}
    if error.status in RETRY_AFTER:
        headers["retry-after"] = RETRY_AFTER[error.status]
    return Response(encode_error(error), error.status, headers, media_type="application/json")


def public_error(error: Exception) -> RequestError:
    """Return what a caller may know of an error: all of a RequestError, nothing of any other."""
    return error if isinstance(error, RequestError) else _INTERNAL_ERROR


async def on_request_error(_: Request, error: Exception) -> Response:
    """Answer an error that a route raised on purpose."""
    return error_response(public_error(error))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answer the router's own refusals, 404 and 405."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    message = {
        404: f"there is no route {path}",
        405: f"{path} does not take {request.method}",
    }.get(error.status_code, str(error.detail))
    body = ErrorBody(message, "invalid_request_error", None, _CODES.get(error.status_code))
    return Response(
        msgspec.json.encode(ErrorEnvelope(body)), error.status_code, error.headers, media_type="application/json"
    )


async def on_client_disconnect(_: Request, __: Exception) -> Response:
    """End a request whose client went away while its body was being read."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


class AnswerUnexpectedErrors:
    """Middleware: answer a bug with a 500 in the same shape as all errors, and log what happened."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; an error after the first byte is raised again, and the server closes the connection."""
        has_started = False

        async def send_watched(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        except Exception as error:
            if scope["type"] != "http" or has_started:
                raise
            logger.exception("%s %r failed", scope["method"], scope["path"][:200])
            await error_response(public_error(error))(scope, receive, send)
