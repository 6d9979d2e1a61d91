"""The kernels read and write nothing beyond their tensors and do nothing that C++ leaves undefined."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
SOURCES = sorted((ROOT / "kernels" / "cpu").glob("*.cpp"))
FLAGS = (
    *("-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
TESTS = (
    *("test_paged_attention.py", "test_shared_prefix.py", "test_write_kv.py", "test_decoder_ops.py"),
    *("test_linear.py", "test_decoder_layers.py"),
)


def run_sanitized(library: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests of this folder on a library that was built with FLAGS."""
    runtime = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    environment = os.environ | {
        "LD_PRELOAD": runtime,  # it must come before everything that allocates
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps what it allocated until it ends
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.kernels.cpu.sanitized", str(library), *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def build(library: Path, *sources: str) -> None:
    subprocess.run(["g++", *FLAGS, *sources, "-o", str(library)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_access_beyond_a_tensor_and_no_undefined_behaviour(tmp_path: Path) -> None:
    library = tmp_path / "native.so"
    build(library, *map(str, SOURCES))
    done = run_sanitized(library, *(str(FOLDER / name) for name in TESTS))
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert re.search(r"\b[1-9]\d* passed\b", output), output
    assert "skipped" not in output, output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sanitizers_would_see_an_access_beyond_a_tensor(tmp_path: Path) -> None:
    broken = tmp_path / "silu_mul.cpp"
    text = (ROOT / "kernels" / "cpu" / "silu_mul.cpp").read_text()
    broken.write_text(text.replace("gate + size,", "gate + size + 1,"))
    others = [str(path) for path in SOURCES if path.name != broken.name]
    build(tmp_path / "native.so", f"-I{ROOT / 'kernels' / 'cpu'}", str(broken), *others)
    done = run_sanitized(tmp_path / "native.so", str(FOLDER / "test_decoder_ops.py"), "-k", "gate_equals")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stdout + done.stderr
