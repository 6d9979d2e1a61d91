import pytest
import torch

from radixserve.kernels import reference
from radixserve.kernels.silu_mul import silu_mul


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize("size", [1, 15, 1024, 1536, 2049])
def test_gates_as_the_reference(dtype: torch.dtype, tolerance: float, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for num_rows in (0, 1, 5):
        gate_up = torch.randn(num_rows, 2 * size, generator=generator).to(dtype) * 3
        torch.testing.assert_close(silu_mul(gate_up), reference.silu_mul(gate_up), atol=tolerance, rtol=tolerance)


def test_rows_may_be_part_of_wider_ones() -> None:
    gate_up = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))[:, 50:250]
    torch.testing.assert_close(silu_mul(gate_up), reference.silu_mul(gate_up), atol=1e-5, rtol=1e-5)


def test_large_gates_neither_overflow_nor_vanish() -> None:
    gate_up = torch.tensor([[-80.0, 80.0, 1e4, 0.0, 1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(silu_mul(gate_up), reference.silu_mul(gate_up), atol=1e-5, rtol=1e-5)
