"""The engine as an asyncio program sees it: streams of deltas, and an engine that comes back when it dies."""

import asyncio
import itertools
import logging
import time
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from radixserve.beam_search_params import BeamSearchParams
from radixserve.config import EngineConfig
from radixserve.engine.client import EngineClient, ProcessClient
from radixserve.errors import (
    EngineUnavailable,
    InvalidRequest,
    PinBudgetExceeded,
    PromptTooLong,
    QueueFull,
    RadixServeError,
    RequestError,
    RequestFailed,
    RequestTimeout,
)
from radixserve.model_path import resolve_model_path
from radixserve.protocol import (
    AddRequest,
    ControlCommand,
    ControlResult,
    Delta,
    EngineReady,
    EngineStats,
    Failure,
    PinAt,
    SaveCache,
    SaveProgress,
)
from radixserve.sampling_params import MAX_INTEGER, SamplingParams, check_integer
from radixserve.tokenizer.public_prefixes import read_public_prefixes
from radixserve.tokenizer.tokenizer import Tokenizer

EngineStatus = Literal["new", "loading", "ready", "restarting", "dead"]

# A client that reads nothing for so long while its answer grows is taken for gone.
MAX_READER_DELAY = 10.0
MAX_DEATHS = 3
DEATHS_WINDOW = 300.0
SAVE_POLL_SECONDS = 0.02

_log = logging.getLogger(__name__)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """Load the tokenizer of the configured model. Raises ConfigError."""
    template = None if config.chat_template is None else Path(config.chat_template)
    return Tokenizer.load(resolve_model_path(config.model), chat_template=template)


def load_public_prefixes(config: EngineConfig, tokenizer: Tokenizer) -> "list[array[int]]":
    """Return the token ids of the configured public prefixes, whole blocks each. Raises ConfigError."""
    if config.public_prefixes is None:
        return []
    return read_public_prefixes(Path(config.public_prefixes), tokenizer, config.block_size)


class _Stream:
    """What one request's reader has not read yet, and the error that ended the request, if one did."""

    def __init__(self, num_answers: int) -> None:
        self._num_unfinished = num_answers
        self._deltas: deque[Delta] = deque()
        self._error: RequestError | None = None
        self._arrived = asyncio.Event()
        self._unread_since = 0.0

    def put(self, delta: Delta) -> None:
        if not self._deltas:
            self._unread_since = time.monotonic()
        self._deltas.append(delta)
        self._num_unfinished -= delta.finish_reason is not None
        self._arrived.set()

    def fail(self, error: RequestError) -> None:
        """Give the reader this error, and nothing that came before it."""
        self._error = error
        self._deltas.clear()
        self._arrived.set()

    async def get(self) -> Delta:
        while not self._deltas and self._error is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._error is not None:
            raise self._error
        self._unread_since = time.monotonic()
        return self._deltas.popleft()

    def is_abandoned(self, now: float) -> bool:
        """Whether answers grow that nobody reads. What is finished costs the engine nothing and can wait."""
        is_growing = self._num_unfinished > 0 and bool(self._deltas)
        return is_growing and now - self._unread_since > MAX_READER_DELAY


class RequestHints(NamedTuple):
    """What is known of a request and changes no answer.

    tool_call_begin: the text by which an answer's call of a tool begins; how long K/V of the request are likely to stay
    cached depends on it. name: what name_of tells of it while it runs.
    """

    tool_call_begin: str | None = None
    name: str | None = None


NO_HINTS = RequestHints()


