"""What the engine says of a prompt, and of its tree, between two steps."""

from array import array

from radixserve.core.namespace import encode_namespace
from radixserve.protocol import ExplainPrompt, LostPrefix, PinAt, PromptFacts, ShowTree, TreeView
from tests.clock import FakeClock
from tests.engine.harness import BLOCK_SIZE as B
from tests.engine.harness import Harness, MakeHarness, ids


def facts_of(harness: Harness, prompt: list[int], namespace: bytes = b"") -> PromptFacts:
    facts = harness.core.control(ExplainPrompt(array("i", prompt).tobytes(), namespace, True))
    assert isinstance(facts, PromptFacts)
    return facts


def test_the_hit_is_what_the_request_then_finds(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.ask(ids(0, 60))
    prompt = ids(0, 40) + ids(5, 20)
    facts = facts_of(harness, prompt)
    assert facts.num_hit_tokens == harness.ask(prompt).num_cached_tokens == 40
    (other,) = facts.others
    assert array("i", other.token_ids).tolist()[:20] == ids(0, 60)[40:]


def test_another_tenants_prompts_are_not_told_of(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.ask(ids(0, 60), namespace=encode_namespace(tenant="b"))
    facts = facts_of(harness, ids(0, 60), encode_namespace(tenant="a"))
    assert facts == PromptFacts(60, 0, 0, lost=None, others=[], num_tokens_elsewhere=0)


def test_a_prefix_that_went_after_its_pins_time_expired(make_harness: MakeHarness) -> None:
    clock = FakeClock()
    harness = make_harness(num_blocks=24, clock=clock)
    prompt = ids(1, 3 * B)
    harness.ask(prompt, pins=[PinAt("p", 2 * B, 60.0)])
    harness.ask(ids(0, 22 * B), max_tokens=1)
    assert facts_of(harness, prompt).num_hit_tokens == 2 * B
    clock.seconds += 61
    harness.step()
    harness.ask([9, *ids(0, 22 * B)], max_tokens=1)
    assert facts_of(harness, [*prompt, 1]).lost == LostPrefix(3 * B, "expired", 0.0, 61.0)


def test_a_prefix_whose_pin_was_broken_says_so(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=16, max_model_len=16 * B, clock=FakeClock())
    prompt = ids(1, 2 * B + 1)
    harness.ask(prompt, pins=[PinAt("p", 2 * B, 60.0)], max_tokens=1)
    harness.ask(ids(0, 15 * B), max_tokens=1)
    lost = facts_of(harness, prompt).lost
    assert lost is not None
    assert (lost.reason, lost.num_tokens) == ("unpinned", B), "its deeper block alone was needed"


def test_the_tree_says_where_a_running_request_is(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.ask(ids(0, 3 * B + 1), namespace=encode_namespace(tenant="a"), max_tokens=1)
    request_id = harness.add(ids(0, 3 * B + 1), namespace=encode_namespace(tenant="a"))
    harness.step()
    view = harness.core.control(ShowTree("a", 10, 100))
    assert isinstance(view, TreeView)
    (node, tail) = view.nodes
    assert (node.num_blocks, node.num_holders, node.request_ids) == (3, 1, [request_id])
    assert (tail.is_tail, tail.num_holders, tail.request_ids) == (True, 0, [])
    assert harness.core.control(ShowTree("b", 10, 100)) == TreeView([], 0)
    harness.run()
