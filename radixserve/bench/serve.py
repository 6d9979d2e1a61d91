"""Run a workload against a server."""

import asyncio
import datetime
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from radixserve.bench.beams import beam_fields, check_beam_search, measure_beams
from radixserve.bench.client import RequestRecord, measure, stream_chat
from radixserve.bench.message import Message, as_json
from radixserve.bench.report import Environment, Repeat, Report, make_repeat, summarize
from radixserve.bench.server import Server
from radixserve.bench.text import approximate_text, exact_text
from radixserve.bench.workloads import Session, Workload, build_sessions
from radixserve.errors import ServerCallFailed
from radixserve.version import __version__

_WARM_UP_TOKENS = 8
# Ends the request that brings a history in, as a chat template wants a user's message last.
_HISTORY_END = Message("user", "Go on.")
# Statuses by which a server says that it does not take a field.
_REFUSALS = (400, 422)
# Ways to fix the length of an answer: that of radixserve, vLLM and llama.cpp, that of transformers serve, and none.
LengthField = Literal["ignore_eos", "generation_config"]
_LENGTH_FIELDS: tuple[LengthField | None, ...] = ("ignore_eos", "generation_config", None)


class Abilities(msgspec.Struct, frozen=True):
    """Which fields beyond OpenAI's oldest the server takes, and whether it counts tokens.

    length_field: the one that makes an answer as long as asked; None if it takes none of them.
    """

    length_field: LengthField | None
    takes_stream_options: bool
    has_tokenize: bool = False

    def fields(self, output_tokens: int, *, is_streamed: bool) -> dict[str, Any]:
        """Return the fields that ask for output_tokens tokens, and for the usage, which only a stream must be asked."""
        fields: dict[str, Any] = {"max_tokens": output_tokens}
        if self.length_field == "ignore_eos":
            fields["ignore_eos"] = True
        elif self.length_field == "generation_config":
            lengths = {"min_new_tokens": output_tokens, "max_new_tokens": output_tokens}
            fields["generation_config"] = msgspec.json.encode(lengths).decode()
        if is_streamed and self.takes_stream_options:
            fields["stream_options"] = {"include_usage": True}
        return fields

    def notes(self, records: list[RequestRecord], workload: Workload) -> list[str]:
        """Return what a reader of the figures must know, a sentence each."""
        notes = []
        if not self.has_tokenize:
            notes.append("The server has no /tokenize: prompt lengths follow the rule of one token a word.")
        if self.length_field is None:
            notes.append("The server takes no field that fixes the length of an answer.")
        completed = [record for record in records if record.error is None]
        if not all(record.has_usage for record in completed):
            notes.append("The server reports no usage in streams: output tokens are counted as chunks with text.")
        elif not all(record.cached_tokens is not None for record in completed):
            notes.append("The server does not report cached tokens.")
        length = workload.tokens_per_request
        num_short = sum(record.output_tokens < length for record in completed)
        if num_short:
            notes.append(f"{num_short} of {len(completed)} answers are shorter than {length} tokens.")
        return notes


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. Each repeat has prompts of its own, unless same_prompts.

    model: None takes the first one that the server lists.
    """

    workload: Workload
    seed: int
    model: str | None = None
    num_repeats: int = 1
    same_prompts: bool = False


class Progress(Protocol):
    """A progress bar over output tokens, such as tqdm's."""

    def reset(self, total: float | None = None) -> None:
        """Begin to count, up to total."""

    def update(self, n: float | None = 1) -> object:
        """Count n more."""


class NoProgress:
    """A progress bar that nobody sees."""

    def reset(self, total: float | None = None) -> None:
        pass

    def update(self, n: float | None = 1) -> None:
        pass


async def run_benchmark(server: Server, plan: Plan, progress: Progress) -> Report:
    """Run the plan and report on it.

    Raises ServerCallFailed if the server cannot be reached or refuses even the warm-up or a history, NoBeamSearch if
    the workload is one of beam searches and it has none; later failures are counted.
    """
    workload = plan.workload
    model = plan.model or await server.first_model()
    environment = describe_environment()
    abilities = await find_abilities(server, model)
    session_runner = _SessionRunner(server, model, abilities, workload.beam_width, progress)
    await session_runner.check()

    async def write_text(key: str, num_tokens: int) -> str:
        if not abilities.has_tokenize:
            return approximate_text(key, num_tokens)
        return await exact_text(key, num_tokens, lambda text: count_tokens(server, model, text))

    keys = [f"{plan.seed}/{0 if plan.same_prompts else repeat}" for repeat in range(plan.num_repeats)]
    plans = [await build_sessions(workload, key, write_text) for key in keys]
    progress.reset(plan.num_repeats * workload.num_requests * workload.tokens_per_request)
    repeats: list[Repeat] = []
    all_records: list[RequestRecord] = []
    for sessions in plans:
        await session_runner.bring_in_histories(sessions)
        started = time.perf_counter()
        records = await session_runner.run_all(sessions, workload.concurrency)
        repeats.append(make_repeat(records, workload.num_requests, time.perf_counter() - started))
        all_records += records
    failures = list(dict.fromkeys(record.error for record in all_records if record.error is not None))
    return Report(
        workload=workload,
        base_url=server.root + "/v1",
        model=model,
        seed=plan.seed,
        same_prompts=plan.same_prompts,
        exact_prompt_lengths=abilities.has_tokenize,
        environment=environment,
        server_version=await _version_of(server),
        notes=abilities.notes(all_records, workload) + [f"Failed: {failure}" for failure in failures[:3]],
        summary=summarize([repeat.figures for repeat in repeats]),
        repeats=repeats,
    )


