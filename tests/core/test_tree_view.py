"""What a tenant sees of the tree, against the nodes as a walk shows them and the sequences as they run."""

import pickle
import random
from array import array
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from radixserve.core.namespace import encode_namespace, tenant_of
from radixserve.core.tree_view import PREVIEW_TOKENS, show_tree
from radixserve.protocol import PinAt, ShowTree, TreeNode, TreeView
from tests.clock import FakeClock
from tests.core.driver import Driver, Entry, make_sequence

NAMESPACES = [b"", encode_namespace(tenant="a"), encode_namespace(tenant="a", salt="s"), encode_namespace(tenant="b")]
TENANTS = [None, "a", "b"]


def view_of(driver: Driver, tenant: str | None = None, max_depth: int = 100, max_nodes: int = 1000) -> TreeView:
    """What a tenant sees, which changes nothing."""
    before = pickle.dumps(driver.cache)
    running = [sequence for sequence in driver.running if sequence.request.tenant == tenant]
    view = show_tree(driver.cache, ShowTree(tenant, max_depth, max_nodes), running)
    assert pickle.dumps(driver.cache) == before
    return view


def paths_of(view: TreeView) -> list[tuple[TreeNode, tuple[int, ...]]]:
    """The nodes, each with the tokens shown on its path; checks that it comes right below the one above it."""
    path: list[TreeNode] = []
    paths = []
    for node in view.nodes:
        assert 1 <= node.depth <= len(path) + 1
        del path[node.depth - 1 :]
        assert not path or node.num_tokens_above == path[-1].num_tokens_above + path[-1].num_tokens
        assert not path or not path[-1].is_tail
        path.append(node)
        paths.append((node, tuple(token for one in path for token in array("i", one.preview_token_ids))))
    return paths


def own_entries(driver: Driver, tenant: str | None) -> list[Entry]:
    return [entry for entry in driver.entries() if tenant_of(entry.namespaces[-1]) == tenant]


def test_a_shared_run_comes_before_what_goes_on_from_it_the_last_used_first() -> None:
    clock = FakeClock()
    driver = Driver(num_blocks=32, block_size=4, clock=clock)
    for last in (50, 60):
        driver.run([*range(8), *range(last, last + 6)])
        clock.seconds += 10
    first, second, second_tail, third, third_tail = view_of(driver).nodes
    assert (first.depth, first.num_tokens, first.num_blocks, first.num_hits, first.seconds_idle) == (1, 8, 2, 1, 10)
    assert array("i", second.preview_token_ids).tolist() == [60, 61, 62, 63]
    assert (second.depth, second.num_tokens_above, second.seconds_idle, second.is_tail) == (2, 8, 10, False)
    assert (second_tail.depth, second_tail.num_tokens, second_tail.is_tail) == (3, 2, True)
    assert array("i", third.preview_token_ids).tolist() == [50, 51, 52, 53]
    assert third_tail.seconds_idle == 20


def test_a_request_sits_at_the_deepest_node_that_is_shown() -> None:
    driver = Driver(num_blocks=32, block_size=4)
    running = []
    for last in (50, 60):
        sequence = driver.start([*range(8), *range(last, last + 6)])
        sequence.request.request_id = f"r{last}"
        running.append(sequence)
    shared, *below = view_of(driver).nodes
    assert (shared.num_holders, shared.request_ids) == (2, [])
    assert sorted(node.request_ids for node in below) == [["r50"], ["r60"]]
    (shared,) = view_of(driver, max_depth=1).nodes
    assert shared.request_ids == ["r50", "r60"]


def test_what_is_in_use_comes_before_what_is_not() -> None:
    clock = FakeClock()
    driver = Driver(num_blocks=32, block_size=4, clock=clock)
    driver.start([50, 51, 52, 53, 54])
    clock.seconds += 1
    driver.run([60, 61, 62, 63, 64])
    assert [(node.num_holders, node.seconds_idle) for node in view_of(driver).nodes][:2] == [(1, 0.0), (0, 0.0)]
    (node,) = view_of(driver, max_nodes=1).nodes
    assert array("i", node.preview_token_ids)[0] == 50


def test_answers_of_one_request_count_as_holders_and_are_named_once() -> None:
    driver = Driver(num_blocks=32, block_size=4)
    sequence = driver.start(range(9))
    sequence.request.request_id = "r"
    driver.fork(sequence, [50])
    (node,) = view_of(driver).nodes
    assert (node.num_holders, node.request_ids) == (2, ["r"])


