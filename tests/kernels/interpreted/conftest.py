"""These tests run kernels on the CPU in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so they need a process of their own: test_interpreter.py starts it.
To run some of them by hand: TRITON_INTERPRET=1 pytest tests/kernels/interpreted
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
