"""The script for the day a GPU is there must not fail on that day for a reason of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
# What a machine with a GPU need not have installed.
ABSENT = ("msgspec", "transformers", "tokenizers", "xxhash", "starlette", "jinja2", "safetensors")


def run(*arguments: str, prepare: str = "pass") -> subprocess.CompletedProcess[str]:
    """Run the script's main, after a statement about its module `script`."""
    code = (
        "import importlib.util, sys\n"
        f"sys.modules.update(dict.fromkeys({ABSENT}))\n"
        f"specification = importlib.util.spec_from_file_location('script', {str(SCRIPT)!r})\n"
        "script = sys.modules['script'] = importlib.util.module_from_spec(specification)\n"
        f"specification.loader.exec_module(script)\n{prepare}\nsys.exit(script.main())\n"
    )
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_it_says_that_there_is_no_gpu() -> None:
    done = run()
    assert done.returncode == 2
    assert "no GPU" in done.stderr


@pytest.mark.slow
def test_right_kernels_pass() -> None:
    done = run("--interpret")
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("paged_decode", "paged_prefill", "write_kv", "copy_blocks", "rms_norm", "add_rms_norm", "silu_mul"):
        assert f"right {kernel} float16" in done.stdout


@pytest.mark.slow
def test_a_wrong_kernel_is_named_and_fails() -> None:
    done = run("--interpret", prepare="script.silu_mul = lambda gate_up: gate_up.chunk(2, dim=-1)[0]")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG silu_mul float32" in done.stdout
    assert "right rms_norm float32" in done.stdout
