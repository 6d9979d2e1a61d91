"""What the engine says of a prompt, between two steps."""

from array import array

from radixserve.core.namespace import encode_namespace
from radixserve.protocol import ExplainPrompt, PromptFacts
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
