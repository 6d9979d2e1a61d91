"""Public prefixes through the whole engine on a stub model: exact hits, and answers that never change.

The stub checks on every step that each row reads K/V of exactly its own prefix (see tests.stub).
"""

from typing import Any, get_args

import pytest

from radixserve.config import SchedulePolicy
from radixserve.core.namespace import encode_namespace
from radixserve.protocol import ShowTenant, TenantStats
from tests.engine.harness import BLOCK_SIZE as B
from tests.engine.harness import Harness, MakeHarness, ids

PUBLIC = ids(3, 3 * B)
TENANTS = [encode_namespace(tenant=tenant, build="m") for tenant in ("a", "b", "c", None)]
A, OTHER, *_ = TENANTS


@pytest.fixture
def make_public(make_harness: MakeHarness) -> MakeHarness:
    """Make harnesses with a public prefix of three blocks and one of which it is the beginning."""

    def make(**options: Any) -> Harness:
        return make_harness(**{"public_prefixes": [PUBLIC, PUBLIC + ids(90, B)], "num_blocks": 128, **options})

    return make


def cold(make_harness: MakeHarness, prompt: list[int], **params: Any) -> list[list[int]]:
    return [answer.token_ids for answer in make_harness(prefix_cache=False).ask(prompt, **params).answers]


@pytest.mark.parametrize("num_behind", [0, 1, B - 1, B, 2 * B + 3])
def test_two_tenants_share_exactly_the_public_blocks(
    make_public: MakeHarness, make_harness: MakeHarness, num_behind: int
) -> None:
    harness = make_public()
    prompt = PUBLIC + ids(11, num_behind)
    results = [harness.ask(prompt, namespace=namespace) for namespace in (A, OTHER, A)]
    shared = min(len(PUBLIC), len(prompt) - 1)
    assert [result.num_cached_tokens for result in results] == [0, shared, len(prompt) - 1]
    expected = cold(make_harness, prompt)
    assert [[answer.token_ids for answer in result.answers] for result in results] == [expected] * 3


def test_pc_7_salts_adapters_and_builds_stay_apart(make_public: MakeHarness) -> None:
    harness = make_public()
    prompt = PUBLIC + ids(11, B)
    fields = [{}, {"salt": "S"}, {"salt": "T"}, {"adapter": "S"}, {"build": "S"}]
    namespaces = [encode_namespace(**{"tenant": "a", "build": "m", **values}) for values in fields]
    for expected in (0, len(prompt) - 1):
        assert {harness.ask(prompt, namespace=namespace).num_cached_tokens for namespace in namespaces} == {expected}


@pytest.mark.parametrize("policy", get_args(SchedulePolicy))
def test_tenants_that_start_together_compute_a_public_prefix_once(
    make_public: MakeHarness, policy: SchedulePolicy
) -> None:
    harness = make_public(max_num_batched_tokens=1024, schedule_policy=policy)
    ends = [ids(11 + number, 5) for number in range(2 * len(TENANTS))]
    requests = [
        harness.add(PUBLIC + end, namespace=namespace, max_tokens=1)
        for namespace, end in zip(TENANTS * 2, ends, strict=True)
    ]
    harness.run()
    cached = [harness.results[request].num_cached_tokens for request in requests]
    assert sorted(cached) == [0] + [len(PUBLIC)] * 7
    assert harness.stats.num_computed_tokens == len(PUBLIC) + 5 * len(requests)


def test_a_tenant_takes_over_when_the_writer_of_a_public_prefix_is_cancelled(
    make_public: MakeHarness, make_harness: MakeHarness
) -> None:
    harness = make_public(max_num_batched_tokens=B)
    prompt = PUBLIC + ids(11, 5)
    writer, waiting = (harness.add(prompt, namespace=namespace) for namespace in (A, OTHER))
    harness.step()
    harness.step()
    harness.core.abort([writer])
    result = harness.result_of(waiting)
    assert result.num_cached_tokens == 2 * B
    assert [answer.token_ids for answer in result.answers] == cold(make_harness, prompt)


@pytest.mark.parametrize("num_behind", [0, 1, B - 1, B + 3])
def test_several_answers_and_beams_go_on_from_a_public_prefix(
    make_public: MakeHarness, make_harness: MakeHarness, num_behind: int
) -> None:
    harness = make_public()
    prompt = PUBLIC + ids(11, num_behind)
    several = {"n": 3, "temperature": 1.0, "seed": 4, "max_tokens": 2 * B}
    beams = {"beam_width": 3, "max_tokens": B + 2}
    expected = cold(make_harness, prompt, **several)
    searched = make_harness(prefix_cache=False).search(prompt, **beams)
    for namespace in TENANTS:
        answers = harness.ask(prompt, namespace=namespace, **several).answers
        assert [answer.token_ids for answer in answers] == expected
        found = harness.search(prompt, namespace=namespace, **beams)
        assert found.num_cached_tokens == len(prompt) - 1
        assert [answer.token_ids for answer in found.answers] == [answer.token_ids for answer in searched.answers]


@pytest.mark.parametrize("policy", get_args(SchedulePolicy))
def test_answers_are_the_same_under_pressure(
    make_public: MakeHarness, make_harness: MakeHarness, policy: SchedulePolicy
) -> None:
    harness = make_public(num_blocks=14, max_model_len=14 * B, schedule_policy=policy)
    prompts = [PUBLIC + ids(20 * number, 3 + 5 * number) for number in range(4)]
    requests = {}
    for namespace in TENANTS:
        for prompt in prompts:
            requests[harness.add(prompt, namespace=namespace, max_tokens=40)] = prompt
    harness.run()
    assert harness.stats.num_preemptions > 0
    assert harness.stats.cache.num_evicted_tokens > 0
    expected = {tuple(prompt): cold(make_harness, prompt, max_tokens=40) for prompt in prompts}
    for request, prompt in requests.items():
        assert [answer.token_ids for answer in harness.results[request].answers] == expected[tuple(prompt)]


def test_a_scored_prompt_reads_no_public_blocks_and_the_next_one_does(make_public: MakeHarness) -> None:
    harness = make_public()
    prompt = PUBLIC + ids(11, B)
    for namespace in (A, OTHER):
        assert harness.ask(prompt, namespace=namespace, prompt_logprobs=0).num_cached_tokens == 0
    assert harness.ask([*PUBLIC, 7], namespace=OTHER).num_cached_tokens == len(PUBLIC)


def test_what_a_tenant_finds_of_public_prefixes_counts_for_it_alone(make_public: MakeHarness) -> None:
    harness = make_public()
    prompt = PUBLIC + ids(11, B)
    for namespace in (A, OTHER, OTHER):
        harness.ask(prompt, namespace=namespace)
    stats = {tenant: harness.core.control(ShowTenant(tenant)) for tenant in ("a", "b", "c")}
    counts = {
        tenant: (found.num_queried_tokens, found.num_hit_tokens)
        for tenant, found in stats.items()
        if isinstance(found, TenantStats)
    }
    assert counts == {
        "a": (len(prompt), 0),
        "b": (2 * len(prompt), len(PUBLIC) + len(prompt) - 1),
        "c": (0, 0),
    }
