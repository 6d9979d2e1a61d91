"""Time that stands still until a test moves it."""


class FakeClock:
    """A clock of seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
