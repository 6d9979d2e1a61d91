"""A clock that goes on only when a test says so."""

from dataclasses import dataclass


@dataclass
class FakeClock:
    """Returns seconds when called, as time.monotonic does."""

    seconds: float = 1000.0

    def __call__(self) -> float:
        return self.seconds
