import dataclasses
from pathlib import Path

import pytest
import torch

from radixserve.config import EngineConfig
from radixserve.errors import ConfigError
from radixserve.kernels.cpu import library
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


@pytest.fixture
def has_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the C++ kernels be there, on a machine without a compiler too: nothing here runs them."""
    monkeypatch.setattr(library, "obstacle", lambda: None)


@pytest.fixture
def has_no_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "obstacle", lambda: "they are not built")


@pytest.mark.usefixtures("has_cpp")
def test_auto_is_triton_on_a_gpu_and_cpp_on_a_cpu(model: ModelConfig) -> None:
    assert choose(model, "auto", GPU) == "triton"
    assert choose(model, "auto", CPU) == "cpp"
    assert choose(model, "torch", GPU) == "torch"
    assert choose(model, "torch", CPU) == "torch"


@pytest.mark.usefixtures("has_no_cpp")
def test_without_the_cpp_kernels_auto_is_torch_and_says_so(model: ModelConfig) -> None:
    chosen = choose_attention(EngineConfig(), model, dtype=torch.float32, device=CPU)
    assert chosen.name == "torch"
    assert chosen.notices == ("attention runs on torch, which is slower than cpp: they are not built.",)
    asked = choose_attention(EngineConfig(attention_backend="torch"), model, dtype=torch.float32, device=CPU)
    assert asked.notices == ()
    with pytest.raises(ConfigError, match="cpp: they are not built; give --attention-backend torch"):
        choose(model, "cpp", CPU)


@pytest.mark.usefixtures("has_cpp")
def test_what_the_cpp_kernels_do_not_take_runs_on_torch_unless_they_were_asked_for(model: ModelConfig) -> None:
    odd = dataclasses.replace(model, head_dim=20)
    for other, dtype, reason in (
        (model, torch.bfloat16, "--dtype is bfloat16"),
        (model, torch.float16, "--dtype is float16"),
        (odd, torch.float32, "head size is 20"),
    ):
        assert choose(other, "auto", CPU, dtype) == "torch"
        with pytest.raises(ConfigError, match=f"{reason}.*give --attention-backend torch"):
            choose(other, "cpp", CPU, dtype)
    with pytest.raises(ConfigError, match="need a CPU"):
        choose(model, "cpp", GPU)


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
