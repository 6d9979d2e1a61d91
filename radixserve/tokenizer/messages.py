"""Chat messages, checked and brought into the one form that chat templates read."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from radixserve.errors import InvalidRequest
from radixserve.tokenizer.digit_marks import TextEnd

# Models are not trained on "developer", OpenAI's newer name for the same role.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


# Anthropic's name and OpenAI's.
_CACHE_MARKS = ("cache_control", "prompt_cache_breakpoint")


class ContentPart(msgspec.Struct):
    """A part of a message's content; only text is taken. Either mark asks to keep the prompt up to and with it."""

    type: str
    text: str | None = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


class FunctionCall(msgspec.Struct):
    """The function that an earlier answer called, arguments as a JSON text or as an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    """One call of a tool in an earlier answer."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    audio: Any = None
    function_call: Any = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


class CacheMark(NamedTuple):
    """A mark on a content part. path: of the mark in the request. end: the part's."""

    path: str
    name: str
    value: Any
    end: TextEnd


def cache_marks(messages: Sequence[Message]) -> Iterator[CacheMark]:
    """Yield the marks on content parts, in the order of the conversation."""
    for message_index, message in enumerate(messages):
        num_characters = 0
        for part_index, part in enumerate(message.content if isinstance(message.content, list) else []):
            num_characters += len(part.text or "")
            for name in _CACHE_MARKS:
                if (value := getattr(part, name)) is not None:
                    path = f"messages[{message_index}].content[{part_index}].{name}"
                    yield CacheMark(path, name, value, TextEnd(message_index, num_characters))


def refuse_marked_parts(messages: Sequence[Message], reason: str) -> None:
    """Raise InvalidRequest, with the path of the first one, for marks where nothing can be kept."""
    for mark in cache_marks(messages):
        raise InvalidRequest(f"{mark.path} is not supported {reason}; leave it out", param="messages")


def refuse_cache_marks(owner: msgspec.Struct, path: str, param: str) -> None:
    """Raise InvalidRequest if something other than a content part, which has the fields for it, is marked."""
    for name in _CACHE_MARKS:
        if getattr(owner, name) is not None:
            raise InvalidRequest(f"{path}.{name} belongs on a content part of type text; put it there", param=param)


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Return the messages as Tokenizer.encode_chat takes them: content a string, call arguments as they were given.

    The text parts of a list are joined with nothing in between. Raises InvalidRequest, with the index in the message,
    for an unknown role, content that is missing, and a part that is no text.
    """
    if not messages:
        raise InvalidRequest("messages is empty; send at least one", param="messages")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: Message, path: str) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"{path}.role is {message.role!r}; it must be one of {', '.join(_ROLES)}", param="messages"
        )
    for name in ("audio", "function_call"):
        if getattr(message, name) is not None:
            raise InvalidRequest(f"{path}.{name} is not supported yet; leave it out", param="messages")
    refuse_cache_marks(message, path, "messages")
    for index, call in enumerate(message.tool_calls or []):
        refuse_cache_marks(call, f"{path}.tool_calls[{index}]", "messages")
    if message.tool_calls and role != "assistant":
        raise InvalidRequest(f"{path}.tool_calls: only an assistant message has them", param="messages")
    if message.content is None and not message.tool_calls:
        raise InvalidRequest(f"{path}.content is missing; only tool_calls can stand in for it", param="messages")
    rendered: dict[str, Any] = {"role": role, "content": _text(message.content, f"{path}.content")}
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        rendered["tool_calls"] = [_template_tool_call(call) for call in message.tool_calls]
    return rendered


def _text(content: str | list[ContentPart] | None, path: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for index, part in enumerate(content):
        if part.type != "text":
            raise InvalidRequest(f"{path}[{index}] is of type {part.type!r}; only text is taken", param="messages")
        if part.text is None:
            raise InvalidRequest(f"{path}[{index}].text is missing", param="messages")
    return "".join(part.text or "" for part in content)


def _template_tool_call(call: ToolCall) -> dict[str, Any]:
    function: dict[str, Any] = {"name": call.function.name, "arguments": call.function.arguments or {}}
    rendered: dict[str, Any] = {"type": "function", "function": function}
    if call.id is not None:
        rendered["id"] = call.id
    return rendered
