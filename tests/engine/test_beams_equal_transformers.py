"""The engine's beam search on tiny random models in float32 gives transformers' hypotheses and scores."""

from functools import cache
from pathlib import Path

import pytest

from radixserve.core.kv_cache import KVCache
from radixserve.core.scheduler import SchedulerLimits
from radixserve.engine.core import EngineCore
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.engine.beam_oracle import Case, random_case, transformers_beams
from tests.engine.harness import Harness
from tests.runner.tiny_executor import BLOCK_SIZE, tiny_executor
from tests.tiny_models import FAMILIES, tiny_transformers_model

NUM_BLOCKS = 256


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
                max_num_seqs=8,
                max_num_batched_tokens=16,
                max_model_len=256,
                end_token_ids=frozenset(case.end_token_ids),
            ),
            max_queued_requests=8,
        )
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
