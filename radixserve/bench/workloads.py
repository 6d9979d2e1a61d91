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
    where an agent puts what its tool returned. output_tokens: length of each answer. history_tokens: what each session
    has behind it before its first turn, its own too, and known to the server before the clock starts; 0 for nothing.
    beam_width: above 1, each answer is a beam search that returns so many hypotheses, all of output_tokens.
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
    history_tokens: int = 0
    beam_width: int = 1

    @property
    def num_requests(self) -> int:
        """Requests of one run. Those that bring in the histories are not among them."""
        return self.num_sessions * self.num_turns

    @property
    def tokens_per_request(self) -> int:
        """Output tokens of a request, those of all hypotheses that it returns."""
        return self.output_tokens * self.beam_width


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
TURNS = Workload(
    name="turns",
    purpose="2 sessions with 4,000 tokens behind them, 8 turns each: a short append on a long cached prefix",
    num_sessions=2,
    concurrency=2,
    num_turns=8,
    shared_tokens=0,
    first_tokens=250,
    next_tokens=250,
    output_tokens=100,
    history_tokens=4000,
)
BEAM = Workload(
    name="beam",
    purpose="8 beam searches of width 4, 4 at a time, with a shared beginning: what it costs to follow hypotheses",
    num_sessions=8,
    concurrency=4,
    num_turns=1,
    shared_tokens=400,
    first_tokens=112,
    next_tokens=0,
    output_tokens=48,
    beam_width=4,
)
WORKLOADS = {workload.name: workload for workload in (SINGLE, AGENTS, BURST, TURNS, BEAM)}

WriteText = Callable[[str, int], Awaitable[str]]


class Turn(msgspec.Struct, frozen=True):
    """One step of a session: messages to append to its history, and the length of the answer to ask for."""

    messages: tuple[Message, ...]
    output_tokens: int


class Session(msgspec.Struct, frozen=True):
    """One conversation. history: what was said before its first turn; empty, or a question and its answer."""

    history: tuple[Message, ...]
    turns: tuple[Turn, ...]


async def build_sessions(workload: Workload, key: str, write_text: WriteText) -> list[Session]:
    """Return the sessions of one run. write_text(key, num_tokens) writes a text; other keys, other texts."""
    system: tuple[Message, ...] = ()
    if workload.shared_tokens:
        system = (Message("system", await write_text(f"{key}/shared", workload.shared_tokens)),)
    sessions = []
    for session in range(workload.num_sessions):
        history = await _write_history(workload, f"{key}/{session}", write_text)
        opening = (*system, *history) if history else ()
        turns = []
        for turn in range(workload.num_turns):
            num_tokens = workload.next_tokens if turn else workload.first_tokens
            message = Message("user", await write_text(f"{key}/{session}/{turn}", num_tokens))
            is_opening = not turn and not opening
            turns.append(Turn((*system, message) if is_opening else (message,), workload.output_tokens))
        sessions.append(Session(opening, tuple(turns)))
    return sessions


async def _write_history(workload: Workload, key: str, write_text: WriteText) -> tuple[Message, ...]:
    """A question, and an answer of the usual length that is written here: so it is the same for every server."""
    if not workload.history_tokens:
        return ()
    num_tokens = workload.history_tokens - workload.output_tokens
    return (
        Message("user", await write_text(f"{key}/question", num_tokens)),
        Message("assistant", await write_text(f"{key}/answer", workload.output_tokens)),
    )
