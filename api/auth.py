"""API keys, and the tenants that they name."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from radixserve.api.error_responses import error_response
from radixserve.api.records import record_of
from radixserve.config import split_api_key
from radixserve.errors import InvalidApiKey

# Probes carry no key; neither does a browser's preflight, an OPTIONS request, which no route acts on.
OPEN_PATHS = frozenset({"/health", "/ready"})


class ApiKeys:
    """The keys that callers may send, each KEY or tenant=KEY; none at all lets everyone in.

    Keys without a name belong to one tenant, None; keys of the same name share a tenant.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        # Digests have one length, so that a comparison does not tell that of a key.
        self._keys: list[tuple[bytes, str | None]] = []
        for entry in entries:
            tenant, key = split_api_key(entry)
            self._keys.append((_digest(key.encode()), tenant))

    def find_tenant(self, authorization: str | None) -> str | None:
        """Return the tenant of an Authorization header. Raises InvalidApiKey if it holds no known key."""
        if not self._keys:
            return None
        scheme, _, token = (authorization or "").partition(" ")
        # Headers come as Latin-1; keys are compared as the bytes that were sent. To strip() alone some bytes of a
        # character are spaces too.
        sent = _digest(token.strip(" \t").encode("latin-1") if scheme.lower() == "bearer" else b"")
        found: list[str | None] = []
        for key, tenant in self._keys:
            # Every key is compared, whichever fits, so that the time taken tells nothing.
            if hmac.compare_digest(sent, key):
                found.append(tenant)
        if not found:
            raise InvalidApiKey("send a valid API key as 'Authorization: Bearer KEY'")
        return found[0]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class RequireApiKey:
    """Middleware: let a request through if it carries a known key, and note its tenant."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request on."""
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and scope["path"] not in OPEN_PATHS:
            try:
                record_of(scope).tenant = self._keys.find_tenant(Headers(scope=scope).get("authorization"))
            except InvalidApiKey as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
