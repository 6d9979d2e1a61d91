"""Who waits for a prefix that another request computes gets its own answer, whatever becomes of that one."""

from collections.abc import Sequence
from typing import get_args

import pytest

from radixserve.config import SchedulePolicy
from tests.engine.harness import BLOCK_SIZE as B
from tests.engine.harness import MakeHarness, ids

POLICIES: tuple[SchedulePolicy, ...] = get_args(SchedulePolicy)
PREFIX = ids(1, 3 * B)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["fail_on", "poison"])
@pytest.mark.parametrize("budget", [20, 256])
def test_pc_5_the_others_go_on_when_the_writer_fails(
    make_harness: MakeHarness, policy: SchedulePolicy, how: str, budget: int
) -> None:
    def is_writer(context: Sequence[int]) -> bool:
        return context[-1] == 199

    harness = make_harness(max_num_batched_tokens=budget, schedule_policy=policy, **{how: is_writer})
    writer = harness.add([*PREFIX, 199])
    prompts = [[*PREFIX, *ids(10 * number, 5)] for number in range(1, 5)]
    others = [harness.add(prompt) for prompt in prompts]
    harness.run()
    assert harness.failures.keys() == {writer}
    for request, prompt in zip(others, prompts, strict=True):
        assert harness.results[request].answers == make_harness().ask(prompt).answers


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [20, 256])
def test_pc_5_answers_and_beams_of_one_prompt_share_it_with_those_who_wait(
    make_harness: MakeHarness, policy: SchedulePolicy, chunk: int
) -> None:
    harness = make_harness(
        num_blocks=128, max_num_seqs=16, max_num_batched_tokens=chunk, schedule_policy=policy, table=two_ways
    )
    several = harness.add([*PREFIX, 3], n=3, temperature=1.0, seed=4, max_tokens=1)
    beams = harness.add_beams([*PREFIX, 4], beam_width=3, max_tokens=1)
    plain = harness.add([*PREFIX, 5], max_tokens=1)
    harness.run()
    # Nobody's own answers or beams wait for one another: they have the prompt in common that one row computes.
    assert harness.stats.num_computed_tokens == len(PREFIX) + 3
    cached = [harness.results[request].num_cached_tokens for request in (several, beams, plain)]
    assert sorted(cached) == [0, len(PREFIX), len(PREFIX)]


def two_ways(context: Sequence[int]) -> dict[int, float]:
    first = hash(tuple(context)) % 190
    return {first: 0.5, first + 1: 0.3, first + 2: 0.2}
