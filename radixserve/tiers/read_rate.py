"""How fast a store reads."""

_WEIGHT_OF_A_BLOCK = 0.05


class ReadRate:
    """A moving average of the seconds that reading a block takes; a block counts for a twentieth of it.

    seconds_per_block: None before the first one.
    """

    def __init__(self) -> None:
        self.seconds_per_block: float | None = None

    def record(self, num_blocks: int, seconds: float) -> None:
        """Take in that reading so many blocks has taken so many seconds."""
        if num_blocks == 0:
            return
        measured = seconds / num_blocks
        if self.seconds_per_block is None:
            self.seconds_per_block = measured
            return
        kept = (1 - _WEIGHT_OF_A_BLOCK) ** num_blocks
        self.seconds_per_block = kept * self.seconds_per_block + (1 - kept) * measured
