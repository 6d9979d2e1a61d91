"""Hits through the whole engine on a stub model: how many tokens are reused, and that answers never change.

The stub checks on every step that each row reads K/V of exactly its own prefix (see tests.stub).
"""

from collections.abc import Sequence
from typing import Any, get_args

import pytest

from radixserve.config import SchedulePolicy
from radixserve.core.namespace import encode_namespace
from radixserve.core.radix_tree import BlockDigest, xxh3_digest
from radixserve.protocol import CacheWasReset, ResetCache
from tests.engine.harness import BLOCK_SIZE as B
from tests.engine.harness import MakeHarness, ids


def cold(make_harness: MakeHarness, prompt: Sequence[int], **params) -> list[int]:
    return make_harness().ask(prompt, **params).answers[0].token_ids


@pytest.mark.parametrize("length", [B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1])
def test_pc_1_a_repeated_prompt_hits_all_but_its_last_token(make_harness: MakeHarness, length: int) -> None:
    harness = make_harness()
    first = harness.ask(ids(1, length))
    second = harness.ask(ids(1, length))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == length - 1
    assert second.answers[0].token_ids == first.answers[0].token_ids


def test_pc_1_three_copies_of_a_prompt_in_one_batch(make_harness: MakeHarness) -> None:
    harness = make_harness()
    expected = cold(make_harness, ids(1, 2 * B))
    for num_cached in ([0, 2 * B - 1, 2 * B - 1], [2 * B - 1] * 3):
        requests = [harness.add(ids(1, 2 * B)) for _ in range(3)]
        harness.run()
        assert [harness.results[request].answers[0].token_ids for request in requests] == [expected] * 3
        assert sorted(harness.results[request].num_cached_tokens for request in requests) == num_cached


def test_pc_3_a_recycled_block_no_longer_answers_for_its_old_content(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=4, max_model_len=4 * B)
    prompts = [ids(start, 2 * B) for start in (1, 60, 120)]
    first = harness.ask(prompts[0])
    for prompt in prompts[1:]:
        harness.ask(prompt)
    assert harness.ask(prompts[0]).answers[0].token_ids == first.answers[0].token_ids


@pytest.mark.parametrize("digest", [xxh3_digest, lambda parent, content: bytes(16)], ids=["xxh3", "constant"])
@pytest.mark.parametrize(
    ("first", "second", "num_common"),
    [
        ([65], [321], 0),
        ([100, 50], [99, 81], 0),
        ([100, 50], [131, 49], 0),
        ([3, 4], [4, 3], 0),
        ([3, 4, 5], [3, 4, 6], 2),
    ],
)
@pytest.mark.parametrize("num_head_tokens", [0, 2 * B])
def test_pc_4_a_hit_ends_at_the_first_differing_token(
    make_harness: MakeHarness,
    digest: BlockDigest,
    first: list[int],
    second: list[int],
    num_common: int,
    num_head_tokens: int,
) -> None:
    head, tail = ids(5, num_head_tokens), ids(9, B)
    harness = make_harness(digest=digest)
    harness.ask(head + first + tail)
    result = harness.ask(head + second + tail)
    assert result.num_cached_tokens == num_head_tokens + num_common
    assert result.answers[0].token_ids == cold(make_harness, head + second + tail)


@pytest.mark.parametrize("num_requests", [2, 4])
@pytest.mark.parametrize("budget", [256, 20])
def test_pc_5_requests_that_start_together_never_read_what_is_not_written(
    make_harness: MakeHarness, num_requests: int, budget: int
) -> None:
    harness = make_harness(max_num_batched_tokens=budget)
    prompts = [ids(1, 3 * B) + ids(10 * i, 5) for i in range(num_requests)]
    requests = [harness.add(prompt) for prompt in prompts]
    harness.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert harness.results[request].answers[0].token_ids == cold(make_harness, prompt)


def test_pc_5_the_others_go_on_when_the_first_is_cancelled_while_it_computes(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_batched_tokens=20)
    prompts = [ids(1, 3 * B) + ids(10 * i, 5) for i in range(3)]
    requests = [harness.add(prompt) for prompt in prompts]
    harness.step()
    harness.core.abort([requests[0]])
    harness.run()
    for request, prompt in zip(requests[1:], prompts[1:], strict=True):
        assert harness.results[request].answers[0].token_ids == cold(make_harness, prompt)


def test_requests_that_start_together_compute_their_common_prefix_once(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=128, max_num_batched_tokens=1024)
    requests = [harness.add(ids(1, 6 * B) + ids(100 + i, 5)) for i in range(8)]
    harness.run()
    cached = sorted(harness.results[request].num_cached_tokens for request in requests)
    assert cached == [0] + [6 * B] * 7


