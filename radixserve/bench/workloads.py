"""What the benchmark sends: sessions of turns, the same for the same seed."""

from collections.abc import Awaitable, Callable

import msgspec

from radixserve.bench.message import Message


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions that run beside each other, each a conversation of turns one after another.

    A turn resends the whole history, the model's own answers included. Lengths are tokens of the messages' text; the
    chat template's own tokens come on top.

    concurrency: sessions at once. shared_tokens: a system message that is the same in all sessions; 0 for none.
    first_tokens: the user's first message, each session's own. next_tokens: the user's message of each later turn,
    where an agent puts what its tool returned. output_tokens: length of each answer.
    """

    name: str
    purpose: str
    num_sessions: int
    concurrency: int
    num_turns: int
    shared_tokens: int
    first_tokens: int
    next_tokens: int
    output_tokens: int

    @property
    def num_requests(self) -> int:
        """Requests of one run."""
        return self.num_sessions * self.num_turns


SINGLE = Workload(
    name="single",
    purpose="one request alone: the latency of an idle server",
    num_sessions=1,
    concurrency=1,
    num_turns=1,
    shared_tokens=0,
    first_tokens=128,
    next_tokens=0,
    output_tokens=128,
)
AGENTS = Workload(
    name="agents",
    purpose="8 agents with one system prompt, 6 steps each: what a prefix cache saves",
    num_sessions=8,
    concurrency=8,
    num_turns=6,
    shared_tokens=1000,
    first_tokens=100,
    next_tokens=60,
    output_tokens=32,
)
BURST = Workload(
    name="burst",
    purpose="32 requests, 16 at a time, with a shared beginning: throughput under load",
    num_sessions=32,
    concurrency=16,
    num_turns=1,
    shared_tokens=512,
    first_tokens=64,
    next_tokens=0,
    output_tokens=64,
)
WORKLOADS = {workload.name: workload for workload in (SINGLE, AGENTS, BURST)}

WriteText = Callable[[str, int], Awaitable[str]]


class Turn(msgspec.Struct, frozen=True):
    """One step of a session: messages to append to its history, and the length of the answer to ask for."""

    messages: tuple[Message, ...]
    output_tokens: int


async def build_sessions(workload: Workload, key: str, write_text: WriteText) -> list[list[Turn]]:
    """Return the turns of each session. write_text(key, num_tokens) writes a text; other keys, other texts."""
    system: tuple[Message, ...] = ()
    if workload.shared_tokens:
        system = (Message("system", await write_text(f"{key}/shared", workload.shared_tokens)),)
    sessions = []
    for session in range(workload.num_sessions):
        turns = []
        for turn in range(workload.num_turns):
            num_tokens = workload.next_tokens if turn else workload.first_tokens
            message = Message("user", await write_text(f"{key}/{session}/{turn}", num_tokens))
            turns.append(Turn((message,) if turn else (*system, message), workload.output_tokens))
        sessions.append(turns)
    return sessions
