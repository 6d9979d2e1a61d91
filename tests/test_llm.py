"""LLM: what is left of a call that did not end by itself."""

import signal
import threading
import time
from pathlib import Path

import pytest

from radixserve import LLM, SamplingParams
from tests.tiny_engine import write_tiny_engine

ENDLESS = SamplingParams(max_tokens=1000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=1)


def test_ctrl_c_ends_the_requests_of_the_call(tmp_path: Path) -> None:
    with LLM(str(write_tiny_engine(tmp_path)), num_kv_blocks=256) as llm:
        typed = threading.Timer(0.5, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
        typed.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, i % 250] for i in range(300)], ENDLESS, show_progress=False)
        began = time.monotonic()
        assert llm.generate([[1, 2, 3]], SHORT, show_progress=False)[0].answers[0].token_ids
        assert time.monotonic() - began < 5
