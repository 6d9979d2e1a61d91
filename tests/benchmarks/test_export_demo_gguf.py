"""What another server reads from the exported file is the model that radixserve runs."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize

from benchmarks.export_demo_gguf import export
from radixserve.gguf_header import read_gguf_header
from radixserve.model.gguf_source import GGUFSource
from radixserve.model.loader import read_model_config
from tests.model.gguf_files import float32, write_gguf
from tests.tiny_models import tiny_transformers_model

Q8_0 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = tiny_transformers_model(
        "llama", hidden_size=96, tie_word_embeddings=request.param, attention_bias=not request.param
    )
    factors = {"rope_freqs.weight": np.linspace(1, 8, model.config.head_dim // 2, dtype=np.float32)}
    return write_gguf(
        tmp_path / "source.gguf", model, Q8_0, lambda values: quantize(values, Q8_0), extra_tensors=factors
    )


def test_the_file_gives_the_weights_of_its_source_within_half_precision(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "half.gguf"
    export(source, target)
    config = read_model_config(source)
    assert read_model_config(target) == config
    before, after = GGUFSource(source, config), GGUFSource(target, config)
    assert after.names() == before.names()
    for name in before.names():
        expected = before.read(name)
        if expected.dim() > 1:
            expected = expected.to(torch.float16).to(torch.float32)
        assert torch.equal(after.read(name), expected), name


def test_matrices_are_in_half_precision_and_vectors_in_float32(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "half.gguf"
    export(source, target)
    for name, tensor in read_gguf_header(target).tensors.items():
        expected = gguf.GGMLQuantizationType.F32 if len(tensor.shape) == 1 else gguf.GGMLQuantizationType.F16
        assert tensor.type == expected, name


def test_metadata_and_its_types_are_those_of_the_source(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "half.gguf"
    export(source, target)

    def fields(path: Path) -> dict[str, tuple[object, list[gguf.GGUFValueType]]]:
        read = gguf.GGUFReader(path).fields
        return {name: (field.contents(), [*field.types]) for name, field in read.items() if "GGUF." not in name}

    before, after = fields(source), fields(target)
    file_type = after.pop("general.file_type")
    before.pop("general.file_type", None)
    assert file_type[0] == gguf.LlamaFileType.MOSTLY_F16
    assert after == before
    assert "tokenizer.ggml.tokens" in after


def test_a_weight_that_half_precision_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = tiny_transformers_model("llama", hidden_size=96)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = 1e5
    source = write_gguf(tmp_path / "source.gguf", model, gguf.GGMLQuantizationType.F32, float32)
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_down\.weight holds 100000"):
        export(source, tmp_path / "half.gguf")
