"""Calls from web pages of other origins."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from radixserve.api.error_responses import error_response
from radixserve.errors import InvalidRequest


class Cors(CORSMiddleware):
    """Starlette's CORS, open for every method and header, its refusals in OpenAI's error shape."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a preflight."""
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        refusal = error_response(InvalidRequest("this origin may not make this call; see --cors-origin"))
        refusal.headers.update(
            {key: value for key, value in answer.headers.items() if key.startswith(("access-", "vary"))}
        )
        return refusal
