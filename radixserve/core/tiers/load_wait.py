"""How a waiting sequence waits for blocks to be read back."""

from dataclasses import dataclass


@dataclass(slots=True)
class LoadWait:
    """A wait for one read.

    index: number of the first block that it is for. deadline: when the sequence goes on with what is there.
    has_begun: whether the read was queued. is_over: it waits for no read any more, however many blocks are in a store.
    """

    index: int
    deadline: float
    has_begun: bool = False
    is_over: bool = False
