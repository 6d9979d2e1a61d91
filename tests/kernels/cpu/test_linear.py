"""Projections with float16 weights, in each kind of vectors that this CPU has, against sums in float64."""

from typing import Literal

import pytest
import torch
from torch.nn import functional

from radixserve.kernels.cpu.library import library
from radixserve.kernels.cpu.linear import PackedProjection, linear, pack_projection
from radixserve.kernels.cpu.weight_memory import WeightMemory

Lanes = Literal[0, 8, 16]
LANES: tuple[Lanes, ...] = (0, 8, 16)
# (in_features, out_features): around panels of 32 outputs and squares of 8 by 8, and those of real layers.
SHAPES = [(1, 1), (3, 5), (7, 31), (8, 32), (9, 33), (513, 130), (64, 40), (576, 960), (1536, 96)]


def kinds() -> tuple[Lanes, ...]:
    return LANES if library().radixserve_has_avx512() else LANES[:2]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedProjection:
    return pack_projection(weight, bias, WeightMemory())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_vectors_gives_the_same_bits_near_the_sums_in_float64(
    shape: tuple[int, int], has_bias: bool
) -> None:
    in_features, out_features = shape
    weight = random(out_features, in_features + 2)[:, :in_features] / in_features**0.5
    bias = 3 * random(out_features, seed=1) if has_bias else None
    packed = pack(weight, bias)
    for num_rows in range(41):
        x = random(num_rows, in_features + 3, seed=num_rows)[:, :in_features]  # rows of a wider tensor
        expected = functional.linear(x.double(), weight.half().double(), None if bias is None else bias.double())
        results = [linear(x, packed, lanes=lanes) for lanes in kinds()]
        torch.testing.assert_close(results[0].double(), expected, atol=1e-5, rtol=2e-6)
        assert all(torch.equal(results[0], result) for result in results[1:])


def test_a_sum_takes_its_products_in_order() -> None:
    # One is lost beside 2**24, and not beside 2**24 - 1.
    x = torch.tensor([[2.0**24, 1.0, -(2.0**24), 1.0]])
    weight = torch.ones(33, 4)
    for lanes in kinds():
        assert torch.equal(linear(x, pack(weight), lanes=lanes), torch.ones(1, 33))
        assert torch.equal(linear(x.flip(1), pack(weight), lanes=lanes), torch.full((1, 33), 2.0))


@pytest.mark.usefixtures("keeps_threads")
def test_a_row_gets_the_same_bits_among_any_others_and_with_any_number_of_threads() -> None:
    packed = pack(random(200, 300))
    x = random(40, 300, seed=1)
    for lanes in kinds():
        torch.set_num_threads(1)
        alone = torch.cat([linear(x[row : row + 1], packed, lanes=lanes) for row in range(len(x))])
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            for begin, end in ((0, 40), (3, 5), (1, 14), (7, 22), (20, 36), (9, 38)):
                assert torch.equal(linear(x[begin:end], packed, lanes=lanes), alone[begin:end])


def test_what_is_not_finite_stays_in_its_row_or_its_output() -> None:
    weight, x = random(70, 50), random(20, 50, seed=1)
    x[3, 4], x[5, 6] = torch.nan, torch.inf
    weight[40, 7] = torch.inf
    for lanes in kinds():
        result = linear(x, pack(weight), lanes=lanes)
        expected = functional.linear(x.double(), weight.double())
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.isinf(), expected.isinf())
        assert result[3].isnan().all()
        assert result[:, 40].isfinite().sum() == 0
        assert result[6:, :40].isfinite().all()


def test_float16_numbers_of_all_sizes_are_kept() -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = bits[bits.isfinite()].float()
    weight = finite.view(-1, 1)  # subnormal ones and zeros of both signs too
    for lanes in kinds():
        assert torch.equal(linear(torch.ones(1, 1), pack(weight), lanes=lanes)[0], finite)


def test_arguments_stay_as_they_are_and_are_not_kept() -> None:
    weight, bias, x = random(40, 30), random(40), random(3, 30)
    before = [tensor.clone() for tensor in (weight, bias, x)]
    packed = pack(weight, bias)
    result = linear(x, packed)
    assert all(torch.equal(*pair) for pair in zip((weight, bias, x), before, strict=True))
    weight.zero_()
    bias.zero_()
    assert torch.equal(linear(x, packed), result)


def test_pieces_of_memory_do_not_overlap_and_outlive_what_handed_them_out() -> None:
    memory = WeightMemory()
    pieces = [memory.take(size, dtype=torch.float16) for size in (1, 33, 100, 40 * 2**20, 7, 30 * 2**20)]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece[:1] = piece[-1:] = number
    del memory
    assert [(piece[0].item(), piece[-1].item()) for piece in pieces] == [(n, n) for n in range(len(pieces))]


@pytest.mark.parametrize(
    ("weight", "bias", "named"),
    [
        (torch.zeros(8), None, "out_features"),
        (torch.zeros(8, 4).half(), None, "float16"),
        (torch.zeros(4, 8).T, None, "contiguous"),
        (torch.zeros(8, 4, device="meta"), None, "meta"),
        (torch.zeros(8, 4), torch.zeros(4), "bias"),
        (torch.zeros(8, 4), torch.zeros(8).double(), "float64"),
    ],
)
def test_packing_names_what_does_not_fit(weight: torch.Tensor, bias: torch.Tensor | None, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        pack(weight, bias)


@pytest.mark.parametrize(
    ("x", "named"),
    [
        (torch.zeros(4), "must be"),
        (torch.zeros(3, 5), r"\[T, 4\]"),
        (torch.zeros(3, 4).half(), "float16"),
        (torch.zeros(4, 3).T, "contiguous"),
        (torch.zeros(3, 4, device="meta"), "meta"),
    ],
)
def test_linear_names_what_does_not_fit(x: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        linear(x, pack(torch.zeros(8, 4)))


def test_vectors_that_the_cpu_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(torch.zeros(8, 4))

    class Library:
        """A library on a CPU without AVX-512, as far as is asked of it."""

        def radixserve_has_avx512(self) -> bool:
            return False

    monkeypatch.setattr("radixserve.kernels.cpu.linear.library", Library)
    with pytest.raises(ValueError, match="AVX-512"):
        linear(torch.zeros(1, 4), packed, lanes=16)
