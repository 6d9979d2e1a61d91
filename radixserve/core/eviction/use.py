"""One request on its path, and what is left of the blocks that it was the last to use."""

from array import array
from dataclasses import dataclass, field

from radixserve.core.eviction.cells import Cell
from radixserve.core.eviction.gaps import UNKNOWN_ANSWER
from radixserve.core.eviction.reuse_tables import ClassFigures, ReuseTables


@dataclass(slots=True, eq=False)
class Use:
    """One request on its path.

    clock: how many requests had started when this one did. num_prompt_blocks: full ones of its prompt.
    tables: its tenant's. public: those of the public prefix that its prompt begins with, if it does.
    answer_class: 0 until it is known how the answer ended. evicted: the ends of the parts of the path that were known
    but evicted, each with its class of gaps. gap_class: that of the blocks behind them.
    """

    clock: int
    tables: ReuseTables
    num_prompt_blocks: int
    public: ReuseTables | None = None
    answer_class: int = 0
    gap_class: int = 0
    evicted: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Segment:
    """Blocks that follow one another in the tree, which one use was the last to use, with one class of gaps before it.

    above: the namespace and the digest of the block above them, if there is one; None for a tail, which is not
    remembered.
    slot: what the blocks know it by. bucket: that of its age. end: the deepest block. gone: fingerprints of those below
    it that were evicted since, the deepest first. cell: where it waits for eviction; None while its end is held, or
    something is known to follow it. public: the tables of a public prefix, if the blocks are of one.
    """

    use: Use
    gap_class: int
    above: bytes | None
    slot: int
    bucket: int
    end: int = -1
    num_blocks: int = 0
    gone: "array[int]" = field(default_factory=lambda: array("I"))
    cell: Cell | None = None
    public: ReuseTables | None = None

    @property
    def num_unused(self) -> int:
        """How many blocks may be used again, be it too late."""
        return self.num_blocks + len(self.gone)

    @property
    def figures(self) -> ClassFigures:
        """What is known of uses like this one. What tenants' answers are is nothing that public blocks may tell."""
        if self.public is not None:
            return self.public.figures_of(UNKNOWN_ANSWER, self.gap_class)
        return self.use.tables.figures_of(self.use.answer_class, self.gap_class)
