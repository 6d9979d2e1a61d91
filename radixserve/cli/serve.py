"""`radixserve serve`: the HTTP server and its engine, from start to a clean stop."""

import asyncio
import logging
import signal
import socket
import sys
import time
from types import FrameType

import uvicorn
from rich.console import Console
from rich.table import Table

from radixserve.api.app import create_app
from radixserve.config import EngineConfig
from radixserve.engine.async_engine import AsyncEngine
from radixserve.errors import ConfigError, EngineDied, EngineUnavailable
from radixserve.protocol import EngineReady, TierStats

MIN_SAVE_SECONDS = 5.0

_log = logging.getLogger(__name__)


def run(config: EngineConfig) -> int:
    """Serve until a signal ends it; return the exit code. Raises ConfigError before or while loading.

    SIGTERM or Ctrl-C: new requests get 503, running ones have shutdown_timeout to end; a second signal ends them too.
    What is left of that time is for saving the cache to --kv-cache-dir.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with _listen(config.host, config.port) as listener:
        engine = AsyncEngine(config)
        return asyncio.run(_serve(engine, listener))


async def _serve(engine: AsyncEngine, listener: socket.socket) -> int:
    server = _Server(engine)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.sleep(0)  # from here on the server handles the signals
    try:
        ready = await _load(engine, serving)
        if ready is None:
            return 0
        _print_table(engine.config, ready, listener)
        dying = asyncio.create_task(engine.wait_dead())
        await asyncio.wait([serving, dying], return_when=asyncio.FIRST_COMPLETED)
        return 0 if serving.done() or server.is_draining else 1
    except EngineUnavailable:
        return 0  # a signal ended the server while it was loading
    except EngineDied as error:
        print(f"radixserve: error: {error}", file=sys.stderr)
        return 1
    finally:
        server.should_exit = True
        await serving
        await engine.close(save_timeout=server.seconds_to_save())


async def _load(engine: AsyncEngine, serving: "asyncio.Task[None]") -> EngineReady | None:
    """Start the engine; return None if the server was told to end before it was ready."""
    loading = asyncio.create_task(engine.start())
    await asyncio.wait([loading, serving], return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
        await asyncio.wait([loading])
        return None
    return loading.result()


def _listen(host: str, port: int) -> socket.socket:
    """Return a bound socket, so that a port in use is found before anything loads. Raises ConfigError."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from None
    return listener


class _Server(uvicorn.Server):
    """Uvicorn that lets running requests end, and answers 503 to new ones, before it stops listening."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(engine),
                log_config=None,
                access_log=False,
                ws="none",
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._engine = engine
        self._drain_deadline: float | None = None

    @property
    def is_draining(self) -> bool:
        """Whether a signal has told the server to end."""
        return self._drain_deadline is not None

    def seconds_to_save(self) -> float:
        """Return what is left of shutdown_timeout to save the cache in, MIN_SAVE_SECONDS at least; 0 if in a hurry."""
        if self.force_exit:
            return 0.0
        left = 0.0 if self._drain_deadline is None else self._drain_deadline - time.monotonic()
        return max(left, MIN_SAVE_SECONDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain at the first signal, end at once at the second."""
        if self.is_draining:
            self.force_exit = self.should_exit = True
            return
        timeout = self._engine.config.shutdown_timeout
        _log.info("%s: draining; running requests have %g s to end", signal.Signals(sig).name, timeout)
        self._drain_deadline = time.monotonic() + timeout
        self._engine.drain()

    async def on_tick(self, counter: int) -> bool:
        if self._drain_deadline is not None and not self.should_exit:
            is_late = time.monotonic() > self._drain_deadline
            if is_late:
                # Ends the open streams with an error, which they still send.
                await self._engine.close(save_timeout=self.seconds_to_save())
            self.should_exit = is_late or not self.server_state.tasks
        return await super().on_tick(counter)


def _print_table(config: EngineConfig, ready: EngineReady, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    num_tokens = ready.num_blocks * ready.block_size
    size = ready.num_blocks * ready.bytes_per_block / 2**30
    blocks = f"{ready.num_blocks:,} blocks of {ready.block_size}"
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in (
        ("model", f"{config.served_model_name or ready.model_name} ({ready.architecture})"),
        (
            "weights",
            f"{ready.weights_dtype}, loaded in {ready.load_seconds:.1f} s; computed in {ready.dtype} on {ready.device}",
        ),
        ("threads", str(ready.num_threads)),
        ("attention", ready.attention_backend),
        ("context", f"{ready.max_model_len:,} tokens"),
        ("K/V cache", f"{blocks} = {num_tokens:,} tokens, {size:.2f} GiB in {ready.kv_cache_dtype}"),
        *((f"{tier.name} tier", _tier_line(config, tier)) for tier in ready.stats.cache.tiers),
        *(("notice", notice) for notice in ready.notices),
        ("URL", f"{url}/v1"),
        ("try", f"radixserve chat --base-url {url}/v1"),
    ):
        table.add_row(name, value)
    Console(stderr=True, soft_wrap=True).print(table)


def _tier_line(config: EngineConfig, tier: TierStats) -> str:
    if not tier.is_on:
        return "off; the log says why"
    place = f" in {config.kv_cache_dir}" if tier.name == "disk" else ""
    return f"{tier.num_blocks:,} blocks{place}, at most {tier.capacity_bytes / 2**30:.2f} GiB"
