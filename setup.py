"""The C++ kernels: what pyproject.toml cannot say of the build. Without a compiler the installation goes on."""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("radixserve/kernels/cpu")


def extensions() -> list[Extension]:
    """Return the library of the CPU kernels, where its instructions and its compiler's flags can be there."""
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return []
    # It includes no header of Python's, so one build serves every version; it is loaded by ctypes and never imported.
    return [
        Extension(
            "radixserve.kernels.cpu.native",
            sources=[str(path) for path in sorted(FOLDER.glob("*.cpp"))],
            depends=[str(path) for path in sorted(FOLDER.glob("*.h"))],
            language="c++",
            extra_compile_args=["-std=c++17", "-O3", "-fopenmp", "-fvisibility=hidden"],
            extra_link_args=["-fopenmp"],
            py_limited_api=True,
            optional=True,
        )
    ]


setup(ext_modules=extensions(), options={"bdist_wheel": {"py_limited_api": "cp311"}})
