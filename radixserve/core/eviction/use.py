"""One request on its path, and what is left of the blocks that it was the last to use."""

from dataclasses import dataclass, field

from radixserve.core.eviction.reuse_tables import Cell, ClassFigures, ReuseTables


@dataclass(slots=True, eq=False)
class Use:
    """One request on its path.

    clock: how many requests had started when this one did. num_prompt_blocks: full ones of its prompt.
    answer_class: 0 until it is known how the answer ended. evicted: the ends of the parts of the path that were known
    but evicted, each with its class of gaps. gap_class: that of the blocks behind them.
    """

    clock: int
    tables: ReuseTables
    num_prompt_blocks: int
    answer_class: int = 0
    gap_class: int = 0
    evicted: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Segment:
    """Blocks that follow one another in the tree, which one use was the last to use, with one class of gaps before it.

    slot: what its blocks know it by. bucket: that of its age. end: the deepest block. num_gone: how many below it were
    evicted since. cell: where it waits for eviction; None while its end is held, or something is known to follow it.
    """

    use: Use
    gap_class: int
    slot: int
    bucket: int
    end: int = -1
    num_blocks: int = 0
    num_gone: int = 0
    cell: Cell | None = None

    @property
    def figures(self) -> ClassFigures:
        """What is known of uses like this one."""
        return self.use.tables.figures_of(self.use.answer_class, self.gap_class)
