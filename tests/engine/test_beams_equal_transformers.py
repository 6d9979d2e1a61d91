"""The engine's beam search on tiny random models in float32 gives transformers' hypotheses and scores."""

from functools import cache
from pathlib import Path

import pytest
import torch

from radixserve.core.kv_cache import KVCache
from radixserve.core.scheduler import SchedulerLimits
from radixserve.engine.answer import GenerationResult
from radixserve.engine.core import EngineCore
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.engine.beam_oracle import VOCAB_SIZE, Case, random_case, transformers_beams
from tests.engine.harness import Harness, ids
from tests.runner.tiny_executor import BLOCK_SIZE, tiny_executor
from tests.tiny_models import FAMILIES, tiny_transformers_model

NUM_BLOCKS = 256
BUDGET = 16


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def directory(family: str) -> Path:
        path: Path = tmp_path_factory.mktemp(family)
        tiny_transformers_model(family).save_pretrained(path)
        return path

    return directory


class RealHarness(Harness):
    """Drives an engine over a tiny model."""

    def __init__(self, tokenizer: Tokenizer, path: Path, case: Case, num_blocks: int = NUM_BLOCKS) -> None:
        self.core = EngineCore(
            tiny_executor(path, num_blocks).executor,
            tokenizer,
            KVCache(num_blocks, BLOCK_SIZE),
            SchedulerLimits(
                max_num_seqs=12,
                max_num_batched_tokens=BUDGET,
                max_model_len=256,
                end_token_ids=frozenset(case.end_token_ids),
            ),
            max_queued_requests=8,
        )
        self._max_num_batched_tokens = BUDGET
        self.results, self.failures, self._num_added = {}, {}, 0


def check(tokenizer: Tokenizer, model_directory, seed: int) -> None:
    family = sorted(FAMILIES)[seed % len(FAMILIES)]
    case = random_case(seed)
    expected_tokens, expected_scores = transformers_beams(tiny_transformers_model(family), case)
    result = RealHarness(tokenizer, model_directory(family), case).search(case.prompt, **case.params)
    assert [answer.token_ids for answer in result.answers] == expected_tokens, case
    if expected_scores:
        scores = [answer.beam.score for answer in result.answers]
        assert scores == pytest.approx(expected_scores, abs=1e-4, rel=1e-6), case


@pytest.mark.parametrize("seed", range(12))
def test_a_dozen_random_searches_equal_transformers(tokenizer: Tokenizer, model_directory, seed: int) -> None:
    check(tokenizer, model_directory, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 120))
def test_a_hundred_random_searches_equal_transformers(tokenizer: Tokenizer, model_directory, seed: int) -> None:
    check(tokenizer, model_directory, seed)


def answers(result: GenerationResult) -> list[tuple[list[int], float]]:
    return [(answer.token_ids, answer.beam.cumulative_logprob) for answer in result.answers]


def test_bs_7_concurrent_searches_neither_mix_nor_leak_and_score_what_the_model_says(
    tokenizer: Tokenizer, model_directory
) -> None:
    model = tiny_transformers_model("llama")
    prompts = [ids(7, 4 * BLOCK_SIZE), [*ids(7, 3 * BLOCK_SIZE), 1, 2], ids(90, 9)]
    prompts = [[token_id % VOCAB_SIZE for token_id in prompt] for prompt in prompts]
    case = Case(prompts[0], [VOCAB_SIZE - 1])
    params = {"beam_width": 4, "max_tokens": 3 * BLOCK_SIZE + 1, "min_tokens": 3 * BLOCK_SIZE + 1}
    path = model_directory("llama")
    alone = [RealHarness(tokenizer, path, case).search(prompt, **params) for prompt in prompts]
    harness = RealHarness(tokenizer, path, case)
    requests = [harness.add_beams(prompt, **params) for prompt in prompts]
    harness.run()
    for prompt, request, expected in zip(prompts, requests, alone, strict=True):
        for (tokens, total), (expected_tokens, expected_total) in zip(
            answers(harness.results[request]), answers(expected), strict=True
        ):
            assert tokens == expected_tokens
            assert total == pytest.approx(expected_total, abs=1e-4)
            with torch.inference_mode():
                logprobs = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            forced = logprobs.gather(1, torch.tensor(tokens)[:, None]).sum().item()
            assert total == pytest.approx(forced, abs=1e-3)
        memory = expected.beam_memory
        num_shared_blocks = len(prompt) // BLOCK_SIZE
        assert memory.peak_blocks <= memory.peak_blocks_without_sharing - 3 * num_shared_blocks
    assert harness.stats.num_preemptions == 0


def test_searches_on_a_pool_too_small_for_them_end_as_on_a_large_one(tokenizer: Tokenizer, model_directory) -> None:
    path = model_directory("qwen3")
    case = Case([], [VOCAB_SIZE - 1])
    prompts = [[(seed + 7 * position) % VOCAB_SIZE for position in range(10)] for seed in (0, 0, 50, 90, 120)]
    params = {"beam_width": 3, "min_tokens": 20, "max_tokens": 20, "length_penalty": 0.5}
    results = []
    for num_blocks in (NUM_BLOCKS, 26):
        harness = RealHarness(tokenizer, path, case, num_blocks)
        requests = [harness.add_beams(prompt, **params) for prompt in prompts]
        harness.run()
        assert (harness.stats.num_preemptions > 0) == (num_blocks < NUM_BLOCKS)
        results.append([harness.results[request] for request in requests])
    for roomy, tight in zip(*results, strict=True):
        assert [tokens for tokens, _ in answers(tight)] == [tokens for tokens, _ in answers(roomy)]
        assert [total for _, total in answers(tight)] == pytest.approx([total for _, total in answers(roomy)], abs=1e-4)
