"""The terminal chat over an engine in this process."""

import asyncio
import io
import signal
from collections.abc import Mapping, Sequence

import pytest

from radixserve.cli.chat import Conversation, Terminal
from radixserve.cli.engine_responder import EngineResponder
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.byte_tokenizer import END
from tests.cli.keyboard import Keyboard, type_in
from tests.stub import Table
from tests.stub_engine import stub_engine

ANSWER = b"Yes."


def say_yes(context: Sequence[int]) -> Mapping[int, float]:
    """ANSWER, then the end, after every assistant header."""
    header = b"assistant\n"
    for said in range(len(ANSWER) + 1):
        if bytes(token for token in context[-len(header) - said :] if token < END) == header + ANSWER[:said]:
            return {ANSWER[said] if said < len(ANSWER) else END: 1.0}
    return {ord("?"): 1.0}


def go_on(_: Sequence[int]) -> Mapping[int, float]:
    return {ord("a"): 1.0}


class Chat:
    """A conversation on a terminal over a stub engine, ended when all of its blocks are free."""

    def __init__(
        self, tokenizer: Tokenizer, table: Table, keyboard: Keyboard, stdout: io.StringIO | None = None
    ) -> None:
        self.stdout = stdout or io.StringIO()
        self.stderr = io.StringIO()
        self.engine = stub_engine(tokenizer, table)
        params = SamplingParams(temperature=0.0, max_tokens=200)
        responder = EngineResponder(self.engine, params)
        terminal = Terminal(keyboard, self.stdout, self.stderr)
        with asyncio.Runner() as runner:
            self.name = runner.run(responder.start())
            try:
                Conversation(responder, terminal, runner, None).run()
                runner.run(self._until_idle())
            finally:
                runner.run(responder.close())

    async def _until_idle(self) -> None:
        async with asyncio.timeout(5):
            while self.engine.stats is None or self.engine.stats.cache.num_in_use_blocks:
                await asyncio.sleep(0)


def test_the_second_turn_reads_the_first_from_the_cache(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat(tokenizer, say_yes, type_in(monkeypatch, "Is it?\nReally?\n"))
    assert chat.stdout.getvalue() == "Yes.\nYes.\n"
    first, second = chat.stderr.getvalue().splitlines()
    num_first = len("^user\nIs it?$\n^assistant\n")  # ^ and $ for the start and the end token
    assert f"prompt {num_first} tokens, 0 cached, 5 generated" in first
    # All of the first prompt and the answer; its end token was never put into the cache, as nothing followed it.
    assert f" {num_first + len(ANSWER)} cached, 5 generated" in second
    assert chat.name == "stub, float32 on cpu"


def test_ctrl_c_ends_the_request_and_frees_its_blocks(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(io.StringIO):
        def write(self, text: str) -> int:
            written = super().write(text)
            if self.getvalue() == "aaa":
                signal.raise_signal(signal.SIGINT)
            return written

    chat = Chat(tokenizer, go_on, type_in(monkeypatch, "Go on.\n"), stdout=Impatient())
    assert chat.stdout.getvalue().startswith("aaa")
    assert chat.stdout.getvalue().count("a") < 200
    assert chat.stderr.getvalue().startswith("stopped: ")


def test_a_conversation_that_outgrows_the_context_can_begin_anew(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(tokenizer, say_yes, type_in(monkeypatch, "x" * 600 + "\n/reset\nIs it?\n"))
    assert "error: the prompt has" in chat.stderr.getvalue()
    assert chat.stdout.getvalue() == "Yes.\n"
