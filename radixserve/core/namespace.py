"""Cache namespaces: prefixes are shared only between requests of equal namespaces."""

from functools import lru_cache

_TENANT = b"t"
_NUM_LENGTH_BYTES = 4


def encode_namespace(
    *, tenant: str | None = None, build: str | None = None, adapter: str | None = None, salt: str | None = None
) -> bytes:
    """Pack typed fields into one key, so that no field's value can pass for another's: not a salt for a tenant.

    Each field is a type byte, a 4-byte length and UTF-8 text. An absent field adds nothing.
    tenant: what the caller's API key names; None for keys without a name. build: the model and how its numbers are
    computed. adapter: what the model's weights are changed by. salt: the caller's own.
    """
    packed = bytearray()
    for kind, value in ((_TENANT, tenant), (b"b", build), (b"a", adapter), (b"s", salt)):
        if value is not None:
            text = value.encode()
            packed += kind + len(text).to_bytes(_NUM_LENGTH_BYTES, "little") + text
    return bytes(packed)


@lru_cache(maxsize=1024)
def tenant_of(namespace: bytes) -> str | None:
    """Return the tenant that a namespace belongs to; None if it names none."""
    if not namespace.startswith(_TENANT):
        return None
    start = len(_TENANT) + _NUM_LENGTH_BYTES
    num_bytes = int.from_bytes(namespace[len(_TENANT) : start], "little")
    return namespace[start : start + num_bytes].decode()
