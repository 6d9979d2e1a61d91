"""Launchers refuse what their kernels would read wrongly, before anything is launched."""

from typing import Any

import pytest
import torch

from radixserve.kernels.copy_blocks import copy_blocks
from radixserve.kernels.rms_norm import MAX_ROW, add_rms_norm, rms_norm
from radixserve.kernels.silu_mul import silu_mul
from radixserve.kernels.write_kv import write_kv

META = torch.device("meta")


def write_arguments(**changes: Any) -> dict[str, Any]:
    """Arguments that write_kv takes, but for the changes: 3 tokens, 4 query heads, 2 K/V heads."""
    return {
        "query_key": torch.zeros(3, 6, 64),
        "value": torch.zeros(3, 2, 64),
        "cos": torch.zeros(3, 32),
        "sin": torch.zeros(3, 32),
        "key_cache": torch.zeros(5, 2, 16, 64),
        "value_cache": torch.zeros(5, 2, 16, 64),
        "slot_mapping": torch.zeros(3, dtype=torch.int64),
    } | changes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"query_key": torch.zeros(3, 384)}, "query_key"),
        ({"query_key": torch.zeros(3, 2, 64)}, "query_key has 2 heads"),
        ({"query_key": torch.zeros(3, 6, 128)[:, :, ::2]}, "contiguous"),
        ({"value": torch.zeros(4, 2, 64)}, "value"),
        ({"value": torch.zeros(3, 2, 64).half()}, "float16"),
        ({"value": torch.zeros(3, 3, 64)}, "key_cache"),
        ({"query_key": torch.zeros(3, 6, 32), "value": torch.zeros(3, 2, 32)}, "32"),
        ({"query_key": torch.zeros(3, 6, 64).double(), "value": torch.zeros(3, 2, 64).double()}, "float64"),
        ({"cos": torch.zeros(3, 64)}, "cos"),
        ({"sin": torch.zeros(2, 32)}, "sin"),
        ({"sin": torch.zeros(3, 64)[:, :32]}, "strides"),
        ({"value_cache": torch.zeros(4, 2, 16, 64)}, "value_cache"),
        ({"value_cache": torch.zeros(5, 2, 16, 64).half()}, "value_cache"),
        ({"key_cache": torch.zeros(5, 2, 64, 16).transpose(2, 3)}, "contiguous"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, "slot_mapping"),
        ({"slot_mapping": torch.zeros(3)}, "slot_mapping is torch.float32"),
        ({"slot_mapping": torch.zeros(6, dtype=torch.int64)[::2]}, "slot_mapping has strides"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int64, device=META)}, "cpu, meta"),
        ({"cos": torch.zeros(3, 32, device=META)}, "cpu, meta"),
    ],
)
def test_write_kv_names_what_does_not_fit(changes: dict[str, torch.Tensor], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        write_kv(**write_arguments(**changes))


@pytest.mark.parametrize(
    ("x", "weight", "named"),
    [
        (torch.zeros(64), torch.zeros(64), "must be"),
        (torch.zeros(3, 64), torch.zeros(32), "weight"),
        (torch.zeros(3, 4, 64), torch.zeros(64), "weight"),
        (torch.zeros(3, 0), torch.zeros(0), "0 elements"),
        (torch.zeros(1, MAX_ROW + 1), torch.zeros(MAX_ROW + 1), str(MAX_ROW)),
        (torch.zeros(3, 64), torch.zeros(64).half(), "float16"),
        (torch.zeros(3, 64).double(), torch.zeros(64).double(), "float64"),
        (torch.zeros(3, 64), torch.zeros(64, device=META), "meta"),
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
        (torch.zeros(3, 64), torch.zeros(3, 64, device=META), "delta"),
        (torch.zeros(3, 64), torch.zeros(64, 3).T, "contiguous"),
        (torch.zeros(3, 2, 64), torch.zeros(3, 2, 64), "two axes"),
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
        (torch.zeros(64, 3).T, "contiguous"),
    ],
)
def test_silu_mul_names_what_does_not_fit(gate_up: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        silu_mul(gate_up)


@pytest.mark.parametrize(
    ("caches", "sources", "destinations", "named"),
    [
        ([], [0], [1], "no caches"),
        ([torch.zeros(4, 8), torch.zeros(5, 8)], [0], [1], "alike"),
        ([torch.zeros(4, 8), torch.zeros(4, 8).half()], [0], [1], "alike"),
        ([torch.zeros(8, 4).T], [0], [1], "contiguous"),
        ([torch.zeros(33)[1:].view(4, 8)], [0], [1], "16 bytes"),
        ([torch.zeros(4, 3).half()], [0], [1], "32-bit"),
        ([torch.zeros(4, 8)], [0, 1], [2], "destination"),
        ([torch.zeros(4, 8)], [0, 1], [2, 2], "destination"),
        ([torch.zeros(4, 8)], [4], [0], "beyond"),
        ([torch.zeros(4, 8)], [0], [-1], "beyond"),
    ],
)
def test_copy_blocks_names_what_does_not_fit(
    caches: list[torch.Tensor], sources: list[int], destinations: list[int], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        copy_blocks(caches, sources, destinations)
