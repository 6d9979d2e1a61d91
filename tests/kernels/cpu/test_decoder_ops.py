"""The decoder's small operations, against their plain versions."""

import pytest
import torch

from radixserve.kernels import reference
from radixserve.kernels.cpu.rms_norm import add_rms_norm, rms_norm
from radixserve.kernels.cpu.silu_mul import silu_mul

SIZES = [1, 7, 8, 31, 33, 64, 576, 1000, 1536]


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("row_size", SIZES)
def test_norms_equal_the_reference(row_size: int) -> None:
    weight = random_tensor(row_size)
    for num_rows in (0, 1, 3, 130):
        x, delta = (random_tensor(num_rows, row_size, seed=seed) for seed in (1, 2))
        close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
        total, normalized = add_rms_norm(x, delta, weight, 1e-5)
        assert torch.equal(total, x + delta)
        close(normalized, reference.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_heads_of_a_wider_tensor_have_weights_of_their_own(head_dim: int) -> None:
    for num_tokens in (0, 1, 19):
        heads = random_tensor(num_tokens, 11, head_dim)[:, 1:8]
        weight = random_tensor(7, head_dim, seed=1)
        close(rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("size", SIZES)
def test_the_gate_equals_the_reference(size: int) -> None:
    for num_rows in (0, 1, 3, 130):
        gate_up = random_tensor(num_rows, 2 * size) * 5
        close(silu_mul(gate_up), reference.silu_mul(gate_up))


def test_the_gate_takes_numbers_of_any_size() -> None:
    edges = [0.0, -0.0, 1e-30, -1e-30, 86.0, -86.0, -88.2, 89.0, -89.0, 1e30, -1e30, torch.inf, 20.0, -20.0, 1.0, -1.0]
    gate = torch.tensor([edges])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    close(silu_mul(gate_up), reference.silu_mul(gate_up))


def test_a_nan_stays_in_its_row_or_its_element() -> None:
    x = random_tensor(40, 64)
    x[17, 3] = torch.nan
    for normalized in (rms_norm(x, torch.ones(64), 1e-5), add_rms_norm(x, x, torch.ones(64), 1e-5)[1]):
        assert normalized[17].isnan().all()
        assert normalized[:17].isfinite().all()
        assert normalized[18:].isfinite().all()
    gated = silu_mul(x)
    assert gated[17, 3].isnan()
    gated[17, 3] = 0
    assert gated.isfinite().all()


def test_rows_may_lie_apart() -> None:
    wide, deltas, weight = random_tensor(9, 100), random_tensor(9, 80, seed=1), random_tensor(64, seed=2)
    x, delta = wide[:, 30:94], deltas[:, :64]
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm(x.contiguous(), weight, 1e-5))
    together = zip(
        add_rms_norm(x, delta, weight, 1e-5), add_rms_norm(x.clone(), delta.clone(), weight, 1e-5), strict=True
    )
    assert all(torch.equal(*pair) for pair in together)
    assert torch.equal(silu_mul(x), silu_mul(x.contiguous()))


@pytest.mark.usefixtures("keeps_threads")
def test_a_row_gets_the_same_bits_alone_and_with_any_number_of_threads() -> None:
    x, delta, weight = random_tensor(300, 577), random_tensor(300, 577, seed=1), random_tensor(577, seed=2)
    gate_up = random_tensor(300, 1154, seed=3)
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results.append((rms_norm(x, weight, 1e-5), *add_rms_norm(x, delta, weight, 1e-5), silu_mul(gate_up)))
    alone = (rms_norm(x[7:8], weight, 1e-5), *add_rms_norm(x[7:8], delta[7:8], weight, 1e-5), silu_mul(gate_up[7:8]))
    for one, other, row in zip(*results, alone, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one[7:8], row)


def test_arguments_stay_as_they_are() -> None:
    x, delta, weight = random_tensor(3, 64), random_tensor(3, 64, seed=1), random_tensor(64, seed=2)
    before = [tensor.clone() for tensor in (x, delta, weight)]
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, delta, weight, 1e-5)
    silu_mul(x)
    assert all(torch.equal(*pair) for pair in zip((x, delta, weight), before, strict=True))


@pytest.mark.parametrize(
    ("x", "weight", "named"),
    [
        (torch.zeros(64), torch.zeros(64), "must be"),
        (torch.zeros(3, 64), torch.zeros(32), "weight"),
        (torch.zeros(3, 4, 64), torch.zeros(64), "weight"),
        (torch.zeros(3, 64), torch.zeros(64).half(), "float16"),
        (torch.zeros(3, 64), torch.zeros(128)[::2], "contiguous"),
        (torch.zeros(3, 64).half(), torch.zeros(64).half(), "float16"),
        (torch.zeros(3, 64, device="meta"), torch.zeros(64), "meta"),
        (torch.zeros(64, 3).T, torch.zeros(64), "contiguous"),
    ],
)
def test_rms_norm_names_what_does_not_fit(x: torch.Tensor, weight: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        rms_norm(x, weight, 1e-5)


@pytest.mark.parametrize(
    ("x", "delta", "named"),
    [
        (torch.zeros(3, 64), torch.zeros(2, 64), "delta"),
        (torch.zeros(3, 64), torch.zeros(3, 64).half(), "delta"),
        (torch.zeros(3, 64), torch.zeros(3, 64, device="meta"), "delta"),
        (torch.zeros(3, 64), torch.zeros(64, 3).T, "contiguous"),
        (torch.zeros(3, 2, 64), torch.zeros(3, 2, 64), "must be"),
    ],
)
def test_add_rms_norm_names_what_does_not_fit(x: torch.Tensor, delta: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        add_rms_norm(x, delta, torch.zeros(x.shape[1:]), 1e-5)


@pytest.mark.parametrize(
    ("gate_up", "named"),
    [
        (torch.zeros(3, 65), "65"),
        (torch.zeros(3, 0), "must be"),
        (torch.zeros(2, 3, 64), "must be"),
        (torch.zeros(3, 64).double(), "float64"),
        (torch.zeros(3, 64, device="meta"), "meta"),
        (torch.zeros(64, 3).T, "contiguous"),
    ],
)
def test_silu_mul_names_what_does_not_fit(gate_up: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        silu_mul(gate_up)
