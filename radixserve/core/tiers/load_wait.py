"""How a waiting sequence waits for blocks to be read back."""

from dataclasses import dataclass


@dataclass(slots=True)
class LoadWait:
    """A wait for one read.

    index: number of the first block that it is for. patience: seconds that it may last once it is the sequence's turn.
    deadline: when they are over; None before. num_reads: how often it was begun.
    is_over: it waits for no read any more, however many blocks are in a store.
    """

    index: int
    patience: float
    deadline: float | None = None
    num_reads: int = 0
    is_over: bool = False
