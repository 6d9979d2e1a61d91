from array import array

import pytest

from radixserve.replay.sessions import Session, interleave
from radixserve.replay.trace import TracedRequest


def session(name: str, times: list[float], num_seconds: float) -> Session:
    requests = [(time, TracedRequest(name.encode(), array("i", [turn]))) for turn, time in enumerate(times)]
    return Session(requests, num_seconds)


def order(sessions: list[Session], num_slots: int) -> list[str]:
    return [f"{namespace.decode()}{ids[0]}" for namespace, ids in interleave(sessions, num_slots)]


SESSIONS = [session("a", [0, 10], 12), session("b", [0, 1, 2], 3), session("c", [0, 8], 8), session("d", [0], 1)]


@pytest.mark.parametrize(
    ("num_slots", "expected"),
    [
        (1, "a0 a1 b0 b1 b2 c0 c1 d0"),
        # b ends at 3, where c takes its slot; c ends at 11, and d takes that one before a ends at 12.
        (2, "a0 b0 b1 b2 c0 a1 c1 d0"),
        (4, "a0 b0 c0 d0 b1 b2 c1 a1"),
        (9, "a0 b0 c0 d0 b1 b2 c1 a1"),
    ],
)
def test_a_session_starts_as_soon_as_a_slot_is_free(num_slots: int, expected: str) -> None:
    assert " ".join(order(SESSIONS, num_slots)) == expected


def test_at_the_same_time_the_earlier_session_goes_first() -> None:
    assert order([session("a", [0, 1], 2), session("b", [0, 1], 2)], 2) == ["a0", "b0", "a1", "b1"]