def test_pinned_blocks_are_counted_in_the_node_that_they_are_in() -> None:
    driver = Driver(num_blocks=32, block_size=4, max_pinned_share=0.5)
    sequence = make_sequence(range(20))
    driver.cache.pins.reserve(sequence, [PinAt("p", 12, 60.0)])
    assert driver.admit(sequence, 20)
    driver.compute(sequence)
    driver.cache.pins.make(sequence)
    driver.finish(sequence)
    driver.run([*range(8), 50, 51, 52, 53])
    pinned = [(node.num_blocks, node.num_pinned_blocks) for node in view_of(driver).nodes]
    assert sorted(pinned) == [(1, 0), (2, 2), (3, 1)]


def test_a_preview_is_cut_and_the_rest_is_not_sent() -> None:
    driver = Driver(num_blocks=32, block_size=16)
    driver.run(range(161))
    (node,) = [node for node in view_of(driver).nodes if not node.is_tail]
    assert array("i", node.preview_token_ids).tolist() == list(range(PREVIEW_TOKENS))
    assert node.num_tokens == 160


def test_of_many_nodes_those_used_last_are_shown() -> None:
    clock = FakeClock()
    driver = Driver(num_blocks=100, block_size=1, clock=clock)
    for number in [*range(40), 7]:
        clock.seconds += 1
        driver.run([number, 500])
    view = view_of(driver, max_nodes=3)
    assert view.num_nodes == 40
    assert [array("i", node.preview_token_ids)[0] for node in view.nodes] == [7, 39, 38]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 2, 4]),
    is_public=st.booleans(),
    max_depth=st.integers(1, 6),
    max_nodes=st.integers(1, 12),
)
def test_a_tenant_sees_its_own_nodes_and_no_others(
    seed: int, block_size: int, is_public: bool, max_depth: int, max_nodes: int
) -> None:
    rng = random.Random(seed)
    clock = FakeClock()
    public = [[rng.randrange(2) for _ in range(2 * block_size)]] if is_public else []
    driver = Driver(40, block_size, clock=clock, public_prefixes=public)
    prompts: list[list[int]] = [[], *public]
    for number in range(14):
        clock.seconds += 1
        before = rng.choice(prompts)
        prompt = before[: rng.randrange(len(before) + 1)] + [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        prompts.append(prompt[: 8 * block_size])
        if len(driver.running) < 3:
            sequence = driver.start(prompts[-1], namespace=rng.choice(NAMESPACES))
            sequence.request.request_id = str(number)
        if rng.random() < 0.6:
            driver.finish(rng.choice(driver.running))
    for tenant in TENANTS:
        entries = own_entries(driver, tenant)
        check_all(driver, tenant, entries)
        view = view_of(driver, tenant, max_depth, max_nodes)
        assert view.num_nodes == len(entries)
        assert len(view.nodes) <= max_nodes
        assert all(node.depth <= max_depth for node in view.nodes)
        whole = {(node.num_tokens_above, path) for node, path in paths_of(view_of(driver, tenant))}
        assert {(node.num_tokens_above, path) for node, path in paths_of(view)} <= whole
        if max_nodes >= len(entries) and max_depth >= max((entry.depth for entry in entries), default=0):
            assert view == view_of(driver, tenant)
        sequences = [sequence for sequence in driver.running if sequence.request.tenant == tenant]
        assert {name for node in view.nodes for name in node.request_ids} <= {s.request.request_id for s in sequences}


def check_all(driver: Driver, tenant: str | None, entries: list[Entry]) -> None:
    """A view without limits shows every node of the tenant, and who holds it."""
    holders = Counter(block_id for sequence in driver.running for block_id in sequence.block_table)
    expected: Counter[tuple[int, tuple[int, ...], int, int, bool]] = Counter()
    for entry in entries:
        first = entry.own_block_ids[0]
        num_hidden = sum(tenant_of(namespace) != tenant for namespace in entry.namespaces) * driver.block_size
        num_own_tokens = len(entry.token_ids) - (len(entry.block_ids) - entry.num_own_blocks) * driver.block_size
        above = len(entry.token_ids) - num_own_tokens
        expected[above, entry.token_ids[num_hidden:], entry.num_own_blocks, holders[first], entry.is_tail] += 1
    assert expected == Counter(
        (node.num_tokens_above, path, node.num_blocks, node.num_holders, node.is_tail)
        for node, path in paths_of(view_of(driver, tenant))
    )
    for node in view_of(driver, tenant).nodes:
        assert (node.seconds_idle == 0) >= (node.num_holders > 0)
