"""What an eviction policy is told of an answer."""

from typing import NamedTuple


class Answer(NamedTuple):
    """How an answer ended: whether it calls a tool, None if nobody knows, and how many tokens it has."""

    calls_tool: bool | None
    num_tokens: int
