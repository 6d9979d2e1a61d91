import json
from pathlib import Path
from typing import Any

import pytest

from radixserve.errors import ModelLoadError
from radixserve.model.config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from radixserve.model.loader import read_model_config

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}


def write(directory: Path, settings: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(BASE | settings))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_what_a_file_leaves_out_follows_from_the_rest(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, {}))
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.rope == RopeConfig(theta=10000.0)
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    ("kind", "numbers", "scaling"),
    [
        ("default", {}, None),
        ("linear", {"factor": 2.0}, LinearScaling(2.0)),
        ("llama3", LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 1024)),
        (
            "yarn",
            {"factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.5},
            YarnScaling(4.0, 1024, 1.5),
        ),
        ("yarn", {"factor": 0.5}, YarnScaling(0.5, 4096, 1.0)),
    ],
)
def test_both_spellings_of_rope_settings_mean_the_same(
    kind: str, numbers: dict[str, Any], scaling: Any, tmp_path: Path
) -> None:
    expected = RopeConfig(5000.0, scaling)
    for settings in (
        {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0} | numbers},
        {"rope_theta": 5000.0, "rope_scaling": {"rope_type": kind} | numbers},
        {"rope_theta": 5000.0, "rope_scaling": {"type": kind} | numbers},
    ):
        assert read_model_config(write(tmp_path, settings)).rope == expected
    if scaling is None:
        assert read_model_config(write(tmp_path, {"rope_theta": 5000.0, "rope_scaling": None})).rope == expected


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, 1024),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024, "use_sliding_window": False}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024, "use_sliding_window": True}, 1024),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 1024,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            1024,
        ),
    ],
)
def test_a_sliding_window_is_reported_where_the_family_uses_it(
    settings: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    assert read_model_config(write(tmp_path, settings)).sliding_window == window


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": [7, 8]}, {}, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": [9, 7]}, (9, 7)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0,)),
    ],
)
def test_generation_config_names_the_end_tokens_first(
    own: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert read_model_config(write(tmp_path, own, generation)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM.*Mistral.*Qwen2.*Qwen3"),
        ({"architectures": None, "model_type": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding_attention"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["linear_attention"]}, "linear_attention"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}, "mrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": 1.5}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"num_key_value_heads": 3}, "3 key heads"),
        ({"head_dim": 15}, "15 elements"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused_by_name(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        read_model_config(write(tmp_path, settings))


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff"])
def test_a_config_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_model_config(tmp_path)
