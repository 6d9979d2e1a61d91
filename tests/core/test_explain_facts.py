"""What the cache says of a prompt: its hit, what else is cached behind it, and what other namespaces hold."""

import pickle
import random
from array import array
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixserve.core import other_prompts
from radixserve.core.namespace import encode_namespace
from radixserve.core.other_prompts import MAX_PROMPTS
from radixserve.core.prompt_facts import explain
from radixserve.protocol import MAX_OTHER_TOKENS, ExplainPrompt, PromptFacts
from tests.clock import FakeClock
from tests.core.driver import Driver, make_sequence, num_common


def facts_of(
    driver: Driver, prompt: Iterable[int], namespace: bytes = b"", *, sees_others: bool = False
) -> PromptFacts:
    """The facts of a prompt, which change nothing."""
    before = pickle.dumps(driver.cache)
    facts = explain(driver.cache, ExplainPrompt(array("i", prompt).tobytes(), namespace, sees_others))
    assert pickle.dumps(driver.cache) == before
    return facts


def others_of(facts: PromptFacts) -> list[list[int]]:
    return [array("i", other.token_ids).tolist() for other in facts.others]


def test_the_hit_is_what_a_request_would_find() -> None:
    driver = Driver(num_blocks=32, block_size=4)
    driver.run(list(range(10)), [50, 51, 52])
    for prompt in (range(3), range(10), range(15), [0, 1, 2, 3, 4, 9], [7]):
        assert facts_of(driver, prompt).num_hit_tokens == driver.num_cached(prompt)


def test_others_begin_at_the_end_of_a_hit_inside_a_block() -> None:
    driver = Driver(num_blocks=32, block_size=4)
    driver.run(list(range(10)), [50, 51, 52])
    facts = facts_of(driver, [*range(6), 99, 98, 97])
    assert (facts.num_hit_tokens, facts.num_common_tokens) == (6, 6)
    assert others_of(facts) == [[6, 7, 8, 9, 50, 51]]


def test_a_prompt_that_is_cached_to_its_last_token_diverges_nowhere() -> None:
    driver = Driver(num_blocks=32, block_size=4)
    driver.run(list(range(10)), [50, 51, 52])
    for num_tokens in (8, 10):
        facts = facts_of(driver, range(num_tokens))
        assert (facts.num_hit_tokens, facts.num_common_tokens) == (num_tokens - 1, num_tokens)
        assert others_of(facts) == [[*range(num_tokens - 1, 10), 50, 51]]


def test_a_prompt_that_goes_on_where_a_cached_one_ended_leaves_none() -> None:
    driver = Driver(num_blocks=32, block_size=4)
    driver.run(list(range(10)))
    for prompt in (range(10), range(14)):
        assert facts_of(driver, prompt).others == []


def test_another_public_prefix_is_no_other_prompt() -> None:
    driver = Driver(num_blocks=32, block_size=2, public_prefixes=[[1, 2, 3, 4], [1, 2, 5, 6]])
    driver.run([1, 2, 3, 4, 9])
    facts = facts_of(driver, [1, 2, 5, 6, 9])
    assert (facts.num_hit_tokens, facts.num_common_tokens, facts.others) == (2, 2, [])


def test_the_others_are_those_used_last() -> None:
    clock = FakeClock()
    driver = Driver(num_blocks=64, block_size=2, clock=clock)
    prompts = [[0, 1, number, 9] for number in range(10, 16)]
    for prompt in [*prompts, [*prompts[0], 8]]:
        clock.seconds += 1
        driver.run(prompt)
    clock.seconds += 5
    facts = facts_of(driver, [0, 1, 7, 7])
    assert others_of(facts) == [[10, 9, 8], [15, 9], [14, 9], [13, 9]]
    assert [(other.seconds_idle, other.num_requests_hit) for other in facts.others] == [(5, 1), (6, 0), (7, 0), (8, 0)]


def test_below_a_wide_node_what_begins_alike_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_prompts, "MAX_FOLLOWERS", 3)
    driver = Driver(num_blocks=64, block_size=4)
    for number in range(10, 20):
        driver.run([0, 1, 2, 3, number, 5, 6, 7])
    facts = facts_of(driver, [0, 1, 2, 3, 10, 5, 9, 9])
    assert (facts.num_hit_tokens, others_of(facts)) == (6, [[6, 7]])
    assert len(facts_of(driver, [0, 1, 2, 3, 9, 9]).others) == 3


def test_deeper_branches_come_where_few_leave_at_the_hit() -> None:
    driver = Driver(num_blocks=64, block_size=2)
    for number in range(10, 16):
        driver.run([0, 1, 2, 3, 4, number])
    others = others_of(facts_of(driver, [0, 1, 7, 7]))
    assert len(others) == MAX_PROMPTS
    assert all(other[:3] == [2, 3, 4] for other in others)


