"""An OpenAI-compatible server, seen from a client: JSON calls, event streams, and one kind of error."""

import ipaddress
import os
from collections.abc import AsyncGenerator
from typing import Any, Self

import httpx
import msgspec

from radixserve.bench.sse import EventDecoder
from radixserve.errors import ConfigError, ServerCallFailed

CONNECT_SECONDS = 10.0
# A slow machine may take minutes over a long prompt before it sends its first byte.
READ_SECONDS = 900.0
_MAX_ERROR_LENGTH = 300

_Json = Any


def server_root(base_url: str) -> httpx.URL:
    """Return what a server's paths begin with. Raises ConfigError if base_url is no server's."""
    root = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        url = httpx.URL(root)
    except httpx.InvalidURL as error:
        raise ConfigError(f"the base URL is {base_url!r}: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"the base URL is {base_url!r}; it must be like http://localhost:8000/v1")
    return url


class Server:
    """The server behind base_url, which may end with /v1 or leave it out.

    Paths are relative to the server's root: /v1/models, /tokenize. Every failure is a ServerCallFailed; a URL that
    is none is a ConfigError. To be closed, or used in `async with`.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        url = server_root(base_url)
        self.root = str(url)
        # Not compressed, so that an event costs the client no more than its bytes.
        headers = {"Accept-Encoding": "identity"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None),
            trust_env=not _is_loopback(url.host),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def get(self, path: str) -> _Json:
        """Return the JSON at path."""
        return await self._call("GET", path, None)

    async def post(self, path: str, body: dict[str, _Json]) -> _Json:
        """Return the JSON that answers body."""
        return await self._call("POST", path, body)

    async def delete(self, path: str) -> _Json:
        """Delete what is at path; return the JSON that answers."""
        return await self._call("DELETE", path, None)

    async def stream(self, path: str, body: dict[str, _Json]) -> AsyncGenerator[list[bytes]]:
        """Post body; yield the data of the events that came together, as they come, [DONE] left out.

        To be read to its end or closed, by contextlib.aclosing: closing it early is how the server learns that
        nobody reads on.
        """
        decoder = EventDecoder()
        request = _json_body(body)
        # llama.cpp's server ends a stream by closing its connection, without a word of it in the head of the response:
        # the next request on that connection would be lost.
        request["headers"] |= {"Connection": "close"}
        try:
            async with self._http.stream("POST", self.root + path, **request) as response:
                if response.is_error:
                    await response.aread()
                    raise _status_error(response)
                async for chunk in response.aiter_bytes():
                    if events := _without_end(decoder.feed(chunk)):
                        yield events
                if events := _without_end(decoder.close()):
                    yield events
        except httpx.HTTPError as error:
            raise self._transport_error(error) from None

    async def first_model(self) -> str:
        """Return the id of the first model that the server lists."""
        listing = await self.get("/v1/models")
        try:
            return str(listing["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ServerCallFailed(f"{self.root} lists no model; name one with --model") from None

    async def _call(self, method: str, path: str, body: dict[str, _Json] | None) -> _Json:
        content = {} if body is None else _json_body(body)
        try:
            response = await self._http.request(method, self.root + path, **content)
        except httpx.HTTPError as error:
            raise self._transport_error(error) from None
        if response.is_error:
            raise _status_error(response)
        try:
            return msgspec.json.decode(response.content)
        except msgspec.DecodeError:
            raise ServerCallFailed(f"{response.url} answered with something that is not JSON") from None

    def _transport_error(self, error: httpx.HTTPError) -> ServerCallFailed:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerCallFailed(f"cannot reach {self.root} ({_reason(error)}); is the server running?")
        return ServerCallFailed(f"the call of {self.root} broke off: {_reason(error)}")


def _without_end(events: list[bytes]) -> list[bytes]:
    return [event for event in events if event != b"[DONE]"]


def _json_body(body: dict[str, _Json]) -> dict[str, _Json]:
    return {"content": msgspec.json.encode(body), "headers": {"Content-Type": "application/json"}}


def _reason(error: httpx.HTTPError) -> str:
    """What the operating system said, which httpx keeps several causes deep; or else what httpx says."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            # asyncio puts an address where the text of a refused connection should be.
            return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
        cause = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def _status_error(response: httpx.Response) -> ServerCallFailed:
    return ServerCallFailed(
        f"{response.url} answered {response.status_code}: {_error_message(response.content)}",
        status=response.status_code,
    )


def _error_message(content: bytes) -> str:
    """The message of OpenAI's error object, of its common variants, or the start of the body."""
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        body = None
    message = body
    for key in ("error", "message"):
        if isinstance(message, dict):
            message = message.get(key, message.get("detail", message))
    text = message if isinstance(message, str) else content.decode(errors="replace")
    return " ".join(text.split())[:_MAX_ERROR_LENGTH]


def _is_loopback(host: str) -> bool:
    """Whether host is this machine, which no proxy of the environment should stand before."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
