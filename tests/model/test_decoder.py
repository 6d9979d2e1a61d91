import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from radixserve.model.decoder import Decoder
from radixserve.model.linear import has_float16_linear
from radixserve.model.loader import load_model, read_model_config
from radixserve.model.precision import FLOAT32, Precision
from tests.model.paged_sequences import PagedSequences
from tests.tiny_models import save_tiny_model, tiny_transformers_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-numbers": (
        "llama",
        {
            "rope_parameters": YARN
            | {"beta_fast": 8, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False}
        },
    ),
    "llama-yarn-attention-factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.4}}),
    "mistral": ("mistral", {"sliding_window": 64}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "sharded": ("llama", {"max_shard_size": "60KB"}),
}

NEEDS_FBGEMM = pytest.mark.skipif(not has_float16_linear(), reason="torch has no float16 projections on this CPU")


def load(directory: Path) -> tuple[Decoder, PreTrainedModel]:
    config = read_model_config(directory)
    decoder = load_model(directory, config, precision=FLOAT32, device=torch.device("cpu"), show_progress=False)
    return decoder, AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def transformers_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def random_prompts(*lengths: int) -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(160) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers_whole_chunked_decoded_and_mixed(name: str, tmp_path: Path) -> None:
    family, settings = MODELS[name]
    decoder, model = load(save_tiny_model(tmp_path, family, **settings))
    prompts = random_prompts(60, 37, 18, 3)
    expected = [transformers_logits(model, prompt) for prompt in prompts]
    assert expected[0].std() > 0.5

    sequences = PagedSequences(decoder, len(prompts), max_length=64)
    steps = [
        {0: 33, 1: 5},  # two prompts begin
        {1: 20, 0: 1, 2: 18},  # a chunk, a decode and a whole prompt, in another order
        {0: 16, 1: 11},  # two chunks on cached context
        {0: 1, 1: 1, 3: 1},  # decodes only, of unequal lengths
        {3: 2, 0: 9},
    ]
    done = [0] * len(prompts)
    for step in steps:
        rows = {row: prompts[row][done[row] : done[row] + count] for row, count in step.items()}
        for row, logits in sequences.step(rows).items():
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits, expected[row][done[row] : done[row] + step[row]], atol=1e-4, rtol=0)
            done[row] += step[row]
    assert done == [len(prompt) for prompt in prompts]


def test_only_the_wanted_logits_are_returned(tmp_path: Path) -> None:
    decoder, _ = load(save_tiny_model(tmp_path))
    (prompt,) = random_prompts(9)
    everything = PagedSequences(decoder, 1, 16).step({0: prompt})[0]
    for wanted in ([], [8], [2, 0]):
        some = PagedSequences(decoder, 1, 16).step({0: prompt}, wanted=wanted)[0]
        torch.testing.assert_close(some, everything[wanted], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models_stay_close_to_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, "qwen3")
    decoder, model = load(directory)
    low = load_model(
        directory, decoder.config, precision=Precision.uniform(dtype), device=torch.device("cpu"), show_progress=False
    )
    (prompt,) = random_prompts(20)
    logits = PagedSequences(low, 1, 32, dtype=dtype).step({0: prompt})[0]
    expected = transformers_logits(model, prompt)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().mean() < 0.03 * expected.std()


@NEEDS_FBGEMM
@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases", "qwen2", "qwen3"])
def test_float16_weights_give_the_logits_of_the_rounded_model_in_float32(name: str, tmp_path: Path) -> None:
    family, settings = MODELS[name]
    exact = tiny_transformers_model(family, **settings)
    rounded = tiny_transformers_model(family, **settings)
    with torch.no_grad():
        for parameter in rounded.parameters():
            if parameter.dim() == 2:
                parameter.copy_(parameter.half())
    exact.save_pretrained(tmp_path / "exact")
    rounded.save_pretrained(tmp_path / "rounded")
    config = read_model_config(tmp_path / "exact")
    mixed = Precision(weights=torch.float16, activations=torch.float32, kv_cache=torch.float16)
    decoders = (
        load_model(tmp_path / "exact", config, precision=mixed, device=torch.device("cpu"), show_progress=False),
        load_model(tmp_path / "rounded", config, precision=FLOAT32, device=torch.device("cpu"), show_progress=False),
    )
    (prompt,) = random_prompts(40)
    for kv_dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 1e-2)):
        logits, expected = (
            torch.cat([sequences.step({0: prompt[:30]})[0], sequences.step({0: prompt[30:]})[0]])
            for sequences in (PagedSequences(decoder, 1, 48, dtype=kv_dtype) for decoder in decoders)
        )
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)
    assert (logits - transformers_logits(exact, prompt)).abs().mean() < 3e-3 * expected.std()


def test_a_nan_in_one_row_stays_in_that_row(tmp_path: Path) -> None:
    decoder, model = load(save_tiny_model(tmp_path))
    prompts = random_prompts(20, 40)
    sequences = PagedSequences(decoder, 2, max_length=48)
    sequences.step({0: prompts[0][:-1], 1: prompts[1][:-1]})
    sequences.poison(0)
    logits = sequences.step({0: prompts[0][-1:], 1: prompts[1][-1:]})
    assert logits[0].isnan().all()
    torch.testing.assert_close(logits[1], transformers_logits(model, prompts[1])[-1:], atol=1e-4, rtol=0)


def test_loading_shows_progress_only_when_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = save_tiny_model(tmp_path)
    config = read_model_config(directory)
    for show_progress in (False, True):
        capfd.readouterr()
        load_model(directory, config, precision=FLOAT32, device=torch.device("cpu"), show_progress=show_progress)
        output, errors = capfd.readouterr()
        assert not output
        assert bool(errors) == show_progress
