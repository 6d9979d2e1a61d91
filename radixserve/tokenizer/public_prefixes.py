"""The operator's file of public prefixes: what prompts may begin with, as the token ids that they then have in common.

A JSON list. A string is a system prompt, {"messages": [...], "tools": [...]} the beginning of chats, {"prompt": "..."}
that of completions. Nobody can see from a text alone which ids it begins a prompt with: the chat template adds to it,
and the last ids may be others once more text follows. So each entry is encoded with several things behind it, and what
all of these prompts begin with is its prefix.
"""

import logging
from array import array
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from radixserve.errors import ConfigError, InvalidRequest
from radixserve.tokenizer.messages import Message, refuse_marked_parts, template_messages
from radixserve.tokenizer.tokenizer import Tokenizer
from radixserve.tokenizer.tools import Tool, check_functions, template_tools

# What may follow: letters, digits, white space that joins with white space before it, and nothing.
_TEXTS = ("", "a", "A", "7", " ", " a", "\n", "\n\na", ".", "'s", "\u4e2d")
_CONTENTS = ("a", "7", " a", "\n\na")
_TOOL_NAMES = ("a", "Z", "_", "7")

_log = logging.getLogger(__name__)


class _Message(Message, forbid_unknown_fields=True):
    """A message with nothing that would be ignored."""


class _Tool(Tool, forbid_unknown_fields=True):
    """A tool with nothing that would be ignored."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[_Message] | None = None
    tools: list[_Tool] | None = None
    prompt: str | None = None


def read_public_prefixes(file: Path, tokenizer: Tokenizer, block_size: int) -> "list[array[int]]":
    """Return the token ids of the prefixes in a file, each cut to whole blocks.

    Raises ConfigError, naming the entry, for a file that cannot be read or is not of this form, an entry that the chat
    template refuses, and one that makes less than a block.
    """
    prefixes = []
    for index, entry in enumerate(_read(file)):
        try:
            whole, *others = (_cut(prefix, block_size) for prefix in _prefixes_of(entry, tokenizer))
        except InvalidRequest as error:
            raise ConfigError(f"--public-prefixes {file}: entry [{index}]: {error.message}") from error
        if not whole:
            raise ConfigError(
                f"--public-prefixes {file}: entry [{index}] gives prompts less than a block of {block_size} tokens in "
                "common; make it longer, or leave it out"
            )
        _log.info("public prefix [%d]: %d tokens", index, len(whole))
        prefixes += [whole, *filter(None, others)]
    return prefixes


def _read(file: Path) -> list[_Entry]:
    try:
        entries = msgspec.json.decode(file.read_bytes(), type=list[str | _Entry])
    except OSError as error:
        raise ConfigError(f"--public-prefixes {file} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--public-prefixes {file} is no list of prefixes: {error}") from error
    if not entries:
        raise ConfigError(f"--public-prefixes {file} is an empty list; leave the setting out")
    return [_Entry([_Message("system", entry)]) if isinstance(entry, str) else entry for entry in entries]


def _prefixes_of(entry: _Entry, tokenizer: Tokenizer) -> "Iterator[array[int]]":
    """Yield what all prompts that begin with an entry have in common, then what those of them have that bring tools.

    Templates put tools behind the system prompt or before it, so that the two are different.
    """
    if (entry.messages is None) == (entry.prompt is None):
        raise InvalidRequest("it must have messages or a prompt, and not both")
    if entry.messages is None:
        if entry.tools is not None:
            raise InvalidRequest("tools go with messages; a prompt has none")
        yield _common(tokenizer.encode_batch([f"{entry.prompt}{text}" for text in _TEXTS]))
        return
    messages = template_messages(list(entry.messages))
    refuse_marked_parts(entry.messages, "in a public prefix, which is not kept for a time")
    if entry.tools:
        yield _common(_chats(messages, [template_tools(check_functions(list(entry.tools)))], tokenizer))
        return
    yield _common(_chats(messages, [None], tokenizer))
    some_tools = [template_tools(check_functions([tool])) for tool in map(_some_tool, _TOOL_NAMES)]
    try:
        yield _common(_chats(messages, some_tools, tokenizer))
    except InvalidRequest:
        return  # the template takes no tools here


def _some_tool(name: str) -> Tool:
    return msgspec.convert({"type": "function", "function": {"name": name}}, Tool)


def _chats(
    messages: list[dict[str, Any]], tool_lists: list[list[dict[str, Any]] | None], tokenizer: Tokenizer
) -> list[list[int]]:
    """Return prompts that begin with these messages. Raises InvalidRequest if the template refuses all of them."""
    prompts: list[list[int]] = []
    refusal = InvalidRequest("nothing can follow these messages")
    for tools in tool_lists:
        for following in _followers(messages[-1]):
            try:
                prompts.append(tokenizer.encode_chat([*messages, *following], tools=tools))
            except InvalidRequest as error:
                # Some templates want roles to alternate.
                refusal = error
    if not prompts:
        raise refusal
    return prompts


def _followers(last: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    yield []
    roles = ("tool", "user", "assistant") if last["role"] == "tool" or "tool_calls" in last else ("user", "assistant")
    for role in roles:
        for content in _CONTENTS:
            yield [{"role": role, "content": content}]


def _common(prompts: list[list[int]]) -> "array[int]":
    """Return the ids that all prompts begin with."""
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    return array("i", (column[0] for column in columns))


def _cut(prefix: "array[int]", block_size: int) -> "array[int]":
    return prefix[: len(prefix) // block_size * block_size]
