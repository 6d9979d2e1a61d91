"""Rows whose block tables begin alike, over a paged cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.kernels.interpreted.paged_rows import PagedRows, Shape, make_rows


@dataclass(frozen=True)
class Sharing:
    """The rows that share their first so many tokens, whole blocks of them; the first of them has computed these."""

    rows: Sequence[int]
    num_tokens: int


def make_shared_rows(shape: Shape, rows: Sequence[tuple[int, int]], sharings: Sequence[Sharing]) -> PagedRows:
    """Lay rows (query length, context length) out over shuffled blocks, and let some share. Longer sharings come first.

    Blocks that nobody reads any more hold NaN.
    """
    made = make_rows(shape, rows)
    tables = made.block_tables.clone()
    for sharing in sharings:
        num_blocks, rest = divmod(sharing.num_tokens, shape.block_size)
        assert rest == 0
        for row in sharing.rows:
            query, context = rows[row]
            assert sharing.num_tokens <= context - query
            tables[row, :num_blocks] = tables[sharing.rows[0], :num_blocks]
    shared = replace(made, block_tables=tables)
    read = {int(block) for row in range(len(rows)) for block in shared.blocks_of(row)}
    for block in range(made.key_cache.shape[0]):
        if block not in read:
            made.key_cache[block] = made.value_cache[block] = float("nan")
    return shared
