"""Streams of an AsyncEngine: what a reader gets, and what is left when it goes away."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from radixserve.beam_search_params import BeamSearchParams
from radixserve.config import EngineConfig
from radixserve.engine import async_engine
from radixserve.engine.answer import GenerationResult
from radixserve.engine.async_engine import AsyncEngine
from radixserve.engine.in_process import InProcessClient
from radixserve.engine.start import StartedEngine
from radixserve.errors import (
    EngineUnavailable,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    RequestTimeout,
)
from radixserve.protocol import EngineReady, ResetCache, StepOutput
from radixserve.sampling_params import SamplingParams
from tests.stub import always, counting
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400)
SHORT = SamplingParams(temperature=0.0, max_tokens=4)


@asynccontextmanager
async def running(engine: AsyncEngine) -> AsyncIterator[AsyncEngine]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def collect(engine: AsyncEngine, prompt: list[int] | str, params: SamplingParams) -> GenerationResult:
    result = GenerationResult.empty(list(prompt) if not isinstance(prompt, str) else [], params.n)
    async for delta in engine.generate(prompt, params):
        result.add(delta)
    return result


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def is_idle(engine: AsyncEngine) -> bool:
    stats = engine.stats
    return stats.num_running == stats.num_waiting == stats.cache.num_in_use_blocks == 0


async def test_concurrent_requests_get_their_own_answers(tokenizer) -> None:
    async with running(stub_engine(tokenizer, counting(200))) as engine:
        alone = [await collect(engine, [i, i + 1, 5], SHORT) for i in range(10)]
        together = await asyncio.gather(*(collect(engine, [i, i + 1, 5], SHORT) for i in range(10)))
        assert [result.answers for result in together] == [result.answers for result in alone]
        text = await collect(engine, "ab", SHORT)
        assert text.answers == (await collect(engine, [97, 98], SHORT)).answers


async def test_generate_starts_an_engine_that_was_not_started(tokenizer) -> None:
    engine = stub_engine(tokenizer, always(65))
    assert (await collect(engine, "x", SHORT)).answers[0].text == "AAAA"
    await engine.close()


async def test_callers_that_come_together_share_one_load(tokenizer) -> None:
    num_loads = 0

    class Counting(InProcessClient):
        async def start(self) -> EngineReady:
            nonlocal num_loads
            num_loads += 1
            return await super().start()

    engine = stub_engine(tokenizer, always(65), make_client=Counting)
    first = asyncio.create_task(collect(engine, "x", SHORT))
    others = [asyncio.create_task(collect(engine, "x", SHORT)) for _ in range(3)]
    await until(lambda: engine.status == "loading")
    first.cancel()
    assert [result.answers[0].text for result in await asyncio.gather(*others)] == ["AAAA"] * 3
    assert num_loads == 1
    await engine.close()


async def test_the_thread_that_loads_an_engine_in_this_process_ends(tokenizer) -> None:
    loaders: list[threading.Thread] = []

    def make_client(start: Callable[[], StartedEngine]) -> InProcessClient:
        def start_here() -> StartedEngine:
            loaders.append(threading.current_thread())
            return start()

        return InProcessClient(start_here)

    async with running(stub_engine(tokenizer, always(65), make_client=make_client)):
        assert loaders[0] is not threading.current_thread()
        await until(lambda: not loaders[0].is_alive())


async def test_closing_ends_a_load(tokenizer) -> None:
    class Endless(InProcessClient):
        async def start(self) -> EngineReady:
            await asyncio.Event().wait()
            raise AssertionError

    engine = stub_engine(tokenizer, always(65), make_client=Endless)
    starting = asyncio.create_task(engine.start())
    await until(lambda: engine.status == "loading")
    await engine.close()
    await asyncio.wait([starting], timeout=5)
    assert isinstance(starting.exception(), EngineUnavailable)
    assert engine.status == "dead"


async def test_any_failure_of_the_client_is_a_death_and_leaves_no_reader_waiting(tokenizer) -> None:
    class Failing(InProcessClient):
        """Fails once it has told of a first step, and in the second start; then it works."""

        num_started = 0

        async def start(self) -> EngineReady:
            Failing.num_started += 1
            if Failing.num_started == 2:
                raise OSError("no process left")
            self.num_outputs = 0
            return await super().start()

        async def outputs(self) -> StepOutput:
            output = await super().outputs()
            self.num_outputs += 1
            if Failing.num_started == 1 and self.num_outputs > 1:
                raise KeyError("a bug")
            return output

    async with running(stub_engine(tokenizer, always(65), make_client=Failing)) as engine:
        async with asyncio.timeout(5):
            with pytest.raises(RequestFailed):
                await collect(engine, [1], ENDLESS)
            await until(lambda: engine.ready is not None)
            assert (await collect(engine, [1], SHORT)).num_output_tokens == 4


async def test_an_engine_that_begins_to_drain_while_a_text_is_encoded_refuses_it(tokenizer) -> None:
    async with running(stub_engine(tokenizer, always(65))) as engine:
        reader = asyncio.create_task(collect(engine, "x", SHORT))
        await asyncio.sleep(0)
        engine.drain()
        with pytest.raises(EngineUnavailable):
            await reader


async def test_a_reader_that_leaves_frees_every_block(tokenizer) -> None:
    async with running(stub_engine(tokenizer, always(65))) as engine:
        async with aclosing(engine.generate([1] * 40, ENDLESS)) as deltas:
            async for delta in deltas:
                if delta.token_ids:
                    break
        await until(lambda: is_idle(engine))


async def test_a_cancelled_reader_frees_every_block(tokenizer) -> None:
    async with running(stub_engine(tokenizer, always(65))) as engine:
        reader = asyncio.create_task(collect(engine, [1] * 40, ENDLESS))
        await until(lambda: engine.stats.num_running == 1)
        reader.cancel()
        await until(lambda: is_idle(engine))


async def test_a_reader_that_stops_reading_is_ended(tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(stub_engine(tokenizer, always(65))) as engine:
        deltas = engine.generate([1] * 40, ENDLESS)
        await anext(deltas)
        monkeypatch.setattr(async_engine, "MAX_READER_DELAY", 0.0)
        await until(lambda: is_idle(engine))
        with pytest.raises(RequestFailed, match="nobody read"):
            await anext(deltas)


async def test_a_finished_answer_waits_for_a_slow_reader(tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(stub_engine(tokenizer, always(65))) as engine:
        deltas = engine.generate([1] * 40, SHORT)
        await anext(deltas)
        await until(lambda: is_idle(engine))
        monkeypatch.setattr(async_engine, "MAX_READER_DELAY", 0.0)
        await engine.control(ResetCache())
        await until(lambda: engine.stats.cache.num_cached_blocks == 0)
        assert [delta.token_ids async for delta in deltas] == [[65]] * 3


async def test_a_request_over_the_time_limit_ends_with_an_error(tokenizer) -> None:
    config = EngineConfig(request_timeout=0.05)
    async with running(stub_engine(tokenizer, always(65), config=config, max_model_len=4096, num_blocks=300)) as engine:
        with pytest.raises(RequestTimeout):
            await collect(engine, [1], SamplingParams(temperature=0.0, max_tokens=4000))
        await until(lambda: is_idle(engine))


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], InvalidRequest),
        ([1] * 512, PromptTooLong),
        ([1] * 2000, PromptTooLong),
        ([-1], InvalidRequest),
        ([259], InvalidRequest),
    ],
)
async def test_a_prompt_that_cannot_be_answered_is_refused(tokenizer, prompt: list[int], error: type) -> None:
    async with running(stub_engine(tokenizer, always(65))) as engine:
        with pytest.raises(error):
            await collect(engine, prompt, SHORT)
        assert (await collect(engine, [258] + [1] * 510, SHORT)).answers[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("field", "value"), [("logit_bias", {259: 1.0}), ("logit_bias", {-1: 1.0}), ("stop_token_ids", (259,)), ("n", 65)]
)
async def test_params_that_the_engine_cannot_follow_are_refused_by_name(tokenizer, field: str, value: object) -> None:
    async with running(stub_engine(tokenizer, always(65))) as engine:
        with pytest.raises(InvalidRequest) as caught:
            await collect(engine, [1], SamplingParams(**{field: value}))
        assert caught.value.param == field


async def test_a_full_queue_raises(tokenizer) -> None:
    config = EngineConfig(max_num_seqs=1, max_queued_requests=1)
    async with running(stub_engine(tokenizer, always(65), config=config)) as engine:
        outcomes = await asyncio.gather(*(collect(engine, [i], SHORT) for i in range(4)), return_exceptions=True)
        assert sum(isinstance(outcome, QueueFull) for outcome in outcomes) == 3


async def test_a_draining_engine_ends_what_runs_and_takes_no_more(tokenizer) -> None:
    async with running(stub_engine(tokenizer, always(65))) as engine:
        reader = asyncio.create_task(collect(engine, [1], SHORT))
        await until(lambda: engine.stats.num_running == 1)
        engine.drain()
        with pytest.raises(EngineUnavailable, match="draining"):
            await collect(engine, [1], SHORT)
        assert (await reader).answers[0].finish_reason == "length"


async def test_closing_ends_open_streams_with_an_error(tokenizer) -> None:
    async with running(stub_engine(tokenizer, always(65))) as engine:
        reader = asyncio.create_task(collect(engine, [1], ENDLESS))
        await until(lambda: engine.stats.num_running == 1)
        await engine.close()
        with pytest.raises(EngineUnavailable):
            await reader


async def test_a_reset_says_what_it_dropped(tokenizer) -> None:
    async with running(stub_engine(tokenizer, always(65))) as engine:
        await collect(engine, [1] * 40, SHORT)
        reply = await engine.control(ResetCache())
        assert reply.num_dropped_blocks == 3
        assert reply.num_kept_blocks == 0
        await until(lambda: engine.stats.cache.num_free_blocks == 64)


async def test_a_beam_search_is_silent_until_its_end_and_is_not_taken_for_abandoned(
    tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "MAX_READER_DELAY", 0.0)
    params = BeamSearchParams(beam_width=3, n=2, max_tokens=30, ignore_eos=True)
    async with running(stub_engine(tokenizer, counting(200))) as engine:
        deltas = [delta async for delta in engine.generate([1] * 40, params)]
        assert [delta.index for delta in deltas] == [0, 1]
        assert deltas[0].beam.score >= deltas[1].beam.score
        assert deltas[0].beam_memory == deltas[1].beam_memory
        await until(lambda: is_idle(engine))


async def test_a_beam_search_whose_reader_leaves_frees_every_block(tokenizer) -> None:
    params = BeamSearchParams(beam_width=3, ignore_eos=True)
    async with running(stub_engine(tokenizer, counting(200))) as engine:
        reader = asyncio.create_task(anext(engine.generate([1] * 40, params)))
        await until(lambda: engine.stats.num_running == 3)
        reader.cancel()
        await until(lambda: is_idle(engine))


async def test_a_beam_search_is_checked_against_the_vocabulary(tokenizer) -> None:
    async with running(stub_engine(tokenizer, counting(200))) as engine:
        for field in ({"logit_bias": {999: 1.0}}, {"stop_token_ids": (999,)}):
            with pytest.raises(InvalidRequest, match="999"):
                await anext(engine.generate([1], BeamSearchParams(beam_width=2, **field)))
        with pytest.raises(InvalidRequest, match="beam_width is 128"):
            await anext(engine.generate([1], BeamSearchParams(beam_width=128)))
