"""The C++ kernels are part of an installation wherever they can be built, so only there may their tests be left out."""

import platform
import shutil
import sys

import pytest

from radixserve.kernels.cpu import library


@pytest.fixture(scope="package", autouse=True)
def _kernels() -> None:
    """Skip the tests where the kernels cannot be; fail where they could be built and are not."""
    obstacle = library.obstacle()
    if obstacle is None:
        return
    is_their_platform = sys.platform.startswith("linux") and platform.machine() in ("x86_64", "AMD64")
    if not is_their_platform or shutil.which("g++") is None or "AVX2" in obstacle:
        pytest.skip(obstacle)
    pytest.fail(f"{obstacle}: python setup.py build_ext --inplace, or install radixserve again")
