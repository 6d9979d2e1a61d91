"""What two servers must have in common to use the same blocks."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from radixserve.errors import ModelLoadError
from radixserve.tiers import identity
from radixserve.tiers.identity import BlockFormat, build_identity, weights_digest

FORMAT = BlockFormat(
    weights_dtype="float16", activation_dtype="float32", kv_dtype="float16", block_size=16, block_bytes=4096
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"num_hidden_layers": 2}')
    (directory / "model-00001-of-00002.safetensors").write_bytes(bytes(range(256)) * 10)
    (directory / "model-00002-of-00002.safetensors").write_bytes(b"weights")
    (directory / "model.safetensors.index.json").write_text("{}")
    return directory


def change_byte(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: change_byte(model / "config.json", 21),
        lambda model: change_byte(model / "model-00001-of-00002.safetensors", 2559),
        lambda model: change_byte(model / "model-00002-of-00002.safetensors", 0),
        lambda model: change_byte(model / "model.safetensors.index.json", 0),
        lambda model: (model / "model-00002-of-00002.safetensors").write_bytes(b"weights\0"),
        lambda model: (model / "model-00003-of-00003.safetensors").touch(),
        lambda model: (model / "model-00002-of-00002.safetensors").rename(model / "other.safetensors"),
    ],
)
def test_a_change_of_the_weights_or_settings_changes_the_digest(model: Path, change: Callable[[Path], object]) -> None:
    before = weights_digest(model)
    change(model)
    assert weights_digest(model) != before


def test_what_blocks_do_not_depend_on_leaves_the_digest(model: Path, tmp_path: Path) -> None:
    before = weights_digest(model)
    (model / "README.md").write_text("text")
    (model / "tokenizer.json").write_text("{}")
    assert weights_digest(model.rename(tmp_path / "moved"), num_threads=1) == before


def test_every_byte_of_a_large_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_CHUNK_BYTES", 8)
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(range(30)))
    digests = {weights_digest(path)}
    for position in range(30):
        change_byte(path, position)
        digests.add(weights_digest(path))
        change_byte(path, position)
    assert len(digests) == 31


def test_a_renamed_gguf_file_is_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    before = weights_digest(path)
    assert weights_digest(path.rename(tmp_path / "renamed.gguf")) == before


def test_files_that_are_not_there_are_told(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"none\.gguf cannot be read"):
        weights_digest(tmp_path / "none.gguf")
    (model / "config.json").unlink()
    with pytest.raises(ModelLoadError, match="model cannot be read"):
        weights_digest(model)


def test_every_setting_of_a_block_changes_the_build() -> None:
    builds = {build_identity(b"weights", FORMAT), build_identity(b"other weights", FORMAT)}
    for field in dataclasses.fields(FORMAT):
        value = getattr(FORMAT, field.name)
        other = value + 1 if isinstance(value, int) else value + "x"
        builds.add(build_identity(b"weights", dataclasses.replace(FORMAT, **{field.name: other})))
    assert len(builds) == 2 + len(dataclasses.fields(FORMAT))
    assert {len(build) for build in builds} == {32}


def test_settings_next_to_each_other_do_not_run_together() -> None:
    one = dataclasses.replace(FORMAT, weights_dtype="ab", activation_dtype="c")
    other = dataclasses.replace(FORMAT, weights_dtype="a", activation_dtype="bc")
    assert build_identity(b"weights", one) != build_identity(b"weights", other)
