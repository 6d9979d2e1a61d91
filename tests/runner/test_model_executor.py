from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from radixserve.core.batch import SampledTokens
from radixserve.runner.model_executor import ModelExecutor
from tests.runner.tiny_executor import TinyExecutor, greedy, row, sampled_row, tiny_executor
from tests.sampling.slots import slot
from tests.tiny_models import tiny_transformers_model

POISON = 77


@pytest.fixture
def tiny(tiny_model: Path) -> TinyExecutor:
    return tiny_executor(tiny_model)


@pytest.fixture(scope="module")
def poisoned_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to which one token id is NaN."""
    model = tiny_transformers_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    directory = tmp_path_factory.mktemp("poisoned")
    model.save_pretrained(directory)
    return directory


def prompt(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(80, 160, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def assert_same(ours: SampledTokens, expected: SampledTokens, index: int = 0) -> None:
    """Slot `index` of ours is the only slot of expected: its token, and the best logprobs up to rounding."""
    assert ours.token_ids[index] == expected.token_ids[0]
    entry, other = ours.logprobs[index], expected.logprobs[0]
    assert entry is not None
    assert other is not None
    assert [token_id for token_id, _ in entry.top] == [token_id for token_id, _ in other.top]
    assert [value for _, value in entry.top] == pytest.approx([value for _, value in other.top], abs=1e-4)


def test_greedy_tokens_equal_those_of_transformers(tiny_model: Path) -> None:
    tokens, table = prompt(13, 0), list(range(8, 16))
    reference = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = torch.tensor([tokens])
    expected = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    executor, start = tiny_executor(tiny_model), 0
    for _ in range(12):
        answer = executor.run(sampled_row(tokens, table, start=start))
        start = len(tokens)
        tokens = [*tokens, *answer.token_ids]
    assert tokens == expected[0].tolist()


@pytest.mark.parametrize("chunks", [[1] * 23, [7, 9, 7], [4, 4, 4, 4, 4, 3], [22, 1], [1, 22]])
def test_a_prompt_in_chunks_gives_what_it_gives_whole(tiny: TinyExecutor, chunks: list[int]) -> None:
    tokens = prompt(23, 1)
    whole = tiny.run(sampled_row(tokens, [3, 1, 4, 0, 5, 9]))
    start, table = 0, [12, 10, 16, 11, 19, 13]
    for length in chunks[:-1]:
        answer = tiny.run(row(tokens[: start + length], table, start=start))
        assert answer == SampledTokens(token_ids=[], logprobs=[], is_finite=[True])
        start += length
    assert_same(tiny.run(sampled_row(tokens, table, start=start)), whole)


def test_rows_of_any_kind_in_one_batch_give_what_they_give_alone(tiny: TinyExecutor, tiny_model: Path) -> None:
    sequences = [prompt(length, length) for length in (1, 9, 4, 17, 8)]
    computed = [0, 8, 0, 5, 7]  # a first token, a decode, a prefill, a chunk after another, a decode
    tables = [[40], [1, 2, 3], [4, 5], [9, 8, 7, 6, 10], [11, 12]]
    alone = [tiny_executor(tiny_model).run(sampled_row(tokens, [0, 1, 2, 3, 4])) for tokens in sequences]
    for tokens, start, table in zip(sequences, computed, tables, strict=True):
        if start > 0:
            tiny.run(row(tokens[:start], table))
    rows = [sampled_row(*parts[:2], start=parts[2]) for parts in zip(sequences, tables, computed, strict=True)]
    together = tiny.run(*rows)
    assert together.is_finite == [True] * 5
    for index, expected in enumerate(alone):
        assert_same(together, expected, index)


def test_a_fork_that_copies_its_last_block_diverges_from_its_parent(tiny: TinyExecutor, tiny_model: Path) -> None:
    shared = prompt(6, 3)
    left, right = [*shared, 100, 101], [*shared, 150, 151]
    alone = [tiny_executor(tiny_model).run(sampled_row(tokens, [0, 1])) for tokens in (left, right)]
    tiny.run(row(shared, [4, 5]))
    # The parent writes on in block 5 in the very step that copies it.
    together = tiny.run(sampled_row(left, [4, 5], start=6), sampled_row(right, [4, 6], start=6), copies=[(5, 6)])
    for index, expected in enumerate(alone):
        assert_same(together, expected, index)


def test_all_sources_of_copies_are_read_before_any_destination_is_written(tiny: TinyExecutor) -> None:
    for block_id in range(3):
        tiny.run(row(prompt(4, block_id), [block_id]))
    before = [cache.clone() for cache in tiny.storage()]
    assert tiny.run(copies=[(0, 1), (1, 2), (2, 0)]) == SampledTokens(token_ids=[], logprobs=[], is_finite=[])
    for cache, old in zip(tiny.storage(), before, strict=True):
        assert torch.equal(cache[[1, 2, 0]], old[[0, 1, 2]])
        assert torch.equal(cache[3:], old[3:])


def test_slots_of_one_row_draw_from_the_same_logits(tiny: TinyExecutor, tiny_model: Path) -> None:
    first, second = prompt(5, 1), prompt(6, 2)
    slots = [slot(prompt=first, seed=42, choice_index=index, temperature=1.5, logprobs=2) for index in range(3)]
    together = tiny.run(
        row(second, [1, 2], samples=[greedy(second)]),
        row(prompt(3, 9), [7]),
        row(first, [3, 4], samples=[*slots, greedy(first)]),
    )
    assert len(together.token_ids) == len(together.logprobs) == 5
    assert_same(together, tiny_executor(tiny_model).run(sampled_row(second, [0, 1])))
    assert_same(together, tiny_executor(tiny_model).run(sampled_row(first, [0, 1])), 4)
    for index, lone in enumerate(slots, start=1):
        assert_same(together, tiny_executor(tiny_model).run(row(first, [0, 1], samples=[lone])), index)


def test_as_many_slots_as_rows_still_draw_from_their_own_row(tiny: TinyExecutor, tiny_model: Path) -> None:
    tokens = prompt(5, 1)
    expected = tiny_executor(tiny_model).run(sampled_row(tokens, [0, 1]))
    together = tiny.run(row(tokens, [0, 1], samples=[greedy(tokens)] * 2), row(prompt(7, 2), [2, 3]))
    assert_same(together, expected, 0)
    assert_same(together, expected, 1)


def test_a_step_answers_in_the_order_of_rows_and_slots(tiny: TinyExecutor) -> None:
    tokens = prompt(5, 1)
    forced = [slot(prompt=tokens, temperature=0, logit_bias={token_id: 100.0}) for token_id in (9, 8, 7, 6)]
    answer = tiny.run(
        row(tokens, [0, 1], samples=forced[:2]), row(tokens, [2, 3]), row(tokens, [4, 5], samples=forced[2:])
    )
    assert answer == SampledTokens(
        token_ids=[9, 8, 7, 6], logprobs=[None] * 4, is_finite=[True] * 3, candidates=[None] * 4
    )


def test_an_empty_batch_gives_an_empty_answer(tiny: TinyExecutor) -> None:
    assert tiny.run() == SampledTokens(token_ids=[], logprobs=[], is_finite=[])


class TestNonFiniteRows:
    @pytest.fixture
    def tiny(self, poisoned_model: Path) -> TinyExecutor:
        return tiny_executor(poisoned_model)

    def assert_storage_is_finite(self, tiny: TinyExecutor) -> None:
        assert all(bool(cache.isfinite().all()) for cache in tiny.storage())

    def test_only_the_bad_row_is_flagged_and_its_neighbours_are_untouched(
        self, tiny: TinyExecutor, poisoned_model: Path
    ) -> None:
        good = [prompt(6, 1), prompt(9, 2)]
        bad = [*prompt(3, 3), POISON, *prompt(2, 4)]
        alone = [tiny_executor(poisoned_model).run(sampled_row(tokens, [0, 1, 2])) for tokens in good]
        together = tiny.run(
            sampled_row(good[0], [0, 1]),
            row(bad, [2, 3], samples=[greedy(bad), slot(prompt=bad, seed=1)]),
            sampled_row(good[1], [4, 5, 6]),
        )
        assert together.is_finite == [True, False, True]
        assert together.token_ids[1:3] == [0, 0]
        assert together.logprobs[1:3] == [None, None]
        assert_same(together, alone[0], 0)
        assert_same(together, alone[1], 3)
        self.assert_storage_is_finite(tiny)
        longer = [*good[0], 90]
        expected = tiny_executor(poisoned_model).run(sampled_row(longer, [0, 1]))
        assert_same(tiny.run(sampled_row(longer, [0, 1], start=6)), expected)

    def test_what_the_bad_row_wrote_is_zero_and_what_it_had_stays(self, tiny: TinyExecutor) -> None:
        tokens = [*prompt(6, 1), POISON]
        tiny.run(row(tokens[:6], [2, 3]))
        before = [cache.clone() for cache in tiny.storage()]
        assert any(bool(cache[3].any()) for cache in before)
        answer = tiny.run(sampled_row(tokens, [2, 3], start=6))
        assert answer.is_finite == [False]
        assert answer.token_ids == [0]
        for cache, old in zip(tiny.storage(), before, strict=True):
            assert torch.equal(cache, old)  # position 6 was zero before the step

    @pytest.mark.parametrize("at", [0, 3, 6])
    def test_a_nan_in_a_chunk_that_draws_nothing_is_found_in_its_step(self, tiny: TinyExecutor, at: int) -> None:
        tokens = prompt(12, 1)
        tokens[at] = POISON
        answer = tiny.run(row(tokens[:7], [2, 3]), row(prompt(4, 2), [5]))
        assert answer == SampledTokens(token_ids=[], logprobs=[], is_finite=[False, True])
        self.assert_storage_is_finite(tiny)

    def test_a_block_that_held_a_bad_row_serves_the_next_one(self, tiny: TinyExecutor, poisoned_model: Path) -> None:
        tokens = prompt(5, 1)
        tiny.run(sampled_row([POISON] * 8, [0, 1]))
        expected = tiny_executor(poisoned_model).run(sampled_row(tokens, [0, 1]))
        assert_same(tiny.run(sampled_row(tokens, [0, 1])), expected)

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_an_infinite_logit_counts_as_bad(self, tmp_path: Path, sign: float) -> None:
        model = tiny_transformers_model()
        with torch.no_grad():
            model.model.norm.weight[0] = 100.0
            weight = model.get_output_embeddings().weight
            weight[5] = 0.0
            weight[5, 0] = sign * 3e38  # one product that overflows, and no other that could turn it into NaN
        model.save_pretrained(tmp_path)
        tiny, tokens = tiny_executor(tmp_path), prompt(4, 1)
        assert tiny.run(sampled_row(tokens, [0])).is_finite == [False]


@pytest.mark.gpu
def test_a_gpu_gives_the_tokens_of_the_cpu(tiny_model: Path) -> None:
    from radixserve.config import EngineConfig
    from radixserve.runner.startup import start_executor

    tokens, table = prompt(13, 0), list(range(4))
    answers: list[Sequence[int]] = []
    for device in ("cpu", "cuda"):
        config = EngineConfig(model=str(tiny_model), device=device, dtype="float32", block_size=4, num_kv_blocks=8)
        executor = start_executor(config, show_progress=False).executor
        assert isinstance(executor, ModelExecutor)
        slots = [greedy(tokens), slot(prompt=tokens, seed=3, top_p=0.9, frequency_penalty=1.0, output=[5])]
        answers.append(TinyExecutor(executor, []).run(row(tokens, table, samples=slots)).token_ids)
    assert answers[0] == answers[1]
