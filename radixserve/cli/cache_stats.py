"""What `radixserve cache stats` shows: one table of GET /v1/cache, and rates of two of them."""

import msgspec
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from radixserve.api.responses import CacheReport, CacheTier, CacheTree

BAR_WIDTH = 24


class Rates(msgspec.Struct):
    """Prompt tokens between two moments: looked up, and found, a second. hit_rate is None if none were looked up."""

    queried: float
    hit: float

    @property
    def hit_rate(self) -> float | None:
        return self.hit / self.queried if self.queried else None


def rates_between(before: CacheReport, after: CacheReport, seconds: float) -> Rates | None:
    """Return what happened from one report to the next; None if the engine was started anew, as counters fell."""
    queried = after.tokens.queried - before.tokens.queried
    hit = after.tokens.hit - before.tokens.hit
    if queried < 0 or hit < 0:
        return None
    return Rates(queried / seconds, hit / seconds)


def stats_view(figures: CacheReport, rates: Rates | None = None) -> RenderableType:
    """Return what is printed. rates: of the last interval, if there was one."""
    parts: list[RenderableType] = [_blocks_table(figures), "", _counts_table(figures, rates)]
    if figures.tiers:
        parts += ["", _tiers_table(figures.tiers)]
    return Group(*parts)


def _blocks_table(figures: CacheReport) -> Table:
    blocks = figures.blocks
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(width=BAR_WIDTH)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_row("blocks", "", f"{blocks.total:,}", f"of {figures.block_size} tokens")
    for name, count in (
        ("in use", blocks.in_use),
        ("cached", blocks.cached),
        ("free", blocks.free),
        ("pinned", blocks.pinned),
    ):
        bar = ProgressBar(total=max(blocks.total, 1), completed=count, width=BAR_WIDTH)
        table.add_row(f"  {name}", bar, f"{count:,}", _percent(count, blocks.total))
    return table


def _counts_table(figures: CacheReport, rates: Rates | None) -> Table:
    tokens = figures.tokens
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=rates is not None, header_style="")
    table.add_column("prompt tokens", no_wrap=True)
    table.add_column("since the start", justify="right", no_wrap=True)
    rows = [
        ("read from the cache", f"{tokens.hit:,}"),
        ("not in the cache", f"{tokens.queried - tokens.hit:,}"),
        ("hit rate", _percent(tokens.hit, tokens.queried)),
        ("evicted", f"{tokens.evicted:,}"),
        ("requests running", f"{figures.requests.running:,}"),
        ("requests waiting", f"{figures.requests.waiting:,}"),
    ]
    if isinstance(figures.tree, CacheTree):
        rows += [("tree nodes", f"{figures.tree.nodes:,}"), ("tree depth", f"{figures.tree.depth:,}")]
    if rates is None:
        for row in rows:
            table.add_row(*row)
        return table
    table.add_column("a second", justify="right", no_wrap=True)
    hit_rate = "-" if rates.hit_rate is None else f"{100 * rates.hit_rate:.1f} %"
    now = [f"{rates.hit:,.0f}", f"{rates.queried - rates.hit:,.0f}", hit_rate]
    for index, row in enumerate(rows):
        table.add_row(*row, now[index] if index < len(now) else "")
    return table


def _tiers_table(tiers: list[CacheTier]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(width=BAR_WIDTH)
    table.add_column()
    for tier in tiers:
        bar = ProgressBar(total=max(tier.capacity_bytes, 1), completed=tier.used_bytes, width=BAR_WIDTH)
        used = f"{_size(tier.used_bytes)} of {_size(tier.capacity_bytes)}, {tier.blocks:,} blocks"
        counts = (
            f"{tier.hit_blocks:,} hit, {tier.read_blocks:,} read, {tier.written_blocks:,} written, "
            f"{tier.dropped_blocks:,} dropped, {tier.failed_blocks:,} failed"
        )
        state = "" if tier.is_on else "off since an error: see the server's log\n"
        table.add_row(tier.name, bar, f"{state}{used}\n{counts}")
    return table


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
