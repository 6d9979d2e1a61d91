"""The rule of learned-reuse, block by block and slowly: what its segments, cells and ghosts must come down to.

Blocks are of one token, requests compute their prompt when they start, and nothing is forgotten.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from math import log2

from radixserve.core.eviction.answer import Answer

Path = tuple[int, ...]
# An answer, None for one that has not ended, and a class of gaps.
Class = tuple[tuple[bool | None, int] | None, int]
NUM_BUCKETS = 51
STARTS = [0.0, *(2 ** ((bucket - 1) / 2 - 1) for bucket in range(1, NUM_BUCKETS))]


def bucket_of(gap: int) -> int:
    return max(bucket for bucket, start in enumerate(STARTS) if start <= gap + 1e-9)


@dataclass(eq=False)
class ReferenceUse:
    clock: int
    num_blocks: int
    answer: tuple[bool | None, int] | None = None


@dataclass(eq=False)
class Block:
    """The last use of a block, and where it is. num_holders: requests that run."""

    use: ReferenceUse
    gap_class: int
    is_cached: bool = True
    num_holders: int = 0

    @property
    def class_(self) -> Class:
        return self.use.answer, self.gap_class


@dataclass
class Reference:
    """The cache of one tenant, by the paths of its blocks."""

    num_blocks: int
    clock: int = 0
    num_known: int = 0
    blocks: dict[Path, Block] = field(default_factory=dict)
    events: defaultdict[Class, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * NUM_BUCKETS))
    classes: set[Class] = field(default_factory=set)
    scores: dict[Class, list[float]] = field(default_factory=dict)
    scores_by_gap: dict[int, list[float]] = field(default_factory=dict)
    num_prompt_blocks: int = 0

    def start(self, prompt: Path) -> tuple[ReferenceUse, list[Path]]:
        """Start a request, and return its use and what was evicted for it, in order."""
        self.clock += 1
        use = ReferenceUse(self.clock, len(prompt))
        self.num_prompt_blocks += len(prompt)
        paths = [prompt[: index + 1] for index in range(len(prompt))]
        # The last block is computed in any case, though the cache may have it.
        num_cached = next((n for n, path in enumerate(paths[:-1]) if not self.is_cached(path)), len(prompt) - 1)
        num_known = next((n for n, path in enumerate(paths) if path not in self.blocks), len(prompt))
        if num_known == len(prompt) and self.is_cached(paths[-1]):
            num_known -= 1
        last = self.blocks[paths[num_known - 1]].use if num_known else None
        gap_class = 0
        if last is not None and num_known >= 0.9 * last.num_blocks:
            gap_class = self.gap_class_of(use.clock - last.clock)
        for path in paths[:num_known]:
            self.use_again(path, use)
        self.learn()
        for path in paths[:num_cached]:
            self.blocks[path].num_holders += 1
        evicted = self.evict(len(prompt) - num_cached)
        for path in paths[num_cached:]:
            if self.is_cached(path):
                self.use_again(path, use)
            elif path in self.blocks and self.blocks[path].use is use:
                self.blocks[path].is_cached = True
            else:
                self.blocks[path] = Block(use, gap_class)
            self.classes.add(self.blocks[path].class_)
            self.blocks[path].num_holders += 1
        return use, evicted

    def release(self, prompt: Path) -> None:
        for index in range(len(prompt)):
            self.blocks[prompt[: index + 1]].num_holders -= 1

    def record_answer(self, use: ReferenceUse, answer: Answer) -> None:
        length = sum(answer.num_tokens >= limit for limit in (64, 192, 512, 1500))
        use.answer = (answer.calls_tool, length)
        self.classes |= {block.class_ for block in self.blocks.values() if block.use is use}

    def is_cached(self, path: Path) -> bool:
        return path in self.blocks and self.blocks[path].is_cached

    def use_again(self, path: Path, use: ReferenceUse) -> None:
        block = self.blocks[path]
        gap = use.clock - block.use.clock
        if not block.num_holders:
            self.events[block.class_][bucket_of(gap)] += 1
        block.use, block.gap_class = use, self.gap_class_of(gap)
        self.classes.add(block.class_)

    def gap_class_of(self, gap: int) -> int:
        return min(max(1 + int((log2(gap) - 2) // 2), 1), 11)

    # The order of eviction.

    def evict(self, num_blocks: int) -> list[Path]:
        """Make room, one block after the other."""
        evicted = []
        while self.num_blocks - sum(block.is_cached for block in self.blocks.values()) < num_blocks:
            path = min(self.candidates(), key=lambda path: (self.score(path), self.blocks[path].use.clock))
            self.blocks[path].is_cached = False
            evicted.append(path)
        return evicted

    def candidates(self) -> list[Path]:
        parents = {path[:-1] for path, block in self.blocks.items() if block.is_cached}
        return [
            path
            for path, block in self.blocks.items()
            if block.is_cached and not block.num_holders and path not in parents
        ]

    def score(self, path: Path) -> float:
        block = self.blocks[path]
        bucket = bucket_of(self.clock - block.use.clock)
        scores = self.scores.get(block.class_) or self.scores_by_gap.get(block.gap_class) or index_of([0.19] * 51)
        return scores[bucket]

    # What it learns.

    def learn(self) -> None:
        n = self.clock
        if not self.classes or not (n % 16 == 0 or n in (1, 2, 4, 8)):
            return
        weight = max(40 * self.num_prompt_blocks / n, 1.0)
        everything = self.hazards(self.classes, [0.19] * NUM_BUCKETS, weight)
        self.scores_by_gap = {
            gap_class: index_of(
                smooth(self.hazards({c for c in self.classes if c[1] == gap_class}, everything, weight))
            )
            for _, gap_class in self.classes
        }
        self.scores = {}
        for class_ in self.classes:
            answer, gap_class = class_
            if answer is None:
                self.scores[class_] = self.scores_by_gap[gap_class]
                continue
            told = {c for c in self.classes if c[0] is not None and c[0][0] == answer[0]}
            hazards = self.hazards(told, everything, weight)
            hazards = self.hazards({c for c in told if c[0] == answer}, hazards, weight)
            self.scores[class_] = index_of(smooth(self.hazards({class_}, hazards, weight)))

    def hazards(self, classes: set[Class], wider: list[float], weight: float) -> list[float]:
        """Return how likely a block of these classes is used again in each bucket, if it was not before."""
        events = [sum(self.events[c][bucket] for c in classes if c in self.events) for bucket in range(NUM_BUCKETS)]
        ages = [bucket_of(self.clock - block.use.clock) for block in self.blocks.values() if block.class_ in classes]
        return [
            (events[bucket] + weight * wider[bucket])
            / (sum(events[bucket:]) + sum(age > bucket for age in ages) + ages.count(bucket) / 2 + weight)
            for bucket in range(NUM_BUCKETS)
        ]


def smooth(hazards: list[float]) -> list[float]:
    for _ in range(8):
        inner = [
            before / 4 + this / 2 + after / 4
            for before, this, after in zip(hazards, hazards[1:], hazards[2:], strict=False)
        ]
        hazards = [hazards[0], *inner, hazards[-1]]
    return hazards


def index_of(hazards: list[float]) -> list[float]:
    """Return for each bucket the most uses per request of waiting, over all buckets before which to stop."""
    best_of = []
    for first in range(NUM_BUCKETS):
        survival, used, waited, best = 1.0, 0.0, 0.0, 0.0
        for bucket in range(first, NUM_BUCKETS - 1):
            used += survival * hazards[bucket]
            waited += survival * (STARTS[bucket + 1] - STARTS[bucket]) * (1 - hazards[bucket] / 2)
            survival *= 1 - hazards[bucket]
            best = max(best, used / waited)
        best_of.append(best)
    return best_of
