"""Log-probabilities of prompts through the whole engine on a stub model, whose right values are exact."""

import math
import random
from collections.abc import Mapping, Sequence

import pytest

from radixserve.protocol import TokenLogprobs
from tests.engine.harness import BLOCK_SIZE as B
from tests.engine.harness import Harness, MakeHarness, ids

PROMPT = ids(1, 2 * B + 5)


def spread(context: Sequence[int]) -> Mapping[int, float]:
    """Give every token a probability, each time another one."""
    draw = random.Random(hash(tuple(context)))
    weights = [draw.random() ** 3 for _ in range(200)]
    total = sum(weights)
    return {token_id: weight / total for token_id, weight in enumerate(weights)}


@pytest.fixture
def harness(make_harness: MakeHarness) -> Harness:
    return make_harness(table=spread)


def assert_right(prompt: Sequence[int], entries: list[TokenLogprobs | None] | None, num_top: int = 0) -> None:
    """Entry i tells what the stub thinks of token i after the tokens before it."""
    assert entries is not None
    assert entries[0] is None
    assert len(entries) == len(prompt)
    for position in range(1, len(prompt)):
        entry, probabilities = entries[position], spread(prompt[:position])
        assert entry is not None
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(math.log(probabilities[prompt[position]]), abs=1e-4)
        by_rank = sorted(probabilities, key=probabilities.__getitem__, reverse=True)
        assert entry.rank == by_rank.index(prompt[position]) + 1
        assert [token_id for token_id, _ in entry.top] == by_rank[:num_top]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_pc_2_scores_of_a_cached_prompt_are_whole_and_right(harness: Harness, max_tokens: int) -> None:
    plain = harness.ask(PROMPT, max_tokens=1)
    scored = harness.ask(PROMPT, max_tokens=max_tokens, prompt_logprobs=1)
    assert_right(PROMPT, scored.prompt_logprobs, num_top=1)
    assert scored.num_cached_tokens == 0
    after = harness.ask(PROMPT, max_tokens=1)
    assert after.num_cached_tokens == len(PROMPT) - 1
    assert after.answers[0].token_ids == plain.answers[0].token_ids
    assert after.prompt_logprobs is None


def test_pc_2_a_cached_prompt_scores_as_on_a_fresh_engine(harness: Harness, make_harness: MakeHarness) -> None:
    harness.ask(PROMPT, max_tokens=1)
    on_a_hit = harness.ask(PROMPT, max_tokens=1, prompt_logprobs=1, logprobs=1)
    fresh = make_harness(table=spread).ask(PROMPT, max_tokens=1, prompt_logprobs=1, logprobs=1)
    assert on_a_hit.answers == fresh.answers


def test_a_scored_prompt_is_a_hit_for_others(harness: Harness) -> None:
    harness.ask(PROMPT, max_tokens=0, prompt_logprobs=0)
    assert harness.ask([*PROMPT, 5], max_tokens=1).num_cached_tokens == len(PROMPT)


@pytest.mark.parametrize("budget", [8, 15, 16, 17, 36, 37, 64])
def test_chunks_leave_neither_gaps_nor_repeats(make_harness: MakeHarness, budget: int) -> None:
    harness = make_harness(table=spread, max_num_batched_tokens=budget)
    scored = harness.ask(PROMPT, prompt_logprobs=2)
    assert_right(PROMPT, scored.prompt_logprobs, num_top=2)


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_a_preemption_in_the_middle_leaves_neither_gaps_nor_repeats(
    make_harness: MakeHarness, keeps_cache: bool
) -> None:
    """Without what was cached, the resumed request computes again what it has scored before."""
    harness = make_harness(
        table=spread, num_blocks=9, block_size=8, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=4
    )
    for i in range(2):
        harness.add(ids(30 * i, 6), max_tokens=30, ignore_eos=True)
    for _ in range(2):
        harness.step()
    scored = harness.add(PROMPT, max_tokens=12, prompt_logprobs=1)
    while harness.stats.num_preemptions == 0:
        harness.step()
    assert harness.executor.batches[-2].rows[-1].prompt_targets, "it was preempted at another time"
    if not keeps_cache:
        harness.reset_cache()
    harness.run()
    assert_right(PROMPT, harness.results[scored].prompt_logprobs, num_top=1)
    assert len(harness.results[scored].answers[0].token_ids) == 12


def test_prompts_are_scored_beside_others_in_one_batch(harness: Harness) -> None:
    prompts = [PROMPT, PROMPT, ids(9, 3), ids(40, 20)]
    wanted = [1, None, 3, 0]
    requests = [
        harness.add(prompt, prompt_logprobs=count, max_tokens=index)
        for index, (prompt, count) in enumerate(zip(prompts, wanted, strict=True))
    ]
    harness.run()
    for request, prompt, count in zip(requests, prompts, wanted, strict=True):
        entries = harness.results[request].prompt_logprobs
        if count is None:
            assert entries is None
        else:
            assert_right(prompt, entries, num_top=count)


@pytest.mark.parametrize("scores", [{}, {"prompt_logprobs": 1}])
def test_max_tokens_0_ends_every_answer_when_the_prompt_is_computed(harness: Harness, scores: dict[str, int]) -> None:
    result = harness.ask(PROMPT, n=3, max_tokens=0, **scores)
    for answer in result.answers:
        assert (answer.token_ids, answer.text, answer.finish_reason) == ([], "", "length")
    assert [answer.prompt_logprobs is not None for answer in result.answers] == [bool(scores), False, False]
    assert harness.stats.num_generated_tokens == 0


def test_all_answers_share_one_list_told_once(harness: Harness) -> None:
    result = harness.ask(PROMPT, n=2, prompt_logprobs=0, temperature=1.0, seed=3)
    assert_right(PROMPT, result.answers[0].prompt_logprobs)
    assert result.answers[1].prompt_logprobs is None
    assert [len(answer.token_ids) for answer in result.answers] == [4, 4]


def test_a_prompt_of_one_token_has_nothing_to_score(harness: Harness) -> None:
    assert harness.ask([7], max_tokens=0, prompt_logprobs=5).prompt_logprobs == [None]


def test_scored_prompts_with_a_common_beginning_do_not_wait_for_each_other(harness: Harness) -> None:
    for _ in range(3):
        harness.add(PROMPT[: B + 2], max_tokens=0, prompt_logprobs=0)
    harness.step()
    assert not harness.core.has_work


def test_an_abort_in_the_middle_of_a_scored_prompt_frees_its_blocks(make_harness: MakeHarness) -> None:
    harness = make_harness(table=spread, max_num_batched_tokens=8)
    request = harness.add(PROMPT, prompt_logprobs=1)
    harness.step()
    harness.core.abort([request])
    harness.run()
    assert_right(PROMPT, harness.ask(PROMPT, prompt_logprobs=1).prompt_logprobs, num_top=1)
