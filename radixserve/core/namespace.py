"""Cache namespaces: prefixes are shared only between requests of equal namespaces."""


def encode_namespace(*, tenant: str | None = None, salt: str | None = None) -> bytes:
    """Pack typed fields into one key, so that no tenant's name can equal another's salt.

    Each field is a type byte, a 4-byte length and UTF-8 text. An absent field adds nothing.
    """
    packed = bytearray()
    for kind, value in ((b"t", tenant), (b"s", salt)):
        if value is not None:
            text = value.encode()
            packed += kind + len(text).to_bytes(4, "little") + text
    return bytes(packed)
