"""Run a workload against a server."""

import asyncio
import datetime
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from radixserve.bench.client import RequestRecord, measure
from radixserve.bench.message import Message, as_json
from radixserve.bench.report import Environment, Repeat, Report, make_repeat, summarize
from radixserve.bench.server import Server
from radixserve.bench.text import approximate_text, exact_text
from radixserve.bench.workloads import Turn, Workload, build_sessions
from radixserve.errors import ServerCallFailed
from radixserve.version import __version__

_WARM_UP_TOKENS = 8
# Statuses by which a server says that it does not take a field.
_REFUSALS = (400, 422)
_FIXED_LENGTH: dict[str, Any] = {"ignore_eos": True}
_WITH_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


class Abilities(msgspec.Struct, frozen=True):
    """What of the extras the server takes. extras: fields for each request."""

    extras: dict[str, Any]
    has_tokenize: bool

    def notes(self, records: list[RequestRecord], workload: Workload) -> list[str]:
        """Return what a reader of the figures must know, a sentence each."""
        notes = []
        if not self.has_tokenize:
            notes.append("The server has no /tokenize: prompt lengths follow the rule of one token a word.")
        if "ignore_eos" not in self.extras:
            notes.append("The server refuses ignore_eos, which fixes the length of an answer.")
        completed = [record for record in records if record.error is None]
        if not all(record.has_usage for record in completed):
            notes.append("The server reports no usage in streams: output tokens are counted as chunks with text.")
        elif not all(record.cached_tokens is not None for record in completed):
            notes.append("The server does not report cached tokens.")
        num_short = sum(record.output_tokens < workload.output_tokens for record in completed)
        if num_short:
            notes.append(f"{num_short} of {len(completed)} answers are shorter than {workload.output_tokens} tokens.")
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


async def run_benchmark(server: Server, plan: Plan, progress: Progress) -> Report:
    """Run the plan and report on it.

    Raises ServerCallFailed if the server cannot be reached or refuses even the warm-up; later failures are counted.
    """
    workload = plan.workload
    model = plan.model or await server.first_model()
    environment = describe_environment()
    abilities = await find_abilities(server, model)
    common = {"model": model, "temperature": 0.0, **abilities.extras}

    async def write_text(key: str, num_tokens: int) -> str:
        if not abilities.has_tokenize:
            return approximate_text(key, num_tokens)
        return await exact_text(key, num_tokens, lambda text: count_tokens(server, model, text))

    keys = [f"{plan.seed}/{0 if plan.same_prompts else repeat}" for repeat in range(plan.num_repeats)]
    plans = [await build_sessions(workload, key, write_text) for key in keys]
    progress.reset(plan.num_repeats * workload.num_requests * workload.output_tokens)
    repeats: list[Repeat] = []
    all_records: list[RequestRecord] = []
    for sessions in plans:
        started = time.perf_counter()
        records = await _run_sessions(server, common, sessions, workload.concurrency, progress.update)
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
        summary=summarize(repeats),
        repeats=repeats,
    )


async def _run_sessions(
    server: Server,
    common: dict[str, Any],
    sessions: list[list[Turn]],
    concurrency: int,
    on_chunks: Callable[[int], object],
) -> list[RequestRecord]:
    """Run all sessions, at most concurrency at once, started in order; return their records in order."""
    slots = asyncio.Semaphore(concurrency)

    async def run_one(index: int, turns: list[Turn]) -> list[RequestRecord]:
        async with slots:
            return await _run_session(server, common, index, turns, on_chunks)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_one(index, turns)) for index, turns in enumerate(sessions)]
    return [record for task in tasks for record in task.result()]


async def _run_session(
    server: Server, common: dict[str, Any], index: int, turns: list[Turn], on_chunks: Callable[[int], object]
) -> list[RequestRecord]:
    """Run turns one after another, each with the whole history; a failure ends the session."""
    history: list[Message] = []
    records = []
    for number, turn in enumerate(turns):
        history += turn.messages
        record = RequestRecord(index, number)
        records.append(record)
        body = {**common, "messages": as_json(history), "max_tokens": turn.output_tokens}
        await measure(server, body, record, on_chunks)
        if record.error is not None:
            break
        history.append(Message("assistant", record.text))
    return records


async def find_abilities(server: Server, model: str) -> Abilities:
    """Warm the server up with one short request, and learn which extras it takes.

    Raises ServerCallFailed if it refuses the request with none of them too.
    """
    prompt = as_json([Message("user", approximate_text("warm-up", _WARM_UP_TOKENS))])
    body = {"model": model, "messages": prompt, "max_tokens": _WARM_UP_TOKENS, "temperature": 0.0}
    for extras in ({**_FIXED_LENGTH, **_WITH_USAGE}, _WITH_USAGE, _FIXED_LENGTH, {}):
        try:
            async for _ in server.stream("/v1/chat/completions", {**body, **extras, "stream": True}):
                pass
            break
        except ServerCallFailed as error:
            if error.status not in _REFUSALS or not extras:
                raise
    return Abilities(extras, await _has_tokenize(server, model))


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
