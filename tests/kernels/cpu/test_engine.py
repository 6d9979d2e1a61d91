"""The whole engine on the C++ kernels gives the tokens of the torch backend."""

from pathlib import Path
from typing import Any

import pytest

from radixserve.beam_search_params import BeamSearchParams
from radixserve.sampling_params import SamplingParams
from tests.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from tests.kernels.stepped_engine import Engine, greedy, prompt, tokens
from tests.tiny_models import save_tiny_model

BACKENDS = ("torch", "cpp")
SETTINGS: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 2, "head_dim": 24}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, three query heads a K/V head of 24 elements."""
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, eos_token_id=256, **SETTINGS)
    return write_byte_tokenizer(directory)


def test_chunked_prompts_beside_running_ones(model: Path) -> None:
    answers = {}
    for backend in BACKENDS:
        engine = Engine(model, backend)
        answers[backend] = tokens(
            engine.ask((prompt(1, 300), greedy()), (prompt(2, 17), greedy(40)), (prompt(3, 1), greedy(8)))
        )
    assert answers["cpp"] == answers["torch"]


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_hits_that_end_inside_a_block(model: Path, block_size: int) -> None:
    answers, num_cached = {}, {}
    for backend in BACKENDS:
        engine = Engine(model, backend, block_size=block_size, num_kv_blocks=-(-1024 // block_size))
        shared = prompt(4, 270)
        engine.ask((shared, greedy()))
        results = engine.ask((shared[:260] + prompt(5, 9), greedy()), (shared + prompt(6, 20), greedy()))
        answers[backend] = tokens(results)
        num_cached[backend] = [result.num_cached_tokens for result in results]
    assert num_cached["cpp"] == num_cached["torch"] == [260, 270]
    assert answers["cpp"] == answers["torch"]


def test_answers_that_fork_from_one_prompt(model: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=20, ignore_eos=True)
    answers = {backend: tokens(Engine(model, backend).ask((prompt(7, 21), params))) for backend in BACKENDS}
    assert len({tuple(answer) for answer in answers["torch"]}) == 3
    assert answers["cpp"] == answers["torch"]


def test_beams_that_share_and_copy_blocks(model: Path) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True)
    answers = {backend: tokens(Engine(model, backend).ask((prompt(11, 21), params))) for backend in BACKENDS}
    assert len(answers["torch"]) == 4
    assert answers["cpp"] == answers["torch"]


def test_rows_that_share_a_prompt_get_the_tokens_that_each_gets_alone(model: Path) -> None:
    # Long enough that the kernels read the shared blocks once: of two prompts' common head, and of each one's answers.
    head = prompt(12, 455)
    prompts = [head + prompt(13, 20), head + prompt(14, 37)]
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=12, ignore_eos=True)
    requests = [(one, each) for one in prompts for each in (greedy(12), params)]
    together = tokens(Engine(model, "cpp", num_kv_blocks=400).ask(*requests))
    engine = Engine(model, "cpp", num_kv_blocks=400)
    assert together == [answer for request in requests for answer in tokens(engine.ask(request))]
    assert together == tokens(Engine(model, "torch", num_kv_blocks=400).ask(*requests))


def test_a_pool_that_is_too_small_for_all_at_once(model: Path) -> None:
    answers, num_preemptions = {}, {}
    for backend in BACKENDS:
        engine = Engine(model, backend, num_kv_blocks=5)
        answers[backend] = tokens(engine.ask(*((prompt(seed, 20), greedy(16)) for seed in (8, 9))))
        num_preemptions[backend] = engine.core.stats().num_preemptions
    assert num_preemptions["cpp"] == num_preemptions["torch"] > 0
    assert answers["cpp"] == answers["torch"]


def test_a_model_that_normalises_queries_and_keys(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", eos_token_id=256, **SETTINGS)
    model = write_byte_tokenizer(tmp_path)
    answers = {backend: tokens(Engine(model, backend).ask((prompt(11, 60), greedy(20)))) for backend in BACKENDS}
    assert answers["cpp"] == answers["torch"]
