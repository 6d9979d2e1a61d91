import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from radixserve.errors import ModelLoadError
from radixserve.model.loader import load_model, read_model_config
from radixserve.model.precision import FLOAT32
from tests.model.gguf_files import float32, write_gguf
from tests.tiny_models import save_tiny_model, tiny_transformers_model

F32 = GGMLQuantizationType.F32


def load(path: Path) -> None:
    load_model(path, read_model_config(path), precision=FLOAT32, device=torch.device("cpu"), show_progress=False)


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return directory


def change_config(directory: Path, **settings: object) -> Path:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return directory


def truncate(path: Path, num_bytes: int) -> Path:
    """Cut num_bytes off the end."""
    path.write_bytes(path.read_bytes()[:-num_bytes])
    return path


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(save_tiny_model(tmp_path), lambda tensors: tensors.pop(name))
    with pytest.raises(ModelLoadError, match=f"{name} is missing"):
        load(tmp_path)


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_norm.weight"
    change_tensors(save_tiny_model(tmp_path), lambda tensors: tensors.update({name: torch.ones(16)}))
    with pytest.raises(ModelLoadError, match=f"{name} has no place in LlamaForCausalLM"):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    change_config(save_tiny_model(tmp_path), intermediate_size=64)
    with pytest.raises(ModelLoadError, match=r"gate_proj.weight has shape \(128, 96\); .* \(64, 96\)"):
        load(tmp_path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(save_tiny_model(tmp_path), lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(ModelLoadError, match=f"{name} holds torch.int8"):
        load(tmp_path)


def test_an_output_layer_may_repeat_a_tied_embedding_but_not_differ_from_it(tmp_path: Path) -> None:
    change_config(save_tiny_model(tmp_path), tie_word_embeddings=True)
    with pytest.raises(ModelLoadError, match="tie_word_embeddings"):
        load(tmp_path)
    change_tensors(
        tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    load(tmp_path)


def test_rotary_frequencies_of_old_files_are_ignored(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(change_tensors(save_tiny_model(tmp_path), lambda tensors: tensors.update({name: torch.ones(8)})))


def test_a_truncated_safetensors_file_is_one_clear_error(tmp_path: Path) -> None:
    truncate(save_tiny_model(tmp_path) / "model.safetensors", 100)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is truncated or damaged"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(ModelLoadError, match=f"{shards[1].name} is missing"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index_is_named(text: str, tmp_path: Path) -> None:
    (save_tiny_model(tmp_path) / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json"):
        load(tmp_path)


def test_a_directory_without_safetensors_says_what_to_do(tmp_path: Path) -> None:
    (save_tiny_model(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="converted to safetensors"):
        load(tmp_path)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", tiny_transformers_model(), F32, float32)


def test_a_gguf_cut_at_any_place_is_one_clear_error(gguf_file: Path) -> None:
    whole = gguf_file.read_bytes()
    for length in [*range(0, 3000, 37), len(whole) // 2, len(whole) - 1]:
        gguf_file.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError) as caught:
            load(gguf_file)
        assert str(gguf_file) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_truncated_gguf_is_called_truncated(gguf_file: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"truncated: output.weight ends at byte \d+, the file at \d+"):
        load(truncate(gguf_file, 64))


@pytest.mark.parametrize(
    ("offset", "replacement", "message"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, struct.pack("<I", 1), "version is 1;"),
        (4, struct.pack(">I", 3), "version is 50331648;"),
        (8, struct.pack("<Q", 2**60), "truncated"),
        (16, struct.pack("<Q", 2**60), "truncated"),
        (24, struct.pack("<Q", 2**63), "truncated"),
    ],
)
def test_a_damaged_header_is_refused(offset: int, replacement: bytes, message: str, gguf_file: Path) -> None:
    data = bytearray(gguf_file.read_bytes())
    data[offset : offset + len(replacement)] = replacement
    gguf_file.write_bytes(data)
    with pytest.raises(ModelLoadError, match=message):
        load(gguf_file)


def test_a_gguf_of_another_architecture_lists_the_supported_ones(gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes().replace(b"llama", b"gemma", 1))
    with pytest.raises(ModelLoadError, match=r"gemma is not supported; .*llama.*mistral.*qwen2.*qwen3"):
        load(gguf_file)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"expert_count": 8}, "llama.expert_count is 8"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"rope.dimension_count": 8}, "llama.rope.dimension_count is 8"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_log_multiplier": 0.1},
            "yarn_log",
        ),
    ],
)
def test_a_gguf_setting_that_cannot_be_honoured_is_refused_by_name(
    settings: dict[str, str | int | float], named: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_transformers_model(), F32, float32, settings=settings)
    with pytest.raises(ModelLoadError, match=named):
        read_model_config(path)


def test_a_missing_gguf_tensor_goes_by_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_transformers_model(), F32, float32, leave_out="blk.1.attn_k.weight")
    with pytest.raises(ModelLoadError, match=r"blk\.1\.attn_k\.weight is missing"):
        load(path)


@pytest.mark.parametrize("name", ["blk.1.attn_sinks.weight", "blk.3.attn_k.weight", "extra.weight"])
def test_an_unexpected_gguf_tensor_goes_by_its_own_name(name: str, tmp_path: Path) -> None:
    extra = {name: np.ones(6, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", tiny_transformers_model(), F32, float32, extra_tensors=extra)
    with pytest.raises(ModelLoadError, match=f"{name} has no place"):
        load(path)


def test_a_gguf_tensor_of_a_type_without_dequantiser_is_refused(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.ones(8, np.int32)}
    path = write_gguf(tmp_path / "model.gguf", tiny_transformers_model(), F32, float32, extra_tensors=extra)
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight has type I32"):
        load(path)


def test_frequency_factors_must_be_as_many_as_the_frequencies(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.ones(16, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", tiny_transformers_model(), F32, float32, extra_tensors=extra)
    with pytest.raises(ModelLoadError, match="16 frequency factors; a head of 16 elements takes 8"):
        load(path)
