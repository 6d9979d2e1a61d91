"""The weights of a Hugging Face model directory."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from radixserve.errors import ModelLoadError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class SafetensorsSource:
    """Memory-maps model.safetensors, or the shards that model.safetensors.index.json lists."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        for file_name in self._file_names():
            file = self._open(directory / file_name)
            self._files[file_name] = file
            self._file_of |= dict.fromkeys(file.keys(), file_name)

    def names(self) -> set[str]:
        """Return the tensors' names. Old files also hold the rotary frequencies, which follow from the settings."""
        return {name for name in self._file_of if not name.endswith(".rotary_emb.inv_freq")}

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor that is backed by the mapped file."""
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor

    def describe(self, name: str) -> str:
        """Return the tensor's name and its file."""
        return f"{self._directory / self._file_of.get(name, '')}: the tensor {name}"

    def rope_frequency_factors(self) -> None:
        """Return None: in these files the scaling is part of the settings."""
        return

    def _file_names(self) -> list[str]:
        index_path = self._directory / INDEX_NAME
        if index_path.is_file():
            return _indexed_file_names(index_path)
        if (self._directory / SINGLE_NAME).is_file():
            return [SINGLE_NAME]
        raise ModelLoadError(
            f"{self._directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}; weights in other formats must be "
            "converted to safetensors first"
        )

    def _open(self, path: Path) -> Any:
        if not path.is_file():
            raise ModelLoadError(f"{path} is missing; {INDEX_NAME} lists it")
        try:
            return safe_open(path, framework="pt", device="cpu")
        except SafetensorError as error:
            raise ModelLoadError(f"{path} is truncated or damaged ({error}); download it again") from error


def _indexed_file_names(index_path: Path) -> list[str]:
    try:
        index = json.loads(index_path.read_bytes())
    except ValueError as error:
        raise ModelLoadError(f"{index_path} is no JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelLoadError(f"{index_path} holds no weight_map from tensors to files")
    return sorted(set(weight_map.values()))
