"""What beams hold: as many blocks as their tokens need and no more, whatever else runs and whoever gives way."""

import random
from collections.abc import Sequence

import pytest

from radixserve.core.batch import SampledTokens, ScheduledBatch
from radixserve.engine.answer import GenerationResult
from tests.byte_tokenizer import END
from tests.engine.harness import Harness, MakeHarness, ids


def branching(context: Sequence[int]) -> dict[int, float]:
    """A table with close races, so that beams fork and die all the time; now and then an answer may end."""
    numbers = random.Random(hash(tuple(context)))
    shares = {numbers.randrange(200): numbers.uniform(0.5, 1.0) for _ in range(6)}
    if numbers.random() < 0.2:
        shares[END] = numbers.uniform(0.2, 1.0)
    total = sum(shares.values())
    return {token_id: share / total for token_id, share in shares.items()}


def num_blocks_needed(contexts: list[list[int]], block_size: int) -> int:
    full = {tuple(context[:end]) for context in contexts for end in range(block_size, len(context) + 1, block_size)}
    tails = {tuple(context) for context in contexts if len(context) % block_size}
    return len(full) + len(tails)


def watch_blocks(harness: Harness, block_size: int) -> list[int]:
    """Check the blocks of each step in which beams choose; return how many there were. One search at a time."""
    counts: list[int] = []
    execute = harness.executor.execute

    def checked(batch: ScheduledBatch) -> SampledTokens:
        contexts = [slot.token_ids.tolist() for row in batch.rows for slot in row.samples]
        if contexts:
            counts.append(len({block_id for row in batch.rows for block_id in row.block_table}))
            assert counts[-1] == num_blocks_needed(contexts, block_size)
        return execute(batch)

    harness.executor.execute = checked  # type: ignore[method-assign]
    return counts


def scores(result: GenerationResult) -> list[tuple[list[int], float]]:
    return [(answer.token_ids, answer.beam.score) for answer in result.answers]


@pytest.mark.parametrize("seed", range(20))
def test_a_group_holds_the_blocks_of_its_distinct_prefixes(make_harness: MakeHarness, seed: int) -> None:
    numbers = random.Random(seed)
    block_size = numbers.choice([1, 2, 3, 16])
    harness = make_harness(table=branching, num_blocks=600, block_size=block_size)
    counts = watch_blocks(harness, block_size)
    prompt = ids(seed, numbers.randint(1, 40))
    width, max_tokens = numbers.randint(1, 8), numbers.randint(1, 30)
    result = harness.search(prompt, beam_width=width, max_tokens=max_tokens, early_stopping="never")
    memory = result.beam_memory
    assert memory.block_size == block_size
    assert memory.peak_blocks == max(counts)
    assert memory.peak_blocks <= memory.peak_blocks_without_sharing


def test_the_figures_of_a_search_that_can_be_worked_out_by_hand(make_harness: MakeHarness) -> None:
    # Three beams over two tokens from the second step on, and each forks in each step.
    harness = make_harness(table=lambda _: {65: 0.6, 66: 0.4}, block_size=4)
    memory = harness.search(ids(1, 10), beam_width=2, max_tokens=4).beam_memory
    # 10 prompt and 3 computed tokens: 3 full blocks and a tail each, the prompt's 2 full blocks shared. Of the answers
    # AAA and AAB, or ABA, the third block holds the first 2 tokens.
    assert memory.peak_blocks_without_sharing == 8
    assert memory.peak_blocks in (5, 6)
    assert memory.blocks_copied >= 1


def test_beams_that_part_inside_a_block_copy_it_once_each_but_for_the_last(make_harness: MakeHarness) -> None:
    harness = make_harness(table=lambda _: {65 + i: 0.25 for i in range(4)})
    assert harness.search(ids(1, 10), beam_width=4, max_tokens=2).beam_memory.blocks_copied == 3
    assert harness.search(ids(9, 16), beam_width=4, max_tokens=2).beam_memory.blocks_copied == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preempted_group_goes_on_with_the_same_hypotheses(make_harness: MakeHarness, prefix_cache: bool) -> None:
    results = []
    for num_blocks in (400, 44):
        harness = make_harness(
            table=branching,
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=96,
            max_num_seqs=24,
            prefix_cache=prefix_cache,
        )
        requests = []
        for index in range(4):
            requests.append(harness.add_beams(ids(index, 11), beam_width=4, max_tokens=20, ignore_eos=True))
            requests.append(harness.add(ids(index, 15), max_tokens=25, ignore_eos=True))
        harness.run()
        assert not harness.failures
        results.append([harness.results[request] for request in requests])
        assert (harness.stats.num_preemptions > 0) == (num_blocks == 44)
    for roomy, tight in zip(*results, strict=True):
        assert [answer.token_ids for answer in roomy.answers] == [answer.token_ids for answer in tight.answers]
        assert [answer.beam for answer in roomy.answers] == [answer.beam for answer in tight.answers]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_blocks", [20, 21, 22, 23, 24])
