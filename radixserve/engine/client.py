"""The calls that every client of an engine has, and the client of an engine in a process of its own."""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from typing import Protocol

import msgspec

from radixserve.config import EngineConfig
from radixserve.engine.frames import HEADER_SIZE, encode_frame
from radixserve.errors import ConfigError, EngineDied, EngineUnavailable
from radixserve.protocol import (
    Abort,
    AddRequest,
    Control,
    ControlCommand,
    ControlReply,
    ControlResult,
    EngineFailed,
    EngineMessage,
    EngineReady,
    StepOutput,
)

# A thread of OpenMP that waits spins by default; beside a busy API process a step then takes two to three times as long
# (2 cores, 8 rows of 1,024 tokens: 578 ms against 292 ms with waits that sleep; alone 190 ms against 170 ms).
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}


class EngineClient(Protocol):
    """One run of an engine, from start to stop or to its death. start comes first and only once."""

    async def start(self) -> EngineReady:
        """Load the model. Raises ConfigError if the settings are at fault, EngineDied if loading fails otherwise."""

    def add(self, request: AddRequest) -> None:
        """Hand a request over; never waits."""

    def abort(self, request_ids: list[str]) -> None:
        """End requests and free their blocks within a step; never waits. Unknown ids are ignored."""

    async def outputs(self) -> StepOutput:
        """Return the next step's output, waiting for it. Raises EngineDied. One caller at a time."""

    async def control(self, command: ControlCommand) -> ControlResult:
        """Run a command between two steps. Someone must be waiting in outputs(). Raises EngineUnavailable."""

    async def stop(self) -> None:
        """End the engine and free all that it holds."""


class ProcessClient:
    """An engine in a process of its own, so that its steps and the API's event loop never wait for one GIL."""

    def __init__(self, config: EngineConfig) -> None:
        # The keys of the API's callers are none of the engine's business.
        self._config = msgspec.structs.replace(config, api_key=())
        self._decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[ControlResult]] = {}
        self._is_loaded = False
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """The engine process, once it was started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> EngineReady:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "radixserve.engine.process", str(theirs.fileno())]
            # A Ctrl-C reaches the whole group; the process is to hold it back until it can say that it ignores it.
            held_back = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_ENVIRONMENT | os.environ
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(encode_frame(self._config))
        match await self._receive():
            case EngineReady() as ready:
                self._is_loaded = True
                return ready
            case EngineFailed(message, is_config_error=True):
                await self.stop()
                raise ConfigError(message)
            case other:
                await self.stop()
                raise EngineDied(f"the engine process began with an unexpected message: {other!r:.200}")

    def add(self, request: AddRequest) -> None:
        self._write(request)

    def abort(self, request_ids: list[str]) -> None:
        self._write(Abort(request_ids))

    async def outputs(self) -> StepOutput:
        while True:
            match await self._receive():
                case StepOutput() as output:
                    return output
                case ControlReply(call_id, result):
                    if (call := self._calls.pop(call_id, None)) is not None and not call.done():
                        call.set_result(result)

    async def control(self, command: ControlCommand) -> ControlResult:
        call_id = next(self._call_ids)
        call: asyncio.Future[ControlResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = call
        self._write(Control(call_id, command))
        try:
            return await call
        finally:
            self._calls.pop(call_id, None)

    async def stop(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        if self._process is not None:
            await asyncio.to_thread(self._reap)

    def _reap(self) -> None:
        assert self._process is not None
        if not self._is_loaded:
            self._process.kill()  # it looks at its socket again only after it has loaded
        try:
            self._process.wait(timeout=5)  # it ends by itself after the step in progress
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, message: AddRequest | Abort | Control) -> None:
        if self._writer is None or self._writer.is_closing():
            raise EngineUnavailable("the engine is not running; try again in a few seconds")
        self._writer.write(encode_frame(message))

    async def _receive(self) -> EngineMessage:
        assert self._reader is not None
        try:
            header = await self._reader.readexactly(HEADER_SIZE)
            body = await self._reader.readexactly(int.from_bytes(header, "little"))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            for call in self._calls.values():
                call.set_exception(EngineUnavailable("the engine ended before it answered"))
            self._calls.clear()
            await self.stop()
            code = self._process.returncode if self._process is not None else None
            raise EngineDied(f"the engine process ended with code {code}") from error
        message: EngineMessage = self._decoder.decode(body)
        return message
