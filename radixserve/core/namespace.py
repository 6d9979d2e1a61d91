"""Cache namespaces: prefixes are shared only between requests of equal namespaces."""

from collections.abc import Iterator
from functools import lru_cache

_PUBLIC = b"p"
_TENANT = b"t"
_SALT = b"s"
_NUM_LENGTH_BYTES = 4


def encode_namespace(
    *, tenant: str | None = None, build: str | None = None, adapter: str | None = None, salt: str | None = None
) -> bytes:
    """Pack typed fields into one key, so that no field's value can pass for another's: not a salt for a tenant.

    Each field is a type byte, a 4-byte length and UTF-8 text. An absent field adds nothing.
    tenant: what the caller's API key names; None for keys without a name. build: the model and how its numbers are
    computed. adapter: what the model's weights are changed by. salt: the caller's own.
    """
    values = ((_TENANT, tenant), (b"b", build), (b"a", adapter), (_SALT, salt))
    return b"".join(_encode_field(kind, value) for kind, value in values if value is not None)


@lru_cache(maxsize=1024)
def tenant_of(namespace: bytes) -> str | None:
    """Return the tenant that a namespace belongs to; None if it names none."""
    if not namespace.startswith(_TENANT):
        return None
    return next(_fields(namespace))[1]


@lru_cache(maxsize=1024)
def public_namespace_of(namespace: bytes) -> bytes | None:
    """Return where requests of a namespace find public prefixes: all tenants at one place for each build and adapter.

    None for one with a salt, which asks not to share. No request has the returned namespace for its own.
    """
    fields = dict(_fields(namespace))
    if _SALT in fields:
        return None
    shared = {_PUBLIC: ""} | {kind: value for kind, value in fields.items() if kind != _TENANT}
    return b"".join(_encode_field(kind, value) for kind, value in shared.items())


@lru_cache(maxsize=1024)
def without_salt(namespace: bytes) -> bytes:
    """Return a namespace as it is for the same tenant, build and adapter without a salt."""
    return b"".join(_encode_field(kind, value) for kind, value in _fields(namespace) if kind != _SALT)


def is_public(namespace: bytes) -> bool:
    """Whether a namespace belongs to no tenant: one of public_namespace_of."""
    return namespace.startswith(_PUBLIC)


def _encode_field(kind: bytes, value: str) -> bytes:
    text = value.encode()
    return kind + len(text).to_bytes(_NUM_LENGTH_BYTES, "little") + text


def _fields(namespace: bytes) -> Iterator[tuple[bytes, str]]:
    """Yield the kind and the value of each field."""
    start = 0
    while start < len(namespace):
        begin = start + 1 + _NUM_LENGTH_BYTES
        end = begin + int.from_bytes(namespace[start + 1 : begin], "little")
        yield namespace[start : start + 1], namespace[begin:end].decode()
        start = end
