"""Where the library cannot be used, the reason is said and nothing of it is called."""

import subprocess
from pathlib import Path

import pytest

from radixserve.kernels.cpu import library
from radixserve.kernels.cpu.library import CpuKernelsUnavailableError, load


def compiled(directory: Path, source: str) -> Path:
    """Return a library of this C source."""
    path = directory / "native.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def test_what_is_no_library_is_told(tmp_path: Path) -> None:
    path = tmp_path / "native.so"
    with pytest.raises(CpuKernelsUnavailableError, match="cannot be loaded"):
        load(path)
    path.write_bytes(b"not a library")
    with pytest.raises(CpuKernelsUnavailableError, match="cannot be loaded"):
        load(path)


def test_a_library_of_another_version_is_not_used(tmp_path: Path) -> None:
    path = compiled(tmp_path, 'extern "C" int radixserve_abi_version() { return 12345; }')
    with pytest.raises(CpuKernelsUnavailableError, match="another version; install radixserve again"):
        load(path)


def test_a_library_without_the_functions_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(CpuKernelsUnavailableError, match="cannot be loaded"):
        load(compiled(tmp_path, "int nothing;"))


def test_a_cpu_without_the_instructions_is_told(tmp_path: Path) -> None:
    support = 'extern "C" int radixserve_is_supported() { return 0; }'
    version = f'extern "C" int radixserve_abi_version() {{ return {library.ABI_VERSION}; }}'
    with pytest.raises(CpuKernelsUnavailableError, match="this CPU lacks AVX2, FMA or F16C"):
        load(compiled(tmp_path, support + version))


def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    library.library()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(mapped) == 1
