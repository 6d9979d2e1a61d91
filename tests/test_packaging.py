"""What a wheel holds, and that a checkout does not stand in another package's light."""

import subprocess
import sys
from pathlib import Path

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
