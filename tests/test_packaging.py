"""What a wheel holds, and that a checkout does not stand in another package's light."""

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

ROOT = Path(__file__).parent.parent


def test_a_wheel_holds_the_linked_folders_under_radixserve() -> None:
    packages = find_namespace_packages(str(ROOT), include=["radixserve*"])
    assert {"radixserve.kernels", "radixserve.api", "radixserve.core"} <= set(packages)
    assert not {"kernels", "api"} & set(packages)


def test_transformers_is_importable_from_a_checkout() -> None:
    # It imports whatever it finds under the name `kernels`.
    subprocess.run([sys.executable, "-c", "from transformers import LlamaForCausalLM"], cwd=ROOT, check=True)


def test_the_version_is_the_packages() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "radixserve", "--version"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert "0.1.0" in done.stdout


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, links kept, as a build writes beside it."""
    tree = tmp_path_factory.mktemp("source")
    for name in ("radixserve", "kernels", "api"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    return tree


def build(source_tree: Path, kind: str, **environment: str) -> list[str]:
    """Build an sdist or a wheel and return the names of the files in it."""
    target = source_tree / f"dist_{kind}_{len(environment)}"
    command = [sys.executable, "setup.py", "-q", kind, "--dist-dir", str(target)]
    subprocess.run(command, cwd=source_tree, check=True, env=os.environ | environment, capture_output=True)
    (path,) = target.iterdir()
    if path.suffix == ".whl":
        return zipfile.ZipFile(path).namelist()
    return [name.partition("/")[2] for name in tarfile.open(path).getnames()]


SOURCES = {
    f"radixserve/kernels/cpu/{path.name}"
    for pattern in ("*.cpp", "*.h", "*.py")
    for path in (ROOT / "kernels" / "cpu").glob(pattern)
}


@pytest.mark.slow
def test_an_sdist_and_a_wheel_hold_the_sources_of_the_cpp_kernels(source_tree: Path) -> None:
    assert set(build(source_tree, "sdist")) >= SOURCES
    assert set(build(source_tree, "bdist_wheel")) >= SOURCES


@pytest.mark.slow
def test_a_wheel_can_be_built_without_a_compiler(source_tree: Path) -> None:
    shutil.rmtree(source_tree / "build", ignore_errors=True)
    names = build(source_tree, "bdist_wheel", CC="/bin/false", CXX="/bin/false")
    assert set(names) >= SOURCES
    assert not any(name.endswith(".so") for name in names)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels are for x86-64")
def test_a_wheel_holds_the_library(source_tree: Path) -> None:
    assert "radixserve/kernels/cpu/native.abi3.so" in build(source_tree, "bdist_wheel")
