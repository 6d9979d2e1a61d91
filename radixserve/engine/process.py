"""The engine process: one thread that drains its socket, computes a step, and sends what the step produced.

Started by ProcessClient as `python -m radixserve.engine.process FD`. The first frame on the socket is StartEngine. The
process ends when the other end of the socket is closed, so it never outlives the server.
"""

import gc
import logging
import select
import signal
import socket
import sys
import time
from array import array

import msgspec

from radixserve.engine.core import EngineCore
from radixserve.engine.frames import FrameReader, encode_frame
from radixserve.engine.start import start_engine
from radixserve.errors import ConfigError
from radixserve.protocol import (
    Abort,
    AddRequest,
    ClientMessage,
    Control,
    ControlReply,
    EngineFailed,
    EngineMessage,
    StartEngine,
    StepOutput,
)

_RECEIVE_SIZE = 1 << 18
# Objects that can be part of a cycle, made and not freed since the last collection: beyond the first number a pause is
# used to collect, beyond the second a step has to wait for it. A request leaves some 20, most of them in the cache.
_NEW_OBJECTS_IN_A_PAUSE = 10_000
_NEW_OBJECTS_AT_MOST = 200_000

_log = logging.getLogger(__name__)
_decoder = msgspec.msgpack.Decoder(ClientMessage)


class Connection:
    """The engine's end of the socket. Sending never waits; reading waits only when asked to."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._reader = FrameReader()
        self._unsent = bytearray()

    def send(self, message: EngineMessage) -> None:
        """Send a message as far as the socket takes it now; the rest goes with the next exchange."""
        self._unsent += encode_frame(message)
        self._send_some()

    def exchange(self, *, wait: bool, timeout: float | None = None) -> list[bytes]:
        """Return the message bodies that have arrived; with wait, sleep until there is at least something to read.

        timeout: seconds after which that sleep ends with nothing; None for never.
        Raises EOFError when the other end is closed.
        """
        bodies: list[bytes] = []
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._send_some()
            bodies += self._receive_some()
            remaining = None if deadline is None else deadline - time.monotonic()
            if bodies or not wait or (remaining is not None and remaining <= 0):
                return bodies
            select.select([self._socket], [self._socket] if self._unsent else [], [], remaining)

    def _send_some(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                raise EOFError from error
            del self._unsent[:sent]

    def _receive_some(self) -> list[bytes]:
        bodies: list[bytes] = []
        while True:
            try:
                data = self._socket.recv(_RECEIVE_SIZE)
            except BlockingIOError:
                return bodies
            except OSError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            bodies += self._reader.feed(data)


def run(connection: Connection) -> None:
    """Start the engine that the first message describes and serve it until the other end hangs up."""
    first, *rest = connection.exchange(wait=True)
    message = msgspec.msgpack.decode(first, type=StartEngine)
    config = message.config
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        prefixes = [array("i", packed) for packed in message.public_prefixes]
        started = start_engine(config, public_prefixes=prefixes, show_progress=True)
    except ConfigError as error:
        connection.send(EngineFailed(str(error), is_config_error=True))
        connection.exchange(wait=True)
        return
    connection.send(started.ready)
    # What is alive now stays alive: later collections need not look at it. They come between steps from now on.
    gc.freeze()
    gc.disable()
    try:
        _serve(connection, started.core, rest)
    finally:
        started.core.close()


def _serve(connection: Connection, core: EngineCore, bodies: list[bytes]) -> None:
    while True:
        for body in bodies:
            _handle(connection, core, _decoder.decode(body))
        if core.has_work:
            connection.send(core.step())
        is_idle = not core.has_work
        collect_garbage(is_idle=is_idle)
        bodies = connection.exchange(wait=is_idle, timeout=core.seconds_until_wake() if is_idle else None)


def collect_garbage(*, is_idle: bool) -> None:
    """Collect garbage if there may be much of it; sooner if nobody waits for the engine.

    Takes some 1.5 ms for each 10,000 objects that are alive. Requests leave no cycles, so there is little to find:
    what errors leave, mostly.
    """
    if gc.get_count()[0] > (_NEW_OBJECTS_IN_A_PAUSE if is_idle else _NEW_OBJECTS_AT_MOST):
        gc.collect()


def _handle(connection: Connection, core: EngineCore, message: ClientMessage) -> None:
    match message:
        case AddRequest():
            core.add(message)
        case Abort(request_ids):
            core.abort(request_ids)
        case Control(call_id, command):
            reply = core.control(command)
            # The figures first: whoever has the reply, and looks at them, finds what the command did.
            connection.send(StepOutput([], core.stats()))
            connection.send(ControlReply(call_id, reply))


def main() -> None:
    """Serve the socket whose file descriptor is the first argument."""
    # A Ctrl-C or a stop of the whole group reaches the server too, which drains and then closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        run(Connection(socket.socket(fileno=int(sys.argv[1]))))
    except EOFError:
        _log.debug("the server is gone; the engine ends")


if __name__ == "__main__":
    main()
