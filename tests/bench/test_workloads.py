import asyncio

import pytest

from radixserve.bench.workloads import AGENTS, BURST, SINGLE, WORKLOADS, Turn, Workload, build_sessions


async def write(key: str, num_tokens: int) -> str:
    return f"{key}:{num_tokens}"


def sessions_of(workload: Workload, key: str = "7") -> list[list[Turn]]:
    return asyncio.run(build_sessions(workload, key, write))


def lengths(turn: Turn) -> list[tuple[str, int]]:
    return [(message.role, int(message.content.rpartition(":")[2])) for message in turn.messages]


def test_single_is_one_request_of_128_tokens_in_and_out() -> None:
    ((turn,),) = sessions_of(SINGLE)
    assert lengths(turn) == [("user", 128)]
    assert turn.output_tokens == 128


def test_agents_are_eight_of_six_steps_behind_one_system_prompt() -> None:
    sessions = sessions_of(AGENTS)
    assert [len(session) for session in sessions] == [6] * 8
    for session in sessions:
        assert lengths(session[0]) == [("system", 1000), ("user", 100)]
        assert all(lengths(turn) == [("user", 60)] for turn in session[1:])
        assert {turn.output_tokens for turn in session} == {32}
    assert AGENTS.concurrency == 8


def test_burst_is_32_requests_16_at_a_time() -> None:
    sessions = sessions_of(BURST)
    assert [lengths(turn) for session in sessions for turn in session] == [[("system", 512), ("user", 64)]] * 32
    assert BURST.concurrency == 16
    assert BURST.output_tokens == 64


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_sessions_share_the_system_prompt_and_nothing_else(workload: Workload) -> None:
    messages = [message for session in sessions_of(workload) for turn in session for message in turn.messages]
    assert len({message.content for message in messages if message.role == "system"}) == bool(workload.shared_tokens)
    own = [message.content for message in messages if message.role == "user"]
    assert len(set(own)) == len(own) == workload.num_requests


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_another_key_changes_every_text(workload: Workload) -> None:
    def texts(key: str) -> set[str]:
        return {
            message.content for session in sessions_of(workload, key) for turn in session for message in turn.messages
        }

    assert texts("1") == texts("1")
    assert not texts("1") & texts("2")
