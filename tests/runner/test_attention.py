import dataclasses
from pathlib import Path

import pytest
import torch

from radixserve.config import EngineConfig
from radixserve.errors import ConfigError
from radixserve.model.config import ModelConfig
from radixserve.model.loader import read_model_config
from radixserve.runner.attention import choose_attention

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def model(tiny_model: Path) -> ModelConfig:
    return dataclasses.replace(read_model_config(tiny_model), head_dim=64)


def choose(model: ModelConfig, asked: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    config = EngineConfig.from_settings({"attention_backend": asked})
    return choose_attention(config, model, dtype=dtype, device=device).name


def test_auto_is_triton_on_a_gpu_and_torch_on_a_cpu(model: ModelConfig) -> None:
    assert choose(model, "auto", GPU) == "triton"
    assert choose(model, "auto", CPU) == "torch"
    assert choose(model, "torch", GPU) == "torch"


def test_triton_on_a_cpu_needs_its_interpreter(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"needs a GPU.*--attention-backend torch, or set TRITON_INTERPRET=1"):
        choose(model, "triton", CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose(model, "triton", CPU) == "triton"


def test_the_interpreter_does_not_get_bfloat16(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="--dtype bfloat16"):
        choose(model, "triton", CPU, torch.bfloat16)
    assert choose(model, "triton", GPU, torch.bfloat16) == "triton"


@pytest.mark.parametrize("asked", ["auto", "triton"])
def test_a_model_that_the_kernels_do_not_take_is_refused_and_not_run_otherwise(model: ModelConfig, asked: str) -> None:
    with pytest.raises(ConfigError, match=r"head size is 48.*64, 80, 96, 128; give --attention-backend torch"):
        choose(dataclasses.replace(model, head_dim=48), asked, GPU)
    with pytest.raises(ConfigError, match=r"17 query heads.*at most 16; give --attention-backend torch"):
        choose(dataclasses.replace(model, num_heads=34, num_kv_heads=2), asked, GPU)
    with pytest.raises(ConfigError, match=r"hidden size is 20480.*at most 16384; give --attention-backend torch"):
        choose(dataclasses.replace(model, hidden_size=20480), asked, GPU)
    assert choose(dataclasses.replace(model, head_dim=48), "torch", GPU) == "torch"
