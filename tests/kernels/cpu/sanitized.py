"""Run tests of the kernels on another build of the library: python -m tests.kernels.cpu.sanitized LIBRARY TEST..."""

import sys
from pathlib import Path

import pytest

from radixserve.kernels.cpu import library


def main() -> int:
    """Load the library, put it in the place of the installed one, and run the tests, without capture: it may abort."""
    built = library.load(Path(sys.argv[1]))
    # The launchers, which keep the name, are imported by the tests.
    library.library = lambda: built
    return pytest.main(["-p", "no:cacheprovider", "--capture", "no", "--timeout", "900", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
