"""The tests of the kernels in Triton's interpreter, in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ROOT = FOLDER.parents[2]


def run_interpreted(selection: str) -> None:
    """Run the tests of the folder that a marker expression selects; fail with their output unless all of them pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        selection,
        "-p",
        "no:cacheprovider",
        "--timeout",
        "600",
        str(FOLDER),
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    output = child.stdout + child.stderr
    # Pytest itself answers 5 if nothing was selected; a skipped test would pass unseen.
    assert child.returncode == 0, output
    assert re.search(r"\b[1-9]\d* passed\b", output), output
    assert "skipped" not in output, output


@pytest.mark.timeout(600)
def test_kernels_and_engine_equal_the_reference_in_the_interpreter() -> None:
    run_interpreted("not slow and not gpu")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kernels_equal_the_reference_in_the_interpreter_over_the_whole_matrix() -> None:
    run_interpreted("slow and not gpu")
