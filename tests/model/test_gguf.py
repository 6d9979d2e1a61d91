import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from transformers import PreTrainedModel

from radixserve.model.config import LinearScaling, YarnScaling
from radixserve.model.loader import load_model, read_model_config
from radixserve.model.precision import FLOAT32
from tests.model.gguf_files import float32, write_gguf
from tests.model.paged_sequences import PagedSequences
from tests.model.test_decoder import LLAMA3, YARN, random_prompts, transformers_logits
from tests.tiny_models import tiny_transformers_model

F32 = GGMLQuantizationType.F32
SIMPLE_TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def assert_same_logits(path: Path, model: PreTrainedModel) -> None:
    config = read_model_config(path)
    decoder = load_model(path, config, precision=FLOAT32, device=torch.device("cpu"), show_progress=False)
    (prompt,) = random_prompts(50)
    logits = PagedSequences(decoder, 1, 64).step({0: prompt})[0]
    torch.testing.assert_close(logits, transformers_logits(model, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("type_name", SIMPLE_TYPES)
def test_logits_equal_those_of_the_dequantised_weights(type_name: str, tmp_path: Path) -> None:
    model = tiny_transformers_model("llama", hidden_size=96, tie_word_embeddings=True)
    weight_type = GGMLQuantizationType[type_name]
    assert_same_logits(
        write_gguf(tmp_path / "model.gguf", model, weight_type, lambda values: quantize(values, weight_type)), model
    )


@pytest.mark.parametrize("type_name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_logits_equal_those_of_random_blocks_of_256(type_name: str, tmp_path: Path) -> None:
    weight_type = GGMLQuantizationType[type_name]
    block_size, block_bytes = GGML_QUANT_SIZES[weight_type]
    # Where the half-precision scales lie in a block; random bits there could be NaN.
    scale_offsets = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[type_name]
    source = np.random.default_rng(0)

    def random_blocks(values: np.ndarray) -> np.ndarray:
        blocks = source.integers(0, 256, (values.size // block_size, block_bytes), dtype=np.uint8)
        for offset in scale_offsets:
            blocks[:, offset : offset + 2] = np.full((len(blocks), 1), 1e-4, np.float16).view(np.uint8)
        return blocks.reshape(len(values), -1)

    model = tiny_transformers_model(
        "llama", hidden_size=256, num_attention_heads=4, head_dim=64, intermediate_size=256, num_hidden_layers=2
    )
    assert_same_logits(write_gguf(tmp_path / "model.gguf", model, weight_type, random_blocks), model)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"attention_bias": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ],
)
def test_every_family_is_read_in_its_own_row_order(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_transformers_model(family, **settings)
    assert_same_logits(write_gguf(tmp_path / "model.gguf", model, F32, float32), model)


def test_yarn_and_linear_scaling_are_read_from_metadata(tmp_path: Path) -> None:
    yarn = tiny_transformers_model("qwen2", rope_parameters=YARN)
    settings = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    path = write_gguf(tmp_path / "yarn.gguf", yarn, F32, float32, settings=settings)
    scaling = read_model_config(path).rope.scaling
    assert scaling == YarnScaling(4.0, 128, attention_factor=0.1 * math.log(4) + 1)
    assert_same_logits(path, yarn)

    linear = tiny_transformers_model(
        "llama", rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    )
    settings = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    path = write_gguf(tmp_path / "linear.gguf", linear, F32, float32, settings=settings)
    assert read_model_config(path).rope.scaling == LinearScaling(4.0)
    assert_same_logits(path, linear)


def test_llama3_scaling_is_read_from_the_frequency_factors(tmp_path: Path) -> None:
    model = tiny_transformers_model("llama", rope_parameters=LLAMA3)
    plain = tiny_transformers_model("llama").model.rotary_emb.inv_freq
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 2
    assert_same_logits(
        write_gguf(tmp_path / "model.gguf", model, F32, float32, extra_tensors={"rope_freqs.weight": factors}), model
    )


def test_end_tokens_are_end_of_sequence_and_end_of_turn(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_transformers_model(), F32, float32)
    assert read_model_config(path).eos_token_ids == (2, 5)
