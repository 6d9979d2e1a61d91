"""Tools as a chat template wrote them into a prompt, found by their JSON."""

import json
import re
from dataclasses import dataclass
from typing import Any

from radixserve.diagnosis.passage import BORDER
from radixserve.diagnosis.report import Pattern

_BEGIN = re.compile(r'\{\s*"(?:type|function|name|description|parameters|strict)"\s*:')
# Texts that only look like tools are each read to where they stop being JSON, so not many of them.
_MAX_FAILURES = 16
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToolText:
    """A tool in a text, and where its JSON begins and ends. value: what it says, whatever the order of its keys."""

    name: str
    value: Any
    start: int
    end: int


def find_tools(text: str) -> list[ToolText]:
    """Return the tools of a text in their order; one that is cut off at its end is left out."""
    tools = []
    position = num_failures = 0
    while num_failures < _MAX_FAILURES and (match := _BEGIN.search(text, position)) is not None:
        start = position = match.start()
        try:
            value, position = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            num_failures += 1
            position = match.end()
            continue
        function = value.get("function", value)
        # A call has a name too, but no parameters.
        if isinstance(function, dict) and isinstance(function.get("name"), str) and "parameters" in function:
            tools.append(ToolText(function["name"], function, start, position))
    return tools


@dataclass(frozen=True, slots=True)
class ToolChange:
    """How the tools of a prompt differ from a cached one's. is_fault: most of them are the same."""

    pattern: Pattern
    added: list[str]
    removed: list[str]
    is_fault: bool


def tool_change(text: str, cached_text: str, position: int, *, is_cut: bool) -> ToolChange | None:
    """Return what differs in the tools of two texts that are the same up to a position; None if that is not in tools.

    is_cut: the cached text does not go to its end, so that tools may be missing in it.
    """
    tools, cached_tools = find_tools(text), find_tools(cached_text)
    if not tools or not cached_tools:
        is_next = _is_next(tools, text, position) or _is_next(cached_tools, cached_text, position)
        names = [tool.name for tool in tools], [tool.name for tool in cached_tools]
        return ToolChange("changed_tools", *names, is_fault=False) if is_next else None
    if tools[0].start > position or position > max(tools[-1].end, cached_tools[-1].end):
        return None
    rest = [tool for tool in tools if tool.end > position]
    cached_rest = [tool for tool in cached_tools if tool.end > position]
    values, cached_values = [tool.value for tool in rest], [tool.value for tool in cached_rest]
    num_known = len(cached_values) if is_cut else max(len(values), len(cached_values))
    if values[:num_known] == cached_values[:num_known]:
        return ToolChange("reserialised_tools", [], [], is_fault=True)
    added = [tool.name for tool in _seen(rest, cached_values, is_cut=is_cut) if tool.value not in cached_values]
    removed = [tool.name for tool in cached_rest if tool.value not in values]
    if not added and not removed:
        return ToolChange("reordered_tools", [], [], is_fault=True)
    num_same = len(tools) - len(rest) + sum(1 for value in cached_values if value in values)
    is_fault = 2 * num_same >= min(len(tools), len(cached_tools))
    return ToolChange("changed_tools", added, removed, is_fault)


def _is_next(tools: list[ToolText], text: str, position: int) -> bool:
    """Whether tools stand behind a position, in the same turn."""
    return bool(tools) and tools[-1].end >= position and BORDER not in text[position : tools[0].start]


def _seen(rest: list[ToolText], cached_values: list[Any], *, is_cut: bool) -> list[ToolText]:
    """Return the tools of a prompt that would be in what is known of the cached one."""
    if not is_cut or not cached_values:
        return rest
    values = [tool.value for tool in rest]
    first = values.index(cached_values[0]) if cached_values[0] in values else len(cached_values)
    # Where all that is known comes later without a gap, what stands before it is new; else it has moved.
    return rest[:first] if values[first : first + len(cached_values)] == cached_values else []
