"""What every demo shows: a live table of its model calls, and a summary at the end."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from openai.types import CompletionUsage
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

_TEXTS = ("agent", "step", "did")
_NUMBERS = ("prompt", "cached", "computed", "written", "seconds")
# So that the table fits a terminal of 80 columns.
_MAX_AGENT, _MAX_DID = 12, 22


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the model. did: in a few words, what came of it. Sizes are tokens; cached ones are of the prompt."""

    agent: str
    number: int
    did: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not in the cache."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class Summary:
    """Steps added up. Shares are of their prompt tokens; late ones come after each agent's first step."""

    num_steps: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float
    late_cached_share: float

    @classmethod
    def of(cls, steps: list[Step], seconds: float) -> "Summary":
        """Add up the steps of a run that took so long."""
        late = [step for step in steps if step.number > 1]
        return cls(
            num_steps=len(steps),
            prompt_tokens=sum(step.prompt_tokens for step in steps),
            cached_tokens=sum(step.cached_tokens for step in steps),
            completion_tokens=sum(step.completion_tokens for step in steps),
            seconds=seconds,
            late_cached_share=_share(
                sum(step.cached_tokens for step in late), sum(step.prompt_tokens for step in late)
            ),
        )

    def lines(self) -> list[str]:
        """Return the summary as text."""
        share = _share(self.cached_tokens, self.prompt_tokens)
        computed = self.prompt_tokens - self.cached_tokens
        return [
            f"{self.num_steps} steps in {self.seconds:.1f} s, {self.completion_tokens:,} tokens written",
            f"prompt tokens: {self.prompt_tokens:,} sent, {self.cached_tokens:,} cached ({share:.1%}), "
            f"{computed:,} computed",
            f"cached from each agent's second step on: {self.late_cached_share:.1%}",
        ]


class StepLog:
    """Collects the steps of a demo and shows them while it runs. Several threads may add to it.

    Use it as a context manager: the table stands while the body runs, and the summary is printed when it ends.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._console = console or Console()
        self._title = title
        self._steps: list[Step] = []
        self._lock = threading.Lock()
        self._live = Live(self._table(), console=self._console, auto_refresh=False)
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        self._console.print()
        if kind is None:
            for line in self.summary().lines():
                self._console.print(line, highlight=False)

    @property
    def steps(self) -> list[Step]:
        """The steps so far, in the order in which they ended."""
        with self._lock:
            return list(self._steps)

    def timer(self, agent: str, number: int) -> Callable[[str, CompletionUsage], None]:
        """Start the clock of a step; call the result with what it did and its usage when it is over."""
        began = time.monotonic()

        def end(did: str, usage: CompletionUsage) -> None:
            details = usage.prompt_tokens_details
            cached = details.cached_tokens if details is not None else None
            self.add(
                Step(
                    agent=agent,
                    number=number,
                    did=did,
                    prompt_tokens=usage.prompt_tokens,
                    cached_tokens=cached or 0,
                    completion_tokens=usage.completion_tokens,
                    seconds=time.monotonic() - began,
                )
            )

        return end

    def add(self, step: Step) -> None:
        """Take in a step and show it."""
        with self._lock:
            self._steps.append(step)
            self._live.update(self._table(), refresh=True)

    def summary(self) -> Summary:
        """Add up the steps so far."""
        return Summary.of(self.steps, time.monotonic() - self._began)

    def _table(self) -> Table:
        table = Table(title=self._title, box=SIMPLE_HEAD, padding=0, title_justify="left")
        for name in _TEXTS:
            table.add_column(name, no_wrap=True)
        for name in _NUMBERS:
            table.add_column(name, justify="right", no_wrap=True)
        for step in self._steps:
            table.add_row(
                _cut(step.agent, _MAX_AGENT),
                str(step.number),
                _cut(step.did, _MAX_DID),
                f"{step.prompt_tokens:,}",
                f"{step.cached_tokens:,}",
                f"{step.computed_tokens:,}",
                f"{step.completion_tokens:,}",
                f"{step.seconds:.2f}",
            )
        return table


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
