from array import array

import pytest

from radixserve.core.eviction.answer import Answer
from radixserve.replay.sessions import Session, TimedRequest, interleave


def session(name: str, times: list[float], num_seconds: float, *, api_time: float = 0.0) -> Session:
    """A session whose answers have as many tokens as requests came before, and each takes api_time."""
    requests = [
        TimedRequest(time, time + api_time, name.encode(), array("i", [turn]), Answer(None, turn))
        for turn, time in enumerate(times)
    ]
    return Session(requests, num_seconds)


def order(sessions: list[Session], num_slots: int) -> list[str]:
    return [f"{namespace.decode()}{ids[0]}" for namespace, ids, _ in interleave(sessions, num_slots)]


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


def known_from(sessions: list[Session], num_slots: int) -> list[int]:
    return [ended.known_from for *_, ended in interleave(sessions, num_slots) if ended is not None]


def test_an_answer_is_known_to_the_first_request_that_comes_no_earlier_than_its_end() -> None:
    # Requests come at 0, 1, 4, 5 and 9; an answer of session b takes 3.5 s.
    sessions = [session("a", [0, 4, 9], 9), session("b", [1, 5], 8.5, api_time=3.5)]
    assert order(sessions, 2) == ["a0", "b0", "a1", "b1", "a2"]
    assert known_from(sessions, 2) == [1, 3, 3, 4, 5]


def test_an_answer_that_takes_no_time_is_not_known_to_its_own_request_nor_to_those_before() -> None:
    sessions = [session(name, [0, 2], 2) for name in "abc"]
    assert known_from(sessions, 3) == [1, 2, 3, 4, 5, 6]


def test_an_answer_of_a_later_session_ends_as_long_after_that_session_began() -> None:
    sessions = [session("a", [0, 10], 10), session("x", [0, 11, 12, 16], 30), session("b", [0, 10], 15, api_time=5)]
    # b begins at 10, so its first answer ends at 15.
    assert order(sessions, 2) == ["a0", "x0", "a1", "b0", "x1", "x2", "x3", "b1"]
    assert known_from(sessions, 2)[3] == 6


def test_of_a_request_without_an_answer_nothing_is_known() -> None:
    request = TimedRequest(0.0, 1.0, b"", array("i", [1]))
    assert [traced.ended for traced in interleave([Session([request], 1.0)], 1)] == [None]
