"""Where weights lie: in private memory, of huge pages if the machine has them."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from radixserve.kernels.cpu.weight_memory import WeightMemory


def mapping_of(tensor: torch.Tensor) -> str:
    """Return what the kernel says of the mapping that holds a tensor: its line of addresses and what follows."""
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        addresses = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", part)
        if addresses and int(addresses[1], 16) <= tensor.data_ptr() < int(addresses[2], 16):
            return part
    raise AssertionError("the tensor lies nowhere")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no transparent huge pages"
)
def test_weights_lie_in_private_memory_for_which_huge_pages_are_asked() -> None:
    piece = WeightMemory().take(2**20, dtype=torch.float16)
    mapping = mapping_of(piece)
    assert mapping.split()[1] == "rw-p"
    flags = re.search(r"VmFlags:(.*)", mapping)
    assert flags is not None
    assert "hg" in flags[1].split()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="not on this platform")
def test_a_kernel_that_takes_no_such_advice_still_gives_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    assert WeightMemory().take(3, 5, dtype=torch.float16).shape == (3, 5)
