from functools import partial

import pytest
import torch
from torch.nn import functional

from radixserve.kernels.cpu import library
from radixserve.kernels.cpu.weight_memory import WeightMemory
from radixserve.model.linear import (
    CppLinear,
    DenseLinear,
    Float16Linear,
    LinearMaker,
    OneDnnLinear,
    choose_linear,
    float16_obstacle,
    has_float16_linear,
)
from radixserve.model.precision import FLOAT32, Precision

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIXED = Precision(weights=torch.float16, activations=torch.float32, kv_cache=torch.float16)


HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
NEEDS_FBGEMM = pytest.mark.skipif(not HAS_FBGEMM, reason="torch has no float16 projections on this CPU")
NEEDS_CPP = pytest.mark.skipif(library.obstacle() is not None, reason="the C++ kernels are not built")
CPP_LINEAR = partial(CppLinear, memory=WeightMemory())
FLOAT16 = [
    pytest.param(CPP_LINEAR, id="cpp", marks=NEEDS_CPP),
    pytest.param(Float16Linear, id="fbgemm", marks=NEEDS_FBGEMM),
]
PACKED = [*FLOAT16, pytest.param(OneDnnLinear, id="float32")]
# (in_features, out_features): not multiples of any register's or block's width, and one that is.
SHAPES = [(1, 1), (5, 3), (9, 17), (576, 960), (513, 130), (1030, 7)]


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def as_stored(make: LinearMaker, weight: torch.Tensor) -> torch.Tensor:
    return weight.double() if make is OneDnnLinear else weight.half().double()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", PACKED)
def test_a_projection_sums_its_stored_weights_in_float32(
    make: LinearMaker, shape: tuple[int, int], has_bias: bool
) -> None:
    in_features, out_features = shape
    weight = random(out_features, in_features) / in_features**0.5
    bias = 3 * random(out_features) if has_bias else None
    expected_weight = as_stored(make, weight)
    linear = make(weight, bias)
    for num_rows in (0, 1, 2, 7, 16, 70):
        x = random(num_rows, in_features + 3, seed=num_rows)[:, :in_features]  # rows of a wider tensor
        expected = functional.linear(x.double(), expected_weight, None if bias is None else bias.double())
        result = linear(x)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("make", PACKED)
def test_a_row_is_the_same_alone_and_among_others(make: LinearMaker) -> None:
    linear = make(random(960, 576) / 24, None)
    x = random(65, 576)
    x[9] = torch.nan
    together = linear(x)
    for start, end in ((0, 1), (4, 6), (10, 18), (20, 53)):
        torch.testing.assert_close(linear(x[start:end]), together[start:end], atol=1e-5, rtol=0)
    assert together.isnan().any(1).nonzero().flatten().tolist() == [9]


@pytest.mark.parametrize("make", FLOAT16)
def test_packing_changes_nothing_of_a_weight_that_float16_holds(make: LinearMaker) -> None:
    weight = random(40, 30)
    weight[3, 4], weight[5, 6] = 65_504, -65_504
    kept = weight.clone()
    make(weight, None)
    assert torch.equal(weight, kept)


@NEEDS_CPP
def test_float16_weights_get_the_kernels_that_are_built() -> None:
    assert isinstance(choose_linear(MIXED, CPU)(random(4, 3), None), CppLinear)


def test_float16_weights_get_torchs_kernels_where_ours_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "obstacle", lambda: "they are not built")
    assert choose_linear(MIXED, CPU) is Float16Linear
    assert has_float16_linear() == HAS_FBGEMM


def test_each_precision_gets_the_projections_of_its_device() -> None:
    assert choose_linear(FLOAT32, CPU) is OneDnnLinear
    for precision, device in (
        (FLOAT32, GPU),
        (Precision.uniform(torch.bfloat16), CPU),
        (Precision.uniform(torch.float16), CPU),
        (Precision.uniform(torch.float16), GPU),
    ):
        assert choose_linear(precision, device) is DenseLinear
    with pytest.raises(ValueError, match=r"on cuda no projection takes torch.float16 to torch.float32"):
        choose_linear(MIXED, GPU)
    with pytest.raises(ValueError, match=r"takes torch.float32 to torch.float16"):
        choose_linear(Precision(torch.float32, torch.float16, torch.float16), CPU)


@pytest.mark.parametrize("value", [70_000.0, -70_000.0, float("inf"), float("nan")])
def test_one_element_beyond_float16_is_an_obstacle(value: float) -> None:
    weight = random(20, 30)
    weight[7, 8] = 65_504
    assert float16_obstacle(weight) is None
    weight[7, 8] = value
    assert "float16 ends at 65504" in str(float16_obstacle(weight))


@pytest.mark.parametrize("scale", [2.0**-exponent for exponent in range(0, 30, 2)])
def test_weights_without_an_obstacle_are_rounded_by_a_thousandth_of_their_norm_at_most(scale: float) -> None:
    weight = random(50, 60) * scale
    is_exact_enough = torch.linalg.vector_norm(weight - weight.half().float()) < weight.norm() * 2**-10
    if float16_obstacle(weight) is None:
        assert is_exact_enough
    assert (float16_obstacle(weight) is None) == (scale >= 2**-14)


def test_bfloat16_weights_are_judged_as_in_float32_and_float16_ones_stay_as_they_are() -> None:
    weight = random(500, 600)
    tiny = 2.0**-18 * weight
    assert float16_obstacle((1000 * weight).bfloat16()) is None  # whose norm is beyond float16
    assert float16_obstacle(tiny.bfloat16()) is not None
    assert float16_obstacle(tiny.half()) is None


def test_some_tiny_elements_and_zeros_are_no_obstacle() -> None:
    weight = random(50, 60)
    weight[:40] *= 1e-9
    assert float16_obstacle(weight) is None
    assert float16_obstacle(torch.zeros(3, 4)) is None
