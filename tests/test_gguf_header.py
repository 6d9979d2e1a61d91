"""The header of a GGUF file, as the gguf package writes it."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from radixserve.errors import ModelLoadError
from radixserve.gguf_header import read_gguf_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_string("text", "naïve ▁")
    writer.add_bool("flag", True)
    writer.add_int8("int8", -3)
    writer.add_uint64("uint64", 2**40)
    writer.add_float32("float32", 0.5)
    writer.add_float64("float64", 0.1)
    writer.add_array("strings", ["", "a", "é"])
    writer.add_array("numbers", [3, -1])
    writer.add_array("flags", [True, False])
    writer.add_tensor("matrix", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("vector", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_come_back_as_they_were_written(file: Path) -> None:
    assert read_gguf_header(file).metadata == {
        "general.architecture": "llama",
        "general.alignment": 64,
        "text": "naïve ▁",
        "flag": True,
        "int8": -3,
        "uint64": 2**40,
        "float32": 0.5,
        "float64": 0.1,
        "strings": ["", "a", "é"],
        "numbers": [3, -1],
        "flags": [True, False],
    }


def test_tensors_lie_where_the_header_says(file: Path) -> None:
    tensors = read_gguf_header(file).tensors
    assert tensors["matrix"].shape == (2, 3)
    assert tensors["vector"].shape == (5,)
    data = file.read_bytes()
    for name, expected in (("matrix", np.arange(6, dtype=np.float32)), ("vector", np.arange(5, dtype=np.float16))):
        assert tensors[name].offset % 64 == 0
        found = np.frombuffer(data, expected.dtype, count=expected.size, offset=tensors[name].offset)
        assert np.array_equal(found, expected)
    assert tensors["matrix"].type == gguf.GGMLQuantizationType.F32
    assert tensors["vector"].type == gguf.GGMLQuantizationType.F16


def test_a_header_cut_anywhere_is_refused_by_name(file: Path) -> None:
    data = file.read_bytes()
    end = min(tensor.offset for tensor in read_gguf_header(file).tensors.values())
    for length in range(end - 64):
        file.write_bytes(data[:length])
        with pytest.raises(ModelLoadError, match=r"model\.gguf (is truncated|cannot be read)"):
            read_gguf_header(file)


def test_a_header_may_end_before_its_tensors(file: Path) -> None:
    whole = read_gguf_header(file)
    file.write_bytes(file.read_bytes()[: min(tensor.offset for tensor in whole.tensors.values())])
    assert read_gguf_header(file) == whole


def test_arrays_nested_without_end_are_refused(tmp_path: Path) -> None:
    array_of_one_array = struct.pack("<IQ", 9, 1)
    path = tmp_path / "nested.gguf"
    one_value = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 9)
    path.write_bytes(one_value + array_of_one_array * 100_000)
    with pytest.raises(ModelLoadError, match=r"nested\.gguf"):
        read_gguf_header(path)
