"""What the cache says of a prompt: its hit, what else is cached behind it, and what other namespaces hold."""

import pickle
from array import array
from collections.abc import Iterable

from radixserve.core.namespace import encode_namespace
from radixserve.core.other_prompts import MAX_PROMPTS, MAX_TOKENS
from radixserve.core.prompt_facts import explain
from radixserve.protocol import ExplainPrompt, PromptFacts
from tests.clock import FakeClock
from tests.core.driver import Driver


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


def test_deeper_branches_come_where_few_leave_at_the_hit() -> None:
    driver = Driver(num_blocks=64, block_size=2)
    for number in range(10, 16):
        driver.run([0, 1, 2, 3, 4, number])
    others = others_of(facts_of(driver, [0, 1, 7, 7]))
    assert len(others) == MAX_PROMPTS
    assert all(other[:3] == [2, 3, 4] for other in others)


def test_what_is_held_of_a_long_prompt_is_cut() -> None:
    driver = Driver(num_blocks=400, block_size=16)
    driver.run(list(range(5000)))
    (other,) = others_of(facts_of(driver, [0, 1, 7]))
    assert other == list(range(2, MAX_TOKENS))


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
