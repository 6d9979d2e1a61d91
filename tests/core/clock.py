"""A clock that a test sets."""


class Clock:
    """Seconds, as many as the test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
