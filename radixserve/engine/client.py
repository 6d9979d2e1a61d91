"""The calls that every client of an engine has, and the client of an engine in a process of its own."""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from radixserve.config import EngineConfig
from radixserve.engine.frames import FrameReader, encode_frame
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
    StartEngine,
    StepOutput,
)

# A thread of OpenMP that waits spins for milliseconds by default, and where the API process wants its core a step can
# take ten times as long. One that sleeps at once has to be woken at many of some 300 barriers of a step, which takes 4
# of 11 ms. A thousand turns, about 25 microseconds, span what most waits take, and then it sleeps (GNU's OpenMP; others
# take the policy alone). docs/BENCHMARKS.md, "Threads", has the measurements.
THREAD_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
_SECRETS = {"RADIXSERVE_API_KEY"}
_RECEIVE_SIZE = 1 << 18
# How long an engine may take to end by itself, after the step in progress, before it is killed.
STOP_SECONDS = 5.0


class EngineClient(Protocol):
    """One run of an engine, from start to stop or to its death. start comes first and only once."""

    async def start(self) -> EngineReady:
        """Load the model. Raises ConfigError if the settings are at fault, EngineDied if loading fails otherwise."""

    def add(self, request: AddRequest) -> None:
        """Hand a request over; never waits."""

    def abort(self, request_ids: list[str]) -> None:
        """End requests and free their blocks within a step; never waits, never raises. Unknown ids are ignored."""

    async def outputs(self) -> StepOutput:
        """Return the next step's output, waiting for it. Raises EngineDied. One caller at a time."""

    async def control(self, command: ControlCommand) -> ControlResult:
        """Run a command between two steps. Someone must be waiting in outputs(). Raises EngineUnavailable."""

    async def stop(self) -> None:
        """End the engine and free all that it holds; calls of control that wait end with EngineUnavailable."""


class ProcessClient:
    """An engine in a process of its own, so that its steps and the API's event loop never wait for one GIL."""

    def __init__(self, config: EngineConfig, public_prefixes: "Iterable[array[int]]" = ()) -> None:
        # The keys of the API's callers are none of the engine's business.
        own = msgspec.structs.replace(config, api_key=())
        self._first_message = StartEngine(own, [prefix.tobytes() for prefix in public_prefixes])
        self._frames = FrameReader()
        self._bodies: deque[bytes] = deque()
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
            # -m alone would import from the working directory first, whatever lies there; the engine is to find what
            # this process does.
            command = [sys.executable, "-P", "-m", "radixserve.engine.process", str(theirs.fileno())]
            environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
            if not THREAD_ENVIRONMENT.keys() & environment.keys():
                environment |= THREAD_ENVIRONMENT
            search_path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
            # A Ctrl-C reaches the whole group; the process is to hold it back until it can say that it ignores it.
            held_back = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=environment | {"PYTHONPATH": search_path},
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(encode_frame(self._first_message))
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
        with contextlib.suppress(EngineUnavailable):  # an engine that is gone has ended them
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
        try:
            self._write(Control(call_id, command))
            return await call
        finally:
            self._calls.pop(call_id, None)

    async def stop(self) -> None:
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineUnavailable("the engine ended before it answered"))
        if self._writer is not None:
            # Not close(), which waits until all is sent: an engine that hangs takes nothing any more.
            self._writer.transport.abort()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        if self._process is not None:
            await asyncio.to_thread(self._reap)

    def _reap(self) -> None:
        assert self._process is not None
        if not self._is_loaded:
            self._process.kill()  # it looks at its socket again only after it has loaded
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, message: AddRequest | Abort | Control) -> None:
        if self._writer is None or self._writer.is_closing():
            raise EngineUnavailable("the engine is not running; try again in a few seconds")
        self._writer.write(encode_frame(message))

    async def _receive(self) -> EngineMessage:
        """Return the next message. Raises EngineDied, with the process reaped, if there will be none."""
        try:
            while not self._bodies:
                self._bodies += self._frames.feed(await self._read())
            message: EngineMessage = self._decoder.decode(self._bodies.popleft())
        except EOFError as error:
            await self.stop()
            code = self._process.returncode if self._process is not None else None
            raise EngineDied(f"the engine process ended with code {code}") from error
        except ValueError as error:  # msgspec's too: nothing that follows can be trusted
            await self.stop()
            raise EngineDied(f"the engine process sent something that is no message: {error}") from error
        return message

    async def _read(self) -> bytes:
        assert self._reader is not None
        try:
            data = await self._reader.read(_RECEIVE_SIZE)
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return data
