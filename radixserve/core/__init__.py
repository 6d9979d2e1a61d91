"""Sequences, the block pool, the radix tree and the scheduler. Plain Python and numpy: no torch here."""
