"""Frames on a byte stream: a 4-byte little-endian length, then that many bytes of msgpack."""

from typing import Any

import msgspec

_HEADER_SIZE = 4
# Far above any message; a length beyond it means that the stream is not what we think it is.
MAX_FRAME_SIZE = 1 << 30

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Any) -> bytes:
    """Return one message of radixserve.protocol as a frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_HEADER_SIZE, "little") + body


class FrameReader:
    """Cuts a byte stream into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take in the next bytes and return the bodies that are complete now. Raises ValueError for a mad length."""
        self._buffer += data
        bodies = []
        start = 0
        while len(self._buffer) - start >= _HEADER_SIZE:
            size = int.from_bytes(self._buffer[start : start + _HEADER_SIZE], "little")
            if size > MAX_FRAME_SIZE:
                raise ValueError(f"a frame of {size} bytes; at most {MAX_FRAME_SIZE} are allowed")
            end = start + _HEADER_SIZE + size
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _HEADER_SIZE : end]))
            start = end
        del self._buffer[:start]
        return bodies