class AsyncEngine:
    """An engine for many concurrent callers in one event loop.

    start() loads it, or the first generate() does; calls of generate() wait for that. When its process dies, open
    streams end with RequestFailed, the engine is started again, and calls in between raise EngineUnavailable; after
    three deaths in five minutes it stays down. Lost requests are not sent again.

    make_client: makes the engine behind this one, anew after each death; left out, one in a process of its own.
    tokenizer: the model's, if it is loaded. Raises ConfigError.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_client: Callable[[EngineConfig], EngineClient] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer or load_tokenizer(config)
        self.status: EngineStatus = "new"
        self.stats: EngineStats | None = None
        if make_client is None:
            # Read once: an engine that is started again has the same prefixes, whatever has become of the file.
            make_client = partial(ProcessClient, public_prefixes=load_public_prefixes(config, self.tokenizer))
        self._make_client = make_client
        self._client: EngineClient | None = None
        self._is_draining = False
        self._ready: EngineReady | None = None
        self._loading: asyncio.Task[EngineReady] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._streams: dict[str, _Stream] = {}
        self._names: dict[str, str] = {}
        self._request_ids = itertools.count()
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)

    @property
    def ready(self) -> EngineReady | None:
        """What the engine said of itself when it was loaded; None while it takes no requests."""
        return self._ready if self.status == "ready" and not self._is_draining else None

    async def start(self) -> EngineReady:
        """Load the engine and return what it says of itself. Raises ConfigError, EngineDied, or EngineUnavailable.

        Calls that come together share one load. It goes on when one of them is cancelled; close() ends it.
        """
        if self._loading is None:
            self.status = "loading"
            self._loading = asyncio.create_task(self._load())
        try:
            return await asyncio.shield(self._loading)
        except asyncio.CancelledError:
            if self._loading.cancelled():
                raise EngineUnavailable("the engine was closed while it was loading") from None
            raise

    async def wait_dead(self) -> None:
        """Return when the engine has died too often to be started again."""
        assert self._supervisor is not None
        await asyncio.wait([self._supervisor])

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        self._is_draining = True

    async def save_cache(self) -> SaveProgress:
        """Write what is cached to the tiers, and return how that ended. Raises EngineUnavailable."""
        command = SaveCache()
        while True:
            if self.status != "ready" or self._client is None:
                raise self._unavailable()
            progress = await self._client.control(command)
            assert isinstance(progress, SaveProgress)
            if progress.is_done:
                return progress
            await asyncio.sleep(SAVE_POLL_SECONDS)
            command = SaveCache(begins=False)

    async def close(self, *, save_timeout: float | None = None) -> None:
        """End all requests, with an error to their readers, and the engine.

        save_timeout: what saving the cache to a disk, if there is one, may take; None: the setting's shutdown_timeout.
        """
        self.drain()
        self._fail_streams(EngineUnavailable("the server is shutting down"))
        await self._save_for_the_next_start(self.config.shutdown_timeout if save_timeout is None else save_timeout)
        for task in (self._loading, self._supervisor):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        self.status = "dead"
        self._fail_streams(EngineUnavailable("the server is shutting down"))
        if self._client is not None:
            await self._client.stop()

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        namespace: bytes = b"",
        priority: int = 0,
        hints: RequestHints = NO_HINTS,
        pins: Sequence[PinAt] = (),
    ) -> AsyncGenerator[Delta, None]:
        """Yield what each step adds to the answers, interleaved, until all params.num_returned have a finish_reason.

        A beam search yields nothing until it ends, and then one Delta for each answer.

        priority: lower starts first; other than 0 only under the schedule policy of that name.
        hints: what is known of the request that changes no answer. pins: what of the prompt is to stay cached for some
        time.
        Raises a RequestError: most before the first Delta, RequestFailed or RequestTimeout after it too. Closing the
        generator, or cancelling its reader, ends the request in the engine and frees its blocks.
        """
        if self.status in ("new", "loading"):
            await self.start()
        token_ids = await asyncio.to_thread(self.tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
        # Only now: the engine may have died, or begun to drain, while the text was encoded.
        ready, client = self.ready, self._client
        if ready is None or client is None:
            raise self._unavailable()
        self._check_prompt(ready, token_ids)
        self._check_params(ready, params)
        self._check_priority(priority)
        request_id = str(next(self._request_ids))
        stream = self._streams[request_id] = _Stream(params.num_returned)
        timeout = self.config.request_timeout
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        num_unfinished = params.num_returned
        if hints.name is not None:
            self._names[request_id] = hints.name
        try:
            packed_ids = array("i", token_ids).tobytes()
            pins = list(pins)
            client.add(AddRequest(request_id, packed_ids, params, namespace, priority, hints.tool_call_begin, pins))
            while num_unfinished > 0:
                try:
                    async with asyncio.timeout_at(deadline):
                        delta = await stream.get()
                except TimeoutError:
                    raise RequestTimeout(f"the request ran longer than the server's limit of {timeout:g} s") from None
                num_unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            del self._streams[request_id]
            self._names.pop(request_id, None)
            if num_unfinished > 0 and client is self._client and self.status == "ready":
                client.abort([request_id])

    def name_of(self, request_id: str) -> str | None:
        """Return the name of a running request, by the id that the engine tells; None if it has none, or has ended."""
        return self._names.get(request_id)

    async def control(self, command: ControlCommand) -> ControlResult:
        """Run a command between two steps. Raises EngineUnavailable."""
        if self.ready is None or self._client is None:
            raise self._unavailable()
        return await self._client.control(command)

    async def _save_for_the_next_start(self, timeout: float) -> None:
        if self.config.kv_cache_dir is None or self.status != "ready":
            return
        try:
            async with asyncio.timeout(timeout):
                progress = await self.save_cache()
        except TimeoutError:
            _log.warning("there was no time to save all of the cache: %g s", timeout)
        except EngineUnavailable as error:
            _log.warning("the cache was not saved: %s", error)
        else:
            if progress.error is not None:
                # The store has warned when that came about.
                _log.info("the cache was not saved: %s", progress.error)

    def _unavailable(self) -> EngineUnavailable:
        status = "draining" if self._is_draining else self.status
        return EngineUnavailable(f"the engine is {status}; try again in a few seconds")

    def _check_prompt(self, ready: EngineReady, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if len(token_ids) >= ready.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(token_ids)} tokens; the context of {ready.max_model_len} tokens must leave room "
                "for at least one more; shorten the prompt",
                param="prompt",
            )
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < ready.vocab_size:
                raise InvalidRequest(f"token id {token_id} is not in 0 to {ready.vocab_size - 1}", param="prompt")

    def _check_params(self, ready: EngineReady, params: SamplingParams | BeamSearchParams) -> None:
        allowed = params.allowed_token_ids if isinstance(params, SamplingParams) else None
        named = {
            "logit_bias": params.logit_bias,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": allowed or (),
        }
        for name, token_ids in named.items():
            for token_id in token_ids:
                if not 0 <= token_id < ready.vocab_size:
                    raise InvalidRequest(
                        f"{name} names token {token_id}; token ids are 0 to {ready.vocab_size - 1}", param=name
                    )

    def _check_priority(self, priority: int) -> None:
        policy = self.config.schedule_policy
        if priority != 0 and policy != "priority":
            raise InvalidRequest(
                f"priority is {priority}, and this server's schedule policy is {policy}; leave it out, or start the "
                "server with --schedule-policy priority",
                param="priority",
            )
        check_integer("priority", priority, -MAX_INTEGER - 1, MAX_INTEGER)

    async def _load(self) -> EngineReady:
        try:
            ready = await self._start_client()
        except BaseException:
            self.status = "dead"
            raise
        self._supervisor = asyncio.create_task(self._supervise())
        return ready

    async def _start_client(self) -> EngineReady:
        self._client = self._make_client(self.config)
        self._ready = await self._client.start()
        self.stats = self._ready.stats
        self.status = "ready"
        return self._ready

    async def _supervise(self) -> None:
        while True:
            try:
                await self._read_outputs()
            # Any error, of a client in this process too: if the supervisor ended, every reader would wait for ever.
            except Exception as death:
                await self._bury(death)
            while self.status == "restarting":
                if len(self._deaths) == MAX_DEATHS and self._deaths[-1] - self._deaths[0] < DEATHS_WINDOW:
                    _log.critical("the engine died %d times in %d s; giving up", MAX_DEATHS, DEATHS_WINDOW)
                    self.status = "dead"
                    return
                try:
                    await self._start_client()
                except Exception as death:
                    _log.error("the engine could not be started again: %s", death, exc_info=_unexpected(death))
                    self._deaths.append(time.monotonic())

    async def _bury(self, death: Exception) -> None:
        """End all requests of an engine that is gone, and what is left of it."""
        self.status = "restarting"
        self._deaths.append(time.monotonic())
        _log.error("%s; %d requests are lost", death, len(self._streams), exc_info=_unexpected(death))
        self._fail_streams(RequestFailed("the engine ended unexpectedly; send the request again"))
        assert self._client is not None
        await self._client.stop()

    async def _read_outputs(self) -> None:
        assert self._client is not None
        while True:
            output = await self._client.outputs()
            self.stats = output.stats
            for delta in output.deltas:
                stream = self._streams.get(delta.request_id)
                if stream is None:
                    continue  # its reader has gone; the abort is on its way
                if delta.failure is None:
                    stream.put(delta)
                else:
                    stream.fail(_error_of(delta.failure))
            self._drop_abandoned_streams(self._client)

    def _drop_abandoned_streams(self, client: EngineClient) -> None:
        now = time.monotonic()
        abandoned = [request_id for request_id, stream in self._streams.items() if stream.is_abandoned(now)]
        if abandoned:
            client.abort(abandoned)
            for request_id in abandoned:
                self._streams[request_id].fail(RequestFailed(f"nobody read the answer for {MAX_READER_DELAY:g} s"))

    def _fail_streams(self, error: RequestError) -> None:
        for stream in self._streams.values():
            stream.fail(error)


def _unexpected(error: Exception) -> Exception | None:
    """Return an error whose traceback belongs in the log: one that no client raises on purpose."""
    return None if isinstance(error, RadixServeError) else error


def _error_of(failure: Failure) -> RequestError:
    kinds: dict[str, type[RequestError]] = {
        "invalid_request": InvalidRequest,
        "queue_full": QueueFull,
        "pin_budget": PinBudgetExceeded,
        "internal_error": RequestFailed,
    }
    return kinds[failure.kind](failure.message, param=failure.param)
