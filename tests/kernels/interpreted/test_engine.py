"""The whole engine on the Triton backend gives the tokens of the torch backend."""

from pathlib import Path

import pytest

from radixserve.beam_search_params import BeamSearchParams
from radixserve.sampling_params import SamplingParams
from tests.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from tests.kernels.stepped_engine import Engine, greedy, prompt, tokens
from tests.tiny_models import save_tiny_model

BACKENDS = ("torch", "triton")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, three query heads a K/V head of 64 elements."""
    directory = tmp_path_factory.mktemp("model")
    settings = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 2, "head_dim": 64}
    save_tiny_model(directory, eos_token_id=256, **settings)
    return write_byte_tokenizer(directory)


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


def test_beams_that_share_and_copy_blocks(model: Path) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    answers, memory = {}, {}
    for backend in BACKENDS:
        engine = Engine(model, backend)
        answers[backend] = tokens(engine.ask((prompt(11, 21), params)))
        memory[backend] = engine.core.stats().cache
    assert len(answers["torch"]) == 3
    assert answers["triton"] == answers["torch"]
    assert memory["triton"] == memory["torch"]


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
