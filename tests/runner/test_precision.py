import pytest
import torch

from radixserve.config import EngineConfig
from radixserve.model.precision import FLOAT32, Precision
from radixserve.runner.precision import choose_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(params=[False, True])
def has_float16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let torch have projections in float16, or not."""
    monkeypatch.setattr("radixserve.runner.precision.has_float16_linear", lambda: request.param)
    return bool(request.param)


def test_auto_on_a_cpu_is_float16_in_memory_where_torch_can(has_float16: bool) -> None:
    precision, notices = choose_precision(EngineConfig(), CPU)
    if has_float16:
        assert precision == Precision(weights=torch.float16, activations=torch.float32, kv_cache=torch.float16)
        assert notices == []
    else:
        assert precision == FLOAT32
        assert notices == [
            "weights and K/V are float32, as neither the C++ kernels nor fbgemm project in float16 here."
        ]


@pytest.mark.usefixtures("has_float16")
def test_a_dtype_that_is_asked_for_is_that_of_everything() -> None:
    for device in (CPU, GPU):
        for name in ("float32", "bfloat16", "float16"):
            config = EngineConfig.from_settings({"dtype": name})
            assert choose_precision(config, device) == (Precision.uniform(getattr(torch, name)), [])


@pytest.mark.usefixtures("has_float16")
def test_auto_under_tritons_interpreter_is_float32() -> None:
    assert choose_precision(EngineConfig(attention_backend="triton"), CPU) == (FLOAT32, [])


@pytest.mark.parametrize(("is_supported", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_on_a_gpu_is_bfloat16_where_it_has_it(
    monkeypatch: pytest.MonkeyPatch, is_supported: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_supported)
    assert choose_precision(EngineConfig(), GPU) == (Precision.uniform(expected), [])
