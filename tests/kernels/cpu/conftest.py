"""The C++ kernels are part of an installation wherever they can be built, so only there may their tests be left out."""

import platform
import shutil
import sys
from collections.abc import Iterator

import pytest
import torch

from radixserve.kernels.cpu.library import CpuKernelsUnavailableError, library


@pytest.fixture(scope="package", autouse=True)
def _kernels() -> None:
    """Skip the tests where the kernels cannot be; fail where they could be built and are not."""
    try:
        library()
    except CpuKernelsUnavailableError as error:
        is_their_platform = sys.platform.startswith("linux") and platform.machine() in ("x86_64", "AMD64")
        if not is_their_platform or shutil.which("g++") is None or "AVX2" in str(error):
            pytest.skip(str(error))
        pytest.fail(f"{error}: python setup.py build_ext --inplace, or install radixserve again")


@pytest.fixture
def keeps_threads() -> Iterator[None]:
    """Give torch its number of threads back after a test that changes it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
