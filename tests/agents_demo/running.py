"""What the tests of all demos need: an address where nothing answers, and a reader of the table that they print."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from agents_demo.steps import Step

_AGENT = r"(?:question|path) \d+|beam search|\w+"
_ROW = re.compile(rf"^ *({_AGENT}) +(\d+) +(.*?) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+) +([\d.]+) *$", re.MULTILINE)


def steps_of(output: str) -> list[Step]:
    """Return the steps that the table shows, each of whose prompts must be what was cached and what was computed."""
    steps = []
    for agent, number, did, *sizes, seconds in _ROW.findall(output):
        prompt, cached, computed, written = (int(size.replace(",", "")) for size in sizes)
        step = Step(agent, int(number), did, prompt, cached, written, float(seconds))
        assert step.computed_tokens == computed
        steps.append(step)
    return steps


@contextmanager
def address_without_a_server() -> Iterator[str]:
    """Yield a base URL whose port is taken, but not listened at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