def test_a_search_that_is_let_in_fits_the_pool_alone(
    make_harness: MakeHarness, num_blocks: int, prefix_cache: bool
) -> None:
    """The largest max_tokens runs, in the company of others that make it give way; one token more is refused."""
    for prompt_length in (1, 4, 7):
        harness = make_harness(
            table=branching, num_blocks=num_blocks, block_size=4, max_model_len=80, prefix_cache=prefix_cache
        )
        unlimited = harness.add_beams(ids(1, prompt_length), beam_width=4, max_tokens=None, ignore_eos=True)
        others = [harness.add(ids(50 * index, 20), max_tokens=30) for index in range(3)]
        harness.run()
        assert not harness.failures
        assert all(harness.results[other].answers[0].finish_reason for other in others)
        most = len(harness.results[unlimited].answers[0].token_ids)
        assert most > 4
        assert len(harness.search(ids(1, prompt_length), beam_width=4, max_tokens=most).answers[0].token_ids) <= most
        refused = harness.add_beams(ids(1, prompt_length), beam_width=4, max_tokens=most + 1)
        harness.run()
        assert harness.failures[refused].param == "max_tokens"
        assert str(most) in harness.failures[refused].message


def test_beams_that_fit_no_pool_are_refused_by_name(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=8, max_model_len=128)
    request = harness.add_beams(ids(1, 40), beam_width=8, max_tokens=2)
    harness.run()
    assert harness.failures[request].param == "beam_width"
    assert harness.stats.num_steps == 0


def test_max_tokens_beyond_the_context_ends_there_as_for_any_request(make_harness: MakeHarness) -> None:
    harness = make_harness(max_model_len=32)
    result = harness.search(ids(1, 20), beam_width=2, max_tokens=100, ignore_eos=True)
    assert [len(answer.token_ids) for answer in result.answers] == [12, 12]
    assert {answer.finish_reason for answer in result.answers} == {"length"}


def test_an_aborted_search_frees_its_blocks_at_once(make_harness: MakeHarness) -> None:
    harness = make_harness(table=branching)
    for num_steps in range(5):
        request = harness.add_beams(ids(1, 40), beam_width=5, max_tokens=50, ignore_eos=True)
        for _ in range(num_steps):
            harness.step()
        harness.core.abort([request])
        assert harness.stats.num_running == harness.stats.num_waiting == 0
        assert harness.stats.cache.num_in_use_blocks == 0


def test_a_group_takes_its_width_of_places_from_the_start(make_harness: MakeHarness) -> None:
    harness = make_harness(table=branching, max_num_seqs=5)
    harness.add_beams(ids(1, 40), beam_width=4, max_tokens=8, ignore_eos=True)
    harness.add(ids(2, 5), max_tokens=30)
    harness.add(ids(3, 5), max_tokens=30)
    for _ in range(6):
        harness.step()
        assert harness.stats.num_waiting == 1
    assert harness.stats.num_running == 5
    harness.run()


def test_a_failed_step_ends_the_search_with_an_error_and_spares_others(make_harness: MakeHarness) -> None:
    for fault in ("fail_on", "poison"):
        harness = make_harness(table=branching, **{fault: lambda context: len(context) == 14 and context[0] == 1})
        request = harness.add_beams(ids(1, 10), beam_width=3, max_tokens=8, ignore_eos=True)
        for _ in range(6):
            harness.step()
        other = harness.add(ids(2, 10))
        harness.run()
        assert harness.failures[request].kind == "internal_error"
        assert len(harness.results[other].answers[0].token_ids) == 4


@pytest.mark.parametrize("num_requests", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_many_searches_with_aborts_and_preemptions_lose_no_block(make_harness: MakeHarness, num_requests: int) -> None:
    numbers = random.Random(7)
    big = make_harness(table=branching, num_blocks=4000, block_size=4)
    small = make_harness(
        table=branching, num_blocks=60, block_size=4, max_model_len=120, max_num_seqs=40, max_queued_requests=1000
    )
    expected: dict[str, GenerationResult] = {}
    aborted: set[str] = set()
    for index in range(num_requests):
        width = numbers.randint(1, 6)
        params = {
            "max_tokens": numbers.randint(1, 24) if numbers.random() < 0.2 else 24,
            "n": numbers.randint(1, width),
            "length_penalty": numbers.choice([0.0, 1.0, -0.5]),
            "early_stopping": numbers.choice([True, False, "never"]),
            "ignore_eos": numbers.random() < 0.7,
            "min_tokens": numbers.choice([0, 1]),
            "frequency_penalty": numbers.choice([0.0, 0.5]),
        }
        prompt = ids(numbers.randrange(8), numbers.randint(1, 20))
        request = small.add_beams(prompt, beam_width=width, **params)
        expected[request] = big.search(prompt, beam_width=width, **params)
        if numbers.random() < 0.3:
            small.add(ids(index, 10), max_tokens=30, ignore_eos=True)
        for _ in range(numbers.choice([0, 0, 0, 20])):
            small.step()
        if numbers.random() < 0.15:
            aborted.add(request)
            small.core.abort([request])
    small.run(20_000)
    assert not small.failures
    assert small.stats.num_preemptions > num_requests / 10
    for request in expected.keys() - aborted:
        assert scores(small.results[request]) == scores(expected[request])
    small.reset_cache()
    assert small.stats.cache.num_free_blocks == small.stats.cache.num_blocks
