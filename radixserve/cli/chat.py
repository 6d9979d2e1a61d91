"""`radixserve chat`: a conversation in the terminal."""

import argparse
import asyncio
import contextlib
import importlib
import io
import re
import sys
import time
from typing import TextIO

from rich.console import Console

from radixserve.bench.message import Message
from radixserve.bench.server import Server
from radixserve.cli.responder import AnswerPart, Responder
from radixserve.cli.server_responder import ServerResponder
from radixserve.config import EngineConfig
from radixserve.errors import ConfigError, InvalidRequest, RadixServeError
from radixserve.sampling_params import SamplingParams

COMMANDS = """\
/reset          forget the conversation so far
/system TEXT    set the system prompt; without TEXT, remove it
/help           show this
/exit           end, as does Ctrl-D; Ctrl-C stops an answer"""
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Terminal:
    """Where a conversation is read and written: answers alone on stdout, everything else on stderr.

    is_interactive: stdin is a terminal, which gets a prompt; otherwise it is a script.
    """

    def __init__(self, stdin: TextIO, stdout: TextIO, stderr: TextIO) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._console = Console(file=stderr, highlight=False, soft_wrap=True)
        self.is_interactive = stdin.isatty()
        if self.is_interactive:
            with contextlib.suppress(ImportError):  # not on every platform
                importlib.import_module("readline")  # gives input() a history and keys to edit with

    def read_line(self) -> str | None:
        """Return the next line without its end; None after the last one."""
        if not self.is_interactive:
            line = self._stdin.readline()
            return line.rstrip("\n") if line else None
        try:
            return input("> ")
        except EOFError:
            return None

    def write(self, text: str) -> None:
        """Show a piece of an answer at once; on a terminal without the control characters that could garble it."""
        self._stdout.write(_CONTROL.sub("", text) if self._stdout.isatty() else text)
        self._stdout.flush()

    def note(self, text: str) -> None:
        """Show what is not part of an answer."""
        self._console.print(text, style="dim", markup=False)


class Answer:
    """One answer while it comes."""

    def __init__(self) -> None:
        self.text = ""
        self._last: AnswerPart | None = None
        self._counts: AnswerPart | None = None
        self._started = time.monotonic()
        self._first_text: float | None = None
        self._ended = self._started

    def add(self, part: AnswerPart) -> None:
        """Take what came just now."""
        self.text += part.text
        self._counts = part
        self._ended = time.monotonic()
        if part.text and self._first_text is None:
            self._first_text = self._ended

    def summary(self) -> str:
        """Return counts and speed in a line; tokens/s are of the tokens after the first."""
        counts = self._counts
        if counts is None:
            return "no answer"
        parts = []
        if counts.num_prompt_tokens is not None:
            parts.append(f"prompt {counts.num_prompt_tokens:,} tokens")
        if counts.num_cached_tokens is not None:
            parts.append(f"{counts.num_cached_tokens:,} cached")
        parts.append(f"{counts.num_generated_tokens:,} generated")
        if self._first_text is not None:
            parts.append(f"first after {self._first_text - self._started:.2f} s")
            if self._ended > self._first_text:
                rate = (counts.num_generated_tokens - 1) / (self._ended - self._first_text)
                parts.append(f"{rate:.1f} tokens/s")
        return ", ".join(parts)


class Conversation:
    """Messages so far, and the loop that reads a line and streams its answer."""

    def __init__(self, responder: Responder, terminal: Terminal, runner: asyncio.Runner, system: str | None) -> None:
        self._responder = responder
        self._terminal = terminal
        self._runner = runner
        self._system = system
        self._history: list[Message] = []

    def run(self) -> None:
        """Go on until the input ends or /exit.

        On a terminal, Ctrl-C and a RadixServeError end one answer; in a script they are raised.
        """
        while True:
            try:
                line = self._terminal.read_line()
            except KeyboardInterrupt:
                if not self._terminal.is_interactive:
                    raise
                self._terminal.note("\nCtrl-D or /exit ends the chat")
                continue
            if line is None:
                return
            command = _COMMAND.fullmatch(line.strip())
            if command is not None:
                if command[1] == "exit":
                    return
                self._obey(command[1], command[2])
            elif line.strip():
                self._reply_to(line)

    def _obey(self, command: str, argument: str | None) -> None:
        match command:
            case "reset":
                self._history.clear()
                self._terminal.note("the conversation begins anew")
            case "system":
                self._system = argument
                self._terminal.note("system prompt removed" if argument is None else "system prompt set")
            case "help":
                self._terminal.note(COMMANDS)
            case _:
                self._terminal.note(f"there is no /{command}; /help lists the commands")

    def _reply_to(self, line: str) -> None:
        """Stream the answer to line. What was said of a stopped answer stays; of a failed one, nothing does."""
        answer = Answer()
        question = Message("user", line)
        stopped = ""
        try:
            self._runner.run(self._stream([*self._history, question], answer))
        except KeyboardInterrupt:
            if not self._terminal.is_interactive:
                raise
            stopped = "stopped: "
        except RadixServeError as error:
            if not self._terminal.is_interactive:
                raise
            self._terminal.note(f"error: {error}")
            return
        self._terminal.write("\n")
        self._terminal.note(stopped + answer.summary())
        if answer.text:
            self._history += [question, Message("assistant", answer.text)]

    async def _stream(self, history: list[Message], answer: Answer) -> None:
        system = [] if self._system is None else [Message("system", self._system)]
        async with contextlib.aclosing(self._responder.answer([*system, *history])) as parts:
            async for part in parts:
                answer.add(part)
                self._terminal.write(part.text)


def run(arguments: argparse.Namespace, config: EngineConfig | None) -> int:
    """Chat until the input ends; return the exit code.

    config: of an engine in this process; None talks to the server at --base-url. Raises ConfigError, and another
    RadixServeError if nobody can answer.
    """
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    terminal = Terminal(sys.stdin, sys.stdout, sys.stderr)
    # The runner turns Ctrl-C into the end of what it runs, and keeps its loop, with its connections, between answers.
    with asyncio.Runner() as runner:
        responder = make_responder(arguments, config)
        try:
            name = runner.run(responder.start())
            if terminal.is_interactive:
                terminal.note(f"{name}; /help lists the commands")
            Conversation(responder, terminal, runner, arguments.system).run()
        finally:
            runner.run(responder.close())
    return 0


def make_responder(arguments: argparse.Namespace, config: EngineConfig | None) -> Responder:
    """Return the one who is to answer. Raises ConfigError."""
    try:
        params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)
    except InvalidRequest as error:
        raise ConfigError(str(error)) from None
    if config is None:
        settings = {"temperature": params.temperature}
        if params.max_tokens is not None:
            settings["max_tokens"] = params.max_tokens
        return ServerResponder(Server(arguments.base_url, arguments.api_key), arguments.model, settings)
    # torch takes a second to import, which a chat with a server need not wait for.
    from radixserve.cli.engine_responder import EngineResponder  # noqa: PLC0415
    from radixserve.engine.in_process import in_process_engine  # noqa: PLC0415

    return EngineResponder(in_process_engine(config, show_progress=sys.stderr.isatty()), params)