class _SessionRunner:
    """Runs sessions against one server."""

    def __init__(self, server: Server, model: str, abilities: Abilities, beam_width: int, progress: Progress) -> None:
        self._server = server
        self._model = model
        self._abilities = abilities
        self._beam_width = beam_width
        self._progress = progress

    async def check(self) -> None:
        """Raise NoBeamSearch if the answers are to be beam searches, and the server has none."""
        if self._beam_width > 1:
            await check_beam_search(self._server, self._body([_HISTORY_END], _WARM_UP_TOKENS))

    async def bring_in_histories(self, sessions: list[Session]) -> None:
        """Let the server compute the sessions' histories, one after another, each for an answer of one token."""
        for session in sessions:
            if session.history:
                body = request_body(self._model, [*session.history, _HISTORY_END], self._abilities, 1)
                async for _ in stream_chat(self._server, body):
                    pass

    async def run_all(self, sessions: list[Session], concurrency: int) -> list[RequestRecord]:
        """Run all sessions, at most concurrency at once, started in order; return their records in order."""
        slots = asyncio.Semaphore(concurrency)

        async def run_in_slot(index: int, session: Session) -> list[RequestRecord]:
            async with slots:
                return await self._run(index, session)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_in_slot(index, session)) for index, session in enumerate(sessions)]
        return [record for task in tasks for record in task.result()]

    async def _run(self, index: int, session: Session) -> list[RequestRecord]:
        """Run turns one after another, each with the whole history; a failure ends the session."""
        history = [*session.history]
        records = []
        for number, turn in enumerate(session.turns):
            history += turn.messages
            record = RequestRecord(index, number)
            records.append(record)
            body = self._body(history, turn.output_tokens)
            run_request = measure if self._beam_width == 1 else measure_beams
            await run_request(self._server, body, record, self._progress.update)
            if record.error is not None:
                break
            history.append(Message("assistant", record.text))
        return records

    def _body(self, messages: list[Message], output_tokens: int) -> dict[str, Any]:
        if self._beam_width == 1:
            return request_body(self._model, messages, self._abilities, output_tokens)
        body = request_body(self._model, messages, self._abilities, output_tokens, is_streamed=False)
        return {**body, **beam_fields(self._beam_width)}


def request_body(
    model: str, messages: list[Message], abilities: Abilities, output_tokens: int, *, is_streamed: bool = True
) -> dict[str, Any]:
    """Return the body of a greedy request."""
    fields = abilities.fields(output_tokens, is_streamed=is_streamed)
    return {"model": model, "messages": as_json(messages), "temperature": 0.0, **fields}


async def find_abilities(server: Server, model: str) -> Abilities:
    """Warm the server up with one short request, and learn what it takes.

    Raises ServerCallFailed if it refuses the request in its plainest form too.
    """
    messages = [Message("user", approximate_text("warm-up", _WARM_UP_TOKENS))]
    candidates = [Abilities(field, has_usage) for has_usage in (True, False) for field in _LENGTH_FIELDS]
    for abilities in candidates:
        try:
            async for _ in stream_chat(server, request_body(model, messages, abilities, _WARM_UP_TOKENS)):
                pass
            break
        except ServerCallFailed as error:
            if error.status not in _REFUSALS or abilities is candidates[-1]:
                raise
    return msgspec.structs.replace(abilities, has_tokenize=await _has_tokenize(server, model))


async def count_tokens(server: Server, model: str, text: str) -> int:
    """Return the number of tokens of text alone, without special tokens, by the server's /tokenize.

    prompt is the field of radixserve and vLLM, content that of llama.cpp; each ignores the other's.
    """
    body = {"model": model, "prompt": text, "content": text, "add_special_tokens": False}
    answer = await server.post("/tokenize", body)
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list):
        raise ServerCallFailed("/tokenize answered without a list of tokens")
    return len(tokens)


async def _has_tokenize(server: Server, model: str) -> bool:
    try:
        return await count_tokens(server, model, "The time.") > 0
    except ServerCallFailed:
        return False


async def _version_of(server: Server) -> Any:
    try:
        return await server.get("/version")
    except ServerCallFailed:
        return None


def describe_environment() -> Environment:
    """Return this machine and this moment."""
    return Environment(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        radixserve=__version__,
        commit=_commit(),
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_count=os.cpu_count(),
        load_average=[round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    )


def _commit() -> str | None:
    """The commit of the checkout that this module runs from; None outside of one, or without git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