def test_what_is_held_of_a_long_prompt_is_cut() -> None:
    driver = Driver(num_blocks=160, block_size=16)
    driver.run(list(range(2500)))
    for prompt in ([0, 1, 7], list(range(32)), [7]):
        facts = facts_of(driver, prompt)
        (other,) = others_of(facts)
        assert other == list(range(facts.num_hit_tokens, facts.num_hit_tokens + MAX_OTHER_TOKENS))


def test_other_salts_of_the_tenant_are_told_of_where_they_may_be_seen() -> None:
    driver = Driver(num_blocks=64, block_size=4)
    own, salted, stranger = (
        encode_namespace(tenant="a"),
        encode_namespace(tenant="a", salt="s"),
        encode_namespace(tenant="b"),
    )
    driver.run(list(range(9)), namespace=salted)
    driver.run(list(range(20)), namespace=stranger)
    facts = facts_of(driver, range(20), own, sees_others=True)
    assert (facts.num_hit_tokens, facts.others, facts.num_tokens_elsewhere) == (0, [], 9)
    assert facts_of(driver, range(20), own).num_tokens_elsewhere == 0


A, B = encode_namespace(tenant="a"), encode_namespace(tenant="b")
SALTS_OF_A = [A, *(encode_namespace(tenant="a", salt=salt) for salt in ("s", "t"))]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 2, 4]), is_public=st.booleans())
def test_the_facts_are_those_of_a_plain_list_of_the_tenants_prompts(
    seed: int, block_size: int, is_public: bool
) -> None:
    rng = random.Random(seed)
    clock = FakeClock()
    public = [[rng.randrange(2) for _ in range(2 * block_size)]] if is_public else []
    driver = Driver(60, block_size, clock=clock, public_prefixes=public)
    prompts: list[list[int]] = [[], *public]
    for _ in range(14):
        clock.seconds += 1
        before = rng.choice(prompts)
        prompt = before[: rng.randrange(len(before) + 1)] + [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        prompts.append(prompt[: 9 * block_size])
        driver.start(prompts[-1], namespace=rng.choice([*SALTS_OF_A, B, b""]))
        if len(driver.running) > 1:
            driver.finish(rng.choice(driver.running))
    for prompt in [*rng.sample(prompts[1:], 4), [rng.randrange(2) for _ in range(6)]]:
        for namespace in [A, SALTS_OF_A[1], b""]:
            check_facts(driver, prompt, namespace)


def check_facts(driver: Driver, prompt: list[int], namespace: bytes) -> None:
    facts = facts_of(driver, prompt, namespace, sees_others=True)
    assert facts.num_tokens == len(prompt)
    assert facts.num_hit_tokens == driver.num_cached(prompt, namespace)
    shared = lengths_shared(driver, prompt, namespace)
    assert facts.num_common_tokens == max((length for length, _ in shared), default=0)
    own_leaves = {tokens for length, tokens in shared if tokens and length == facts.num_common_tokens < len(tokens)}
    others = [(*prompt[: facts.num_hit_tokens], *other) for other in others_of(facts)]
    assert len(set(others)) == len(others) == min(len(own_leaves), MAX_PROMPTS)
    assert set(others) <= own_leaves
    ages = [other.seconds_idle for other in facts.others]
    assert ages == sorted(ages)
    elsewhere = [other for other in SALTS_OF_A if namespace != b"" and other != namespace]
    assert facts.num_tokens_elsewhere == max(
        (length for other in elsewhere for length, _ in lengths_shared(driver, prompt, other, only_used=True)),
        default=0,
    )


def lengths_shared(
    driver: Driver, prompt: list[int], namespace: bytes, *, only_used: bool = False
) -> list[tuple[int, tuple[int, ...]]]:
    """For each node: the tokens that a prompt shares with its path, and, if another prompt ends there, that one's.

    only_used: nothing, if no path ends in the namespace.
    """
    sequence = make_sequence(prompt, namespace)
    namespaces = driver.namespaces_of(sequence)
    entries = driver.entries()
    if only_used and all(entry.namespaces[-1] != namespace for entry in entries):
        return []
    path = driver.path_of(sequence)
    shared = []
    for entry in entries:
        length = min(num_common(entry.token_ids, prompt), num_common(entry.namespaces, namespaces) * driver.block_size)
        is_leaf = not any(below.namespaces[-1] == entry.namespaces[-1] for below in entry.followers)
        same_path = all(other == path.namespace_of(index) for index, other in enumerate(entry.namespaces))
        is_other = is_leaf and same_path and entry.namespaces[-1] == namespace
        shared.append((length, entry.token_ids if is_other else ()))
    return shared
