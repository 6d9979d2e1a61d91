"""Options of generating requests that decide neither prompt nor sampling."""

from radixserve.api.incoming import Incoming
from radixserve.api.requests import GenerationRequest
from radixserve.api.service import system_fingerprint
from radixserve.core.namespace import encode_namespace
from radixserve.errors import InvalidRequest

MAX_SALT_LENGTH = 256


def includes_usage(request: GenerationRequest) -> bool:
    """Return whether a stream ends with its usage. Raises InvalidRequest for stream_options without a stream."""
    if request.stream_options is None:
        return False
    if not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    return request.stream_options.include_usage or False


def namespace_of(incoming: Incoming, cache_salt: str | None) -> bytes:
    """Return the cache namespace of a tenant's request. Raises InvalidRequest for an empty salt or a long one.

    The tenant is that of the API key: nothing that a caller sends can name another.
    """
    if cache_salt is not None and not 1 <= len(cache_salt) <= MAX_SALT_LENGTH:
        raise InvalidRequest(
            f"cache_salt has {len(cache_salt)} characters; it may have 1 to {MAX_SALT_LENGTH}", param="cache_salt"
        )
    build = system_fingerprint(incoming.ready)
    return encode_namespace(tenant=incoming.tenant, build=build, salt=cache_salt)
