"""`radixserve cache`: look at a running server's cache, and change it."""

import argparse
import asyncio
from asyncio import sleep
from collections.abc import Awaitable, Callable
from datetime import datetime
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.live import Live

from radixserve.api.responses import CachePin, CacheReport, CacheTreeView
from radixserve.bench.server import Server
from radixserve.cli.cache_explain import explain_view
from radixserve.cli.cache_stats import Rates, rates_between, stats_view
from radixserve.cli.cache_tree import read_tree, tree_view
from radixserve.cli.request_file import read_request
from radixserve.diagnosis.report import Diagnosis
from radixserve.errors import ServerCallFailed

PATH = "/v1/cache"

T = TypeVar("T")
Command = Callable[[Server, argparse.Namespace], Awaitable[int]]


def run(arguments: argparse.Namespace) -> int:
    """Run one command and return the exit code.

    Raises ServerCallFailed if the server cannot be reached or refuses, ConfigError if a file holds no request.
    """
    try:
        return asyncio.run(_run(arguments))
    except KeyboardInterrupt:
        if getattr(arguments, "watch", None) is None:
            raise
        return 0  # the one way to end it


async def _run(arguments: argparse.Namespace) -> int:
    async with Server(arguments.base_url, arguments.api_key) as server:
        return await COMMANDS[arguments.cache_command](server, arguments)


def read_answer(answer: Any, kind: type[T]) -> T:
    """Return a server's answer as the figures that a command shows. Raises ServerCallFailed if it is no such answer."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise ServerCallFailed(f"the server's answer is not of the expected form: {error}") from None


def print_json(answer: Any) -> None:
    """Print an answer as one line."""
    print(msgspec.json.encode(answer).decode(), flush=True)


async def _stats(server: Server, arguments: argparse.Namespace) -> int:
    if arguments.watch is not None:
        await _watch(server, arguments)
        return 0
    answer = await server.get(PATH)
    if arguments.json:
        print_json(answer)
    else:
        Console(highlight=False).print(stats_view(read_answer(answer, CacheReport)))
    return 0


async def _watch(server: Server, arguments: argparse.Namespace) -> None:
    """Show the figures again and again: as lines of JSON, in place in a terminal, else one below the other."""
    console = Console(highlight=False)
    before: tuple[CacheReport, float] | None = None
    with Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live:
        while True:
            answer, now = await server.get(PATH), monotonic()
            figures = read_answer(answer, CacheReport)
            rates: Rates | None = None
            if before is not None:
                rates = rates_between(before[0], figures, now - before[1])
            before = figures, now
            if arguments.json:
                print_json(answer)
            elif console.is_terminal:
                live.update(stats_view(figures, rates), refresh=True)
            else:
                console.print(stats_view(figures, rates), "")
            await sleep(arguments.watch)


async def _tree(server: Server, arguments: argparse.Namespace) -> int:
    console = Console(highlight=False)
    answer = await read_tree(server, arguments.depth, arguments.max_nodes, width=console.width)
    if arguments.json:
        print_json(answer)
    else:
        console.print(tree_view(read_answer(answer, CacheTreeView), console))
    return 0


async def _explain(server: Server, arguments: argparse.Namespace) -> int:
    answer = await server.post(f"{PATH}/explain", read_request(arguments.file))
    if arguments.json:
        print_json(answer)
    else:
        console = Console(highlight=False)
        console.print(explain_view(read_answer(answer, Diagnosis), console.encoding))
    return 0


async def _pin(server: Server, arguments: argparse.Namespace) -> int:
    ttl = {} if arguments.ttl is None else {"ttl": arguments.ttl}
    answer = await server.post(f"{PATH}/pin", read_request(arguments.file) | ttl)
    if arguments.json:
        return _show(answer, arguments)
    pin = read_answer(answer, CachePin)
    until = datetime.fromtimestamp(pin.expires_at).strftime("%H:%M:%S")
    blocks = "1 block" if pin.blocks == 1 else f"{pin.blocks:,} blocks"
    print(f"pinned {pin.tokens:,} tokens in {blocks} until {until}; radixserve cache unpin {pin.id} ends it")
    return 0


async def _unpin(server: Server, arguments: argparse.Namespace) -> int:
    return _show(await server.delete(f"{PATH}/pin/{quote(arguments.pin_id, safe='')}"), arguments)


async def _reset(server: Server, arguments: argparse.Namespace) -> int:
    return _show(await server.post(f"{PATH}/reset", {}), arguments)


async def _save(server: Server, arguments: argparse.Namespace) -> int:
    return _show(await server.post(f"{PATH}/save", {}), arguments)


def _show(answer: Any, arguments: argparse.Namespace) -> int:
    """Print the fields of an answer, one a line."""
    if arguments.json or not isinstance(answer, dict):
        print_json(answer)
        return 0
    for name, value in answer.items():
        if name == "object":
            continue  # says of what kind the answer is
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        print(f"{name.replace('_', ' ')}: {text}")
    return 0


COMMANDS: dict[str, Command] = {
    "stats": _stats,
    "tree": _tree,
    "explain": _explain,
    "pin": _pin,
    "unpin": _unpin,
    "reset": _reset,
    "save": _save,
}
