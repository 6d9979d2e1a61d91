"""One generating request: its prompts, the deltas of all its answers, and what they add up to."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from radixserve.api.echo import Echo
from radixserve.api.responses import PromptTokensDetails, Usage
from radixserve.api.tools import ToolUse
from radixserve.beam_search_params import BeamSearchParams
from radixserve.diagnosis.prompt import DiagnosedPrompt
from radixserve.engine.async_engine import AsyncEngine, RequestHints
from radixserve.errors import EngineUnavailable, RequestError
from radixserve.protocol import Delta, PinAt, Unpin
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.hermes import CALL_BEGIN

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine is asked for, checked: answers to each prompt, and how the caller wants them.

    namespace: see radixserve.core.namespace. is_streamed, includes_usage, returns_token_ids: the fields stream,
    stream_options.include_usage and return_token_ids. priority: the field of that name. is_chat: there is one prompt, a
    conversation, and an answer to it may come back in the next. tool_use: tools that the answers may call.
    num_prompt_logprobs: the field prompt_logprobs; params may ask for more. echoes: what the answers to each prompt
    begin with; empty unless that is wanted. pins: what to keep of each prompt; empty if there is nothing.
    diagnosed: the prompts again, if the answer is to carry diagnoses of them.
    """

    prompts: list[list[int]]
    params: SamplingParams | BeamSearchParams
    namespace: bytes
    is_streamed: bool
    includes_usage: bool
    returns_token_ids: bool
    priority: int = 0
    is_chat: bool = False
    tool_use: ToolUse | None = None
    num_prompt_logprobs: int | None = None
    echoes: tuple[Echo, ...] = ()
    pins: Sequence[list[PinAt]] = ()
    diagnosed: tuple[DiagnosedPrompt, ...] = ()

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are told of each token; None if no log-probabilities are."""
        return None if isinstance(self.params, BeamSearchParams) else self.params.logprobs


class UsageCounter:
    """Counts the tokens of a request: each prompt once, all answers."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._num_prompt_tokens = sum(map(len, prompts))
        self._num_cached_tokens: dict[int, int] = {}
        self._num_completion_tokens = 0

    def add(self, prompt_index: int, delta: Delta) -> None:
        """Count a delta of an answer to prompts[prompt_index]."""
        self._num_cached_tokens[prompt_index] = delta.num_cached_tokens
        self._num_completion_tokens += len(delta.token_ids)

    def usage(self) -> Usage:
        """Return the sums so far."""
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._num_cached_tokens.values())),
        )


async def generate(engine: AsyncEngine, generation: Generation, name: str) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield (index of the prompt, delta) until every answer is finished. Closing it aborts what is left at once.

    name: what the request is called where the cache is shown.
    Raises RequestError if any prompt's request fails; the others are aborted, and what was pinned for them is not.
    """
    streams = [
        engine.generate(
            prompt,
            generation.params,
            namespace=generation.namespace,
            priority=generation.priority,
            hints=RequestHints(None if generation.tool_use is None else CALL_BEGIN, name),
            pins=generation.pins[index] if generation.pins else [],
        )
        for index, prompt in enumerate(generation.prompts)
    ]
    if len(streams) == 1:
        async with aclosing(streams[0]) as deltas:
            async for delta in deltas:
                yield 0, delta
    else:
        try:
            async with aclosing(_merge(streams)) as pairs:
                async for pair in pairs:
                    yield pair
        except RequestError:
            # By now all are aborted, so that none makes a pin later.
            for pin in chain.from_iterable(generation.pins):
                with suppress(EngineUnavailable):
                    await engine.control(Unpin(pin.pin_id, None))
            raise


class _Ended:
    """A stream of _merge is at its end."""


async def _merge(streams: Iterable[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the stream, item) as items come; the first error ends all streams."""
    # Unbounded, but it cannot hold more than the answers' tokens.
    queue: asyncio.Queue[tuple[int, T | _Ended | Exception]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((index, item))
            queue.put_nowait((index, _Ended()))
        except Exception as error:
            queue.put_nowait((index, error))

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, _Ended):
                num_open -= 1
            else:
                yield index, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)
