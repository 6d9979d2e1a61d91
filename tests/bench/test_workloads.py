import asyncio

import msgspec
import pytest

from radixserve.bench.message import Message
from radixserve.bench.workloads import (
    AGENTS,
    BEAM,
    BURST,
    SINGLE,
    TURNS,
    WORKLOADS,
    Session,
    Turn,
    Workload,
    build_sessions,
)


async def write(key: str, num_tokens: int) -> str:
    return f"{key}:{num_tokens}"


def sessions_of(workload: Workload, key: str = "7") -> list[Session]:
    return asyncio.run(build_sessions(workload, key, write))


def messages_of(session: Session) -> list[Message]:
    return [*session.history, *(message for turn in session.turns for message in turn.messages)]


def lengths(turn: Turn) -> list[tuple[str, int]]:
    return [(message.role, int(message.content.rpartition(":")[2])) for message in turn.messages]


def test_single_is_one_request_of_128_tokens_in_and_out() -> None:
    (session,) = sessions_of(SINGLE)
    assert session.history == ()
    (turn,) = session.turns
    assert lengths(turn) == [("user", 128)]
    assert turn.output_tokens == 128


def test_agents_are_eight_of_six_steps_behind_one_system_prompt() -> None:
    sessions = sessions_of(AGENTS)
    assert [len(session.turns) for session in sessions] == [6] * 8
    for session in sessions:
        assert lengths(session.turns[0]) == [("system", 1000), ("user", 100)]
        assert all(lengths(turn) == [("user", 60)] for turn in session.turns[1:])
        assert {turn.output_tokens for turn in session.turns} == {32}
    assert AGENTS.concurrency == 8


def test_burst_is_32_requests_16_at_a_time() -> None:
    sessions = sessions_of(BURST)
    assert [lengths(turn) for session in sessions for turn in session.turns] == [[("system", 512), ("user", 64)]] * 32
    assert BURST.concurrency == 16
    assert BURST.output_tokens == 64


def test_turns_are_two_sessions_of_eight_short_appends_behind_4000_tokens_of_their_own() -> None:
    sessions = sessions_of(TURNS)
    assert len(sessions) == TURNS.concurrency == 2
    for session in sessions:
        history = lengths(Turn(session.history, 0))
        assert [role for role, _ in history] == ["user", "assistant"]
        assert sum(num_tokens for _, num_tokens in history) == 4000
        assert [lengths(turn) for turn in session.turns] == [[("user", 250)]] * 8
        assert {turn.output_tokens for turn in session.turns} == {100}
    assert not {message.content for message in sessions[0].history} & {
        message.content for message in sessions[1].history
    }


def test_beam_is_eight_searches_of_width_four_that_share_400_of_512_prompt_tokens() -> None:
    sessions = sessions_of(BEAM)
    assert [lengths(turn) for session in sessions for turn in session.turns] == [[("system", 400), ("user", 112)]] * 8
    assert (BEAM.beam_width, BEAM.output_tokens, BEAM.tokens_per_request) == (4, 48, 4 * 48)


def test_a_system_message_stands_before_a_history_and_not_again_behind_it() -> None:
    workload = msgspec.structs.replace(TURNS, shared_tokens=10)
    for session in sessions_of(workload):
        assert [message.role for message in session.history] == ["system", "user", "assistant"]
        assert all(len(turn.messages) == 1 for turn in session.turns)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_a_session_fits_the_demo_models_context(workload: Workload) -> None:
    num_tokens = workload.shared_tokens + workload.history_tokens + workload.first_tokens
    num_tokens += (workload.num_turns - 1) * workload.next_tokens + workload.num_turns * workload.output_tokens
    template = 16 * (2 * workload.num_turns + 3)
    assert num_tokens + template <= 8192


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_sessions_share_the_system_prompt_and_nothing_else(workload: Workload) -> None:
    messages = [message for session in sessions_of(workload) for message in messages_of(session)]
    assert len({message.content for message in messages if message.role == "system"}) == bool(workload.shared_tokens)
    own = [message.content for message in messages if message.role != "system"]
    num_of_histories = 2 * workload.num_sessions if workload.history_tokens else 0
    assert len(set(own)) == len(own) == workload.num_requests + num_of_histories


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_another_key_changes_every_text(workload: Workload) -> None:
    def texts(key: str) -> set[str]:
        return {message.content for session in sessions_of(workload, key) for message in messages_of(session)}

    assert texts("1") == texts("1")
    assert not texts("1") & texts("2")
