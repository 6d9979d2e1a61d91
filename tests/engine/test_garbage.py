"""What requests leave behind is freed without a search for it, and the search comes where it does not hurt."""

import gc
from collections.abc import Callable, Iterator

import pytest

from radixserve.core.sequence import Request, Sequence
from radixserve.engine.process import collect_garbage
from tests.engine.harness import Harness, MakeHarness, ids


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def cycles_of_requests() -> list[object]:
    """Return the requests and sequences that only a collection would free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    return [left for left in gc.garbage if isinstance(left, Request | Sequence)]


def end_by_length(harness: Harness) -> None:
    harness.ask(ids(1, 40))


def end_by_stop_string(harness: Harness) -> None:
    harness.ask(ids(1, 40), max_tokens=40, stop=["a"])


def end_several_answers(harness: Harness) -> None:
    harness.ask(ids(1, 40), n=3, temperature=1.0)


def end_a_search(harness: Harness) -> None:
    harness.search(ids(1, 40), beam_width=3)


def end_by_abort(harness: Harness) -> None:
    waiting, running = [harness.add(ids(start, 40), max_tokens=40) for start in (1, 2)]
    harness.step()
    harness.core.abort([waiting, running])
    harness.run()


def end_without_a_token(harness: Harness) -> None:
    harness.ask(ids(1, 40), max_tokens=0, prompt_logprobs=0)


@pytest.mark.parametrize(
    "end",
    [end_by_length, end_by_stop_string, end_several_answers, end_a_search, end_by_abort, end_without_a_token],
)
@pytest.mark.usefixtures("no_collections")
def test_a_request_that_has_ended_is_part_of_no_cycle(
    make_harness: MakeHarness, end: Callable[[Harness], None]
) -> None:
    harness = make_harness()
    end(harness)
    harness.ask(ids(5, 20))  # the scheduler may hold the last step's sequences until the next one
    assert cycles_of_requests() == []


@pytest.mark.usefixtures("no_collections")
def test_garbage_is_collected_sooner_in_a_pause_than_under_load() -> None:
    kept: list[list[int]] = []

    def cycles_until_collected(*, is_idle: bool) -> int:
        gc.collect()
        before = num_collections()
        while num_collections() == before:
            cycle: list[object] = []
            cycle.append(cycle)
            kept.append([])  # so that the count grows by more than garbage
            collect_garbage(is_idle=is_idle)
        return len(kept)

    def num_collections() -> int:
        return gc.get_stats()[2]["collections"]

    in_a_pause = cycles_until_collected(is_idle=True)
    assert 0 < in_a_pause < cycles_until_collected(is_idle=False) - in_a_pause < 500_000
