"""All layers in one call give what the same kernels give when they are called one by one, to the last bit."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from radixserve.attention.paged_cpp import PagedCppBackend
from radixserve.model.cpp_decoder import CppDecoder
from radixserve.model.cpp_ops import CPP_OPS
from radixserve.model.decoder import Decoder
from radixserve.model.loader import load_model, read_model_config
from radixserve.model.ops import TORCH_OPS, DecoderOps
from radixserve.model.precision import FLOAT32, Precision
from tests.model.paged_sequences import BLOCK_SIZE, PagedSequences
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.usefixtures("cpp_kernels")

MIXED = Precision(weights=torch.float16, activations=torch.float32, kv_cache=torch.float16)
MODELS = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "odd sizes": ("qwen3", {"hidden_size": 88, "intermediate_size": 67, "head_dim": 24, "num_hidden_layers": 1}),
}
# Tokens of each row in a step: prompts, chunks on cached context, decodes, and a mix.
STEPS = ({0: 300, 1: 5}, {1: 18, 0: 1, 2: 40}, {0: 1, 1: 1, 2: 1}, {3: 2, 0: 16, 1: 1}, {2: 1})


def load(directory: Path, ops: DecoderOps, precision: Precision = MIXED) -> Decoder:
    config = read_model_config(directory)
    return load_model(directory, config, precision=precision, device=torch.device("cpu"), show_progress=False, ops=ops)


def load_both(directory: Path, name: str) -> tuple[Decoder, Decoder]:
    """Return a model whose layers are one call, and the same one with a call for each kernel."""
    family, settings = MODELS[name]
    path = save_tiny_model(directory, family, **settings)
    whole, composed = load(path, CPP_OPS), load(path, dataclasses.replace(CPP_OPS))
    assert (type(whole), type(composed)) == (CppDecoder, Decoder)
    return whole, composed


def sequences(decoder: Decoder, dtype: torch.dtype = torch.float16) -> PagedSequences:
    config = decoder.config
    attention = PagedCppBackend(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
    )
    return PagedSequences(decoder, 4, max_length=600, dtype=dtype, attention=attention)


def random_rows(step: dict[int, int], seed: int) -> dict[int, list[int]]:
    source = random.Random(seed)
    return {row: [source.randrange(160) for _ in range(count)] for row, count in step.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_one_call_gives_the_bits_of_its_kernels_in_any_mix_of_rows(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    whole, composed = (sequences(decoder, dtype) for decoder in load_both(tmp_path, name))
    for number, step in enumerate(STEPS):
        rows = random_rows(step, number)
        expected = composed.step(rows)
        for row, logits in whole.step(rows).items():
            assert torch.equal(logits, expected[row])


@pytest.mark.usefixtures("keeps_threads")
def test_a_row_gets_the_same_bits_alone_and_with_any_number_of_threads(tmp_path: Path) -> None:
    decoder, _ = load_both(tmp_path, "llama")
    prompts = random_rows({0: 40, 1: 7, 2: 90}, seed=1)
    answers = random_rows({0: 1, 1: 1, 2: 1}, seed=2)
    results = []
    for num_threads, together in ((1, True), (2, True), (5, True), (1, False)):
        torch.set_num_threads(num_threads)
        some = sequences(decoder)
        for rows in (prompts, answers):
            steps = [rows] if together else [{row: token_ids} for row, token_ids in rows.items()]
            logits = {row: last for step in steps for row, last in some.step(step).items()}
        results.append(torch.cat([logits[row] for row in answers]))
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_nan_in_one_row_stays_in_that_row(tmp_path: Path) -> None:
    decoder, _ = load_both(tmp_path, "qwen3")
    prompts, answers = random_rows({0: 20, 1: 40}, seed=1), random_rows({0: 1, 1: 1}, seed=2)
    results = []
    for is_poisoned in (False, True):
        some = sequences(decoder)
        some.step(prompts)
        if is_poisoned:
            some.poison(0)
        results.append(some.step(answers))
    assert results[1][0].isnan().all()
    assert torch.equal(results[0][1], results[1][1])


def test_other_attention_gets_the_kernels_one_by_one(tmp_path: Path) -> None:
    whole, composed = load_both(tmp_path, "llama")
    rows = random_rows({0: 20, 1: 3}, seed=1)
    expected = PagedSequences(composed, 2, max_length=32).step(rows)
    for row, logits in PagedSequences(whole, 2, max_length=32).step(rows).items():
        assert torch.equal(logits, expected[row])


def test_only_float16_weights_beside_the_kernels_run_in_one_call(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    assert type(load(path, CPP_OPS, FLOAT32)) is Decoder
    assert type(load(path, TORCH_OPS)) is Decoder
