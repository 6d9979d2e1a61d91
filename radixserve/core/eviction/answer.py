"""What an eviction policy is told of an answer."""

from typing import NamedTuple


class Answer(NamedTuple):
    """How an answer ended: whether it calls a tool, and how many tokens it has."""

    calls_tool: bool
    num_tokens: int
