import pytest
import torch

from radixserve.kernels import reference
from radixserve.kernels.rms_norm import MAX_ROW, add_rms_norm, rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("row_size", [1, 64, 80, 576, 1000, MAX_ROW])
def test_normalises_as_the_reference(dtype: torch.dtype, row_size: int) -> None:
    weight = random_tensor(row_size, dtype=dtype)
    for num_rows in (0, 1, 3):
        x, delta = (random_tensor(num_rows, row_size, dtype=dtype, seed=seed) for seed in (1, 2))
        tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **tolerance)
        total, normalized = add_rms_norm(x, delta, weight, 1e-5)
        expected_total, expected = reference.add_rms_norm(x, delta, weight, 1e-5)
        assert torch.equal(total, expected_total)
        torch.testing.assert_close(normalized, expected, **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_heads_of_a_wider_tensor_have_weights_of_their_own(dtype: torch.dtype, head_dim: int) -> None:
    for num_tokens in (0, 1, 19):
        heads = random_tensor(num_tokens, 11, head_dim, dtype=dtype)[:, 1:8]
        weight = random_tensor(7, head_dim, dtype=dtype, seed=1)
        torch.testing.assert_close(
            rms_norm(heads, weight, 1e-6),
            reference.rms_norm(heads, weight, 1e-6),
            atol=TOLERANCE[dtype],
            rtol=TOLERANCE[dtype],
        )


def test_a_nan_stays_in_its_row() -> None:
    x = random_tensor(40, 64)
    x[17, 3] = torch.nan
    normalized = rms_norm(x, random_tensor(64, seed=1), 1e-5)
    assert normalized[17].isnan().all()
    assert normalized[:17].isfinite().all()
    assert normalized[18:].isfinite().all()


def test_its_arguments_stay_as_they_are() -> None:
    x, delta, weight = random_tensor(3, 64), random_tensor(3, 64, seed=1), random_tensor(64, seed=2)
    before = [tensor.clone() for tensor in (x, delta, weight)]
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, delta, weight, 1e-5)
    assert all(torch.equal(*pair) for pair in zip((x, delta, weight), before, strict=True))