def test_pc_6_hits_do_not_depend_on_chunks(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_batched_tokens=2 * B, num_blocks=128)
    prompt = ids(1, 6 * B + 3)
    third = prompt[: 5 * B] + ids(77, B)
    first = harness.ask(prompt)
    second = harness.ask(prompt)
    assert second.num_cached_tokens == 6 * B + 2
    result = harness.ask(third)
    assert result.num_cached_tokens == 5 * B
    whole = make_harness(max_num_batched_tokens=1024, num_blocks=128)
    assert second.answers == first.answers == whole.ask(prompt).answers
    whole.reset_cache()
    assert result.answers == whole.ask(third).answers


@pytest.mark.parametrize("policy", get_args(SchedulePolicy))
def test_pc_8_what_a_preempted_request_finds_of_its_own_is_no_hit(
    make_harness: MakeHarness, policy: SchedulePolicy
) -> None:
    harness, uncached = (
        make_harness(num_blocks=8, max_model_len=8 * B, schedule_policy=policy, prefix_cache=prefix_cache)
        for prefix_cache in (True, False)
    )
    requests = [harness.add(ids(30 * i, 20), max_tokens=70) for i in range(6)]
    while harness.core.has_work:
        harness.step()
        assert harness.stats.cache.num_hit_tokens <= harness.stats.cache.num_queried_tokens
    for i in range(6):
        uncached.add(ids(30 * i, 20), max_tokens=70)
    uncached.run()
    assert harness.stats.num_preemptions > 0
    assert harness.stats.num_computed_tokens < uncached.stats.num_computed_tokens, "it finds its own blocks, though"
    assert [harness.results[request].num_cached_tokens for request in requests] == [0] * 6
    assert harness.stats.cache.num_hit_tokens == 0
    assert harness.stats.cache.num_queried_tokens == 6 * 20


def test_pc_9_generated_tokens_are_hits_in_the_next_turn(make_harness: MakeHarness) -> None:
    harness = make_harness()
    prompt = ids(1, 2 * B)
    answer = harness.ask(prompt, max_tokens=2 * B).answers[0].token_ids
    turn = [*prompt, *answer, 7]
    result = harness.ask(turn)
    assert result.num_cached_tokens == 4 * B - 1
    assert result.answers[0].token_ids == cold(make_harness, turn)


def test_pc_7_only_requests_of_one_kind_and_value_of_namespace_share(make_harness: MakeHarness) -> None:
    harness = make_harness()
    prompt = ids(1, 3 * B)
    fields: list[dict[str, str]] = [{}, {"salt": "S"}, {"salt": "T"}, {"adapter": "S"}, {"tenant": "S"}]
    for num_cached_tokens in (0, 3 * B - 1):
        for given in fields:
            assert harness.ask(prompt, namespace=encode_namespace(**given)).num_cached_tokens == num_cached_tokens


def test_without_the_prefix_cache_nothing_is_reused(make_harness: MakeHarness) -> None:
    harness = make_harness(prefix_cache=False)
    for _ in range(2):
        assert harness.ask(ids(1, 3 * B)).num_cached_tokens == 0
    assert harness.stats.cache.num_free_blocks == harness.stats.cache.num_blocks


def test_rt_4_two_who_compute_one_prefix_at_once_end_up_with_one_copy_of_it(make_harness: MakeHarness) -> None:
    """Only those who want the scores of their prompts do so: they cannot wait for blocks, which hold no logits."""
    prefix = ids(1, 4 * B)
    prompts = [[*prefix, 3], [*prefix, 4], ids(100, 4 * B)]
    params: list[dict[str, Any]] = [{"prompt_logprobs": 0}, {"prompt_logprobs": 0}, {}]
    harness = make_harness(num_blocks=14, max_num_batched_tokens=9 * B, max_model_len=5 * B)
    twins = [harness.add(prompts[number], max_tokens=B - 2, **params[number]) for number in range(2)]
    harness.step()
    assert harness.stats.cache.num_in_use_blocks == 4 + 2
    third = harness.add(prompts[2], max_tokens=B - 2)
    harness.step()
    assert harness.stats.num_running == 3
    harness.run()
    for request, prompt, own in zip([*twins, third], prompts, params, strict=True):
        alone = make_harness().ask(prompt, max_tokens=B - 2, **own)
        assert harness.results[request].answers == alone.answers
        assert harness.results[request].prompt_logprobs == alone.prompt_logprobs


def test_rt_6_a_reset_frees_every_cached_block_and_leaves_running_answers_alone(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.ask(ids(60, 3 * B))
    num_cached_blocks = harness.stats.cache.num_cached_blocks
    request = harness.add(ids(1, 2 * B), max_tokens=B)
    for _ in range(4):
        harness.step()
    assert harness.core.control(ResetCache()) == CacheWasReset(num_cached_blocks, num_kept_blocks=2)
    assert harness.stats.cache.num_cached_blocks == 0
    harness.run()
    expected = cold(make_harness, ids(1, 2 * B), max_tokens=B)
    assert harness.results[request].answers[0].token_ids == expected
    assert harness.ask(ids(1, 2 * B), max_tokens=B).answers[0].token_ids == expected
    harness.reset_cache()
    assert harness.stats.cache.num_free_blocks == harness.stats.cache.num_blocks
