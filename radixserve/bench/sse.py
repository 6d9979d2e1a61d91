"""Server-sent events, out of the bytes of a response."""


class EventDecoder:
    """Split a byte stream into the data of its events; the other fields of an event are dropped.

    Source: the HTML standard, "Server-sent events", section on interpreting an event stream.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def close(self) -> list[bytes]:
        """Return the data of a last event that lacks its blank line, as some servers leave it out."""
        return self.feed(b"\n\n")
