"""The whole engine on the Triton backend gives the tokens of the torch backend."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from radixserve.config import EngineConfig
from radixserve.engine.answer import GenerationResult
from radixserve.engine.start import start_engine
from radixserve.protocol import AddRequest
from radixserve.sampling_params import SamplingParams
from tests.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from tests.tiny_models import save_tiny_model

BACKENDS = ("torch", "triton")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, three query heads a K/V head of 64 elements."""
    directory = tmp_path_factory.mktemp("model")
    settings = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 2, "head_dim": 64}
    save_tiny_model(directory, eos_token_id=256, **settings)
    return write_byte_tokenizer(directory)


class Engine:
    """An engine in this process, stepped until it is idle."""

    def __init__(self, model: Path, backend: str, **settings: Any) -> None:
        defaults = {"device": "cpu", "num_kv_blocks": 40, "max_num_batched_tokens": 48, "max_num_seqs": 8}
        config = EngineConfig.from_settings(defaults | {"model": str(model), "attention_backend": backend} | settings)
        started = start_engine(config, show_progress=False)
        assert started.ready.attention_backend == backend
        self.core = started.core

    def ask(self, *requests: tuple[Sequence[int], SamplingParams]) -> list[GenerationResult]:
        """Answer requests that run side by side."""
        results = {}
        for index, (prompt, params) in enumerate(requests):
            results[str(index)] = GenerationResult.empty(list(prompt), params.n)
            self.core.add(AddRequest(str(index), array("i", prompt).tobytes(), params, b""))
        while self.core.has_work:
            for delta in self.core.step().deltas:
                assert delta.failure is None
                results[delta.request_id].add(delta)
        return list(results.values())


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + 7 * i * i) % 250 for i in range(length)]


def tokens(results: list[GenerationResult]) -> list[list[int]]:
    return [answer.token_ids for result in results for answer in result.answers]


def greedy(max_tokens: int = 5, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)


def test_chunked_prompts_beside_running_ones(model: Path) -> None:
    answers = {}
    for backend in BACKENDS:
        engine = Engine(model, backend)
        answers[backend] = tokens(
            engine.ask((prompt(1, 100), greedy()), (prompt(2, 17), greedy()), (prompt(3, 1), greedy(8)))
        )
    assert answers["triton"] == answers["torch"]


def test_hits_that_end_inside_a_block(model: Path) -> None:
    answers, num_cached = {}, {}
    for backend in BACKENDS:
        engine = Engine(model, backend)
        shared = prompt(4, 70)
        engine.ask((shared, greedy()))
        results = engine.ask((shared[:60] + prompt(5, 9), greedy()), (shared + prompt(6, 20), greedy()))
        answers[backend] = tokens(results)
        num_cached[backend] = [result.num_cached_tokens for result in results]
    assert num_cached["triton"] == num_cached["torch"] == [60, 70]
    assert answers["triton"] == answers["torch"]


def test_answers_that_fork_from_one_prompt(model: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=5, ignore_eos=True)
    answers = {backend: tokens(Engine(model, backend).ask((prompt(7, 21), params))) for backend in BACKENDS}
    assert len({tuple(answer) for answer in answers["torch"]}) == 3
    assert answers["triton"] == answers["torch"]


def test_a_pool_that_is_too_small_for_all_at_once(model: Path) -> None:
    answers, num_preemptions = {}, {}
    for backend in BACKENDS:
        engine = Engine(model, backend, num_kv_blocks=5)
        answers[backend] = tokens(engine.ask(*((prompt(seed, 20), greedy(16)) for seed in (8, 9))))
        num_preemptions[backend] = engine.core.stats().num_preemptions
    assert num_preemptions["triton"] == num_preemptions["torch"] > 0
    assert answers["triton"] == answers["torch"]


def test_half_precision_runs(model: Path) -> None:
    answer = tokens(Engine(model, "triton", dtype="float16").ask((prompt(10, 20), greedy())))
    assert len(answer[0]) == 5


def test_a_model_that_normalises_queries_and_keys(tmp_path: Path) -> None:
    settings = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 2, "head_dim": 64}
    save_tiny_model(tmp_path, "qwen3", eos_token_id=256, **settings)
    model = write_byte_tokenizer(tmp_path)
    answers = {backend: tokens(Engine(model, backend).ask((prompt(11, 30), greedy()))) for backend in BACKENDS}
    assert answers["triton"] == answers["torch"]
