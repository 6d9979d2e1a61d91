"""An engine in this process, for offline use, tests and the debugger."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from radixserve.config import EngineConfig
from radixserve.engine.async_engine import AsyncEngine, load_public_prefixes, load_tokenizer
from radixserve.engine.start import StartedEngine, start_engine
from radixserve.errors import EngineUnavailable
from radixserve.protocol import AddRequest, ControlCommand, ControlResult, EngineReady, StepOutput


def in_process_engine(config: EngineConfig, *, show_progress: bool = False) -> AsyncEngine:
    """Return an AsyncEngine whose model will be loaded in this process. Raises ConfigError."""
    tokenizer = load_tokenizer(config)
    prefixes = load_public_prefixes(config, tokenizer)
    start = partial(start_engine, config, tokenizer, public_prefixes=prefixes, show_progress=show_progress)
    return AsyncEngine(config, lambda _: InProcessClient(start), tokenizer=tokenizer)


class InProcessClient:
    """An EngineClient whose steps run in the caller's event loop, and hold it up.

    start_engine loads the engine; it runs in a worker thread.
    """

    def __init__(self, start_engine: Callable[[], StartedEngine]) -> None:
        self._start_engine = start_engine
        self._engine: StartedEngine | None = None
        self._has_news = asyncio.Event()

    async def start(self) -> EngineReady:
        # A thread of its own, so that it ends and OpenMP's threads with it: beside those of the thread that steps they
        # would be more than there are cores, and each would be put to sleep and woken in every parallel region.
        loader = ThreadPoolExecutor(max_workers=1)
        try:
            self._engine = await asyncio.get_running_loop().run_in_executor(loader, self._start_engine)
        finally:
            loader.shutdown(wait=False)
        return self._engine.ready

    def add(self, request: AddRequest) -> None:
        self._started.core.add(request)
        self._has_news.set()

    def abort(self, request_ids: list[str]) -> None:
        if self._engine is not None:
            self._engine.core.abort(request_ids)
            self._has_news.set()

    async def outputs(self) -> StepOutput:
        core = self._started.core
        while not core.has_work:
            self._has_news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(core.seconds_until_wake()):
                    await self._has_news.wait()
        await asyncio.sleep(0)  # let readers of the last step run before this one holds up the loop
        return core.step()

    async def control(self, command: ControlCommand) -> ControlResult:
        result = self._started.core.control(command)
        self._has_news.set()
        return result

    async def stop(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await asyncio.to_thread(engine.core.close)

    @property
    def _started(self) -> StartedEngine:
        if self._engine is None:
            raise EngineUnavailable("the engine is not running")
        return self._engine
