"""Tools of a conversation, checked and brought into the one form that chat templates read."""

import re
from typing import Any

import msgspec

from radixserve.errors import InvalidRequest
from radixserve.tokenizer.messages import refuse_cache_marks

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class ToolFunction(msgspec.Struct):
    """A function that the model may call. parameters: a JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


class Tool(msgspec.Struct):
    """A tool; functions are the only type that is taken."""

    type: str
    function: ToolFunction | None = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


def check_functions(tools: list[Tool]) -> list[ToolFunction]:
    """Return the functions of tools. Raises InvalidRequest, with the index of the tool in the message."""
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    names = [function.name for function in functions]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InvalidRequest(f"tools has two functions named {repeated[0]!r}", param="tools")
    return functions


def template_tools(functions: list[ToolFunction]) -> list[dict[str, Any]] | None:
    """Return functions as chat templates take them; None if there are none.

    All go into the prompt, whichever the answer has to call: so requests with other choices share the prefix.
    """
    return [{"type": "function", "function": _template_function(function)} for function in functions] or None


def _function(tool: Tool, path: str) -> ToolFunction:
    if tool.type != "function" or tool.function is None:
        raise InvalidRequest(
            f'{path} must be {{"type": "function", "function": {{...}}}}; other types are not supported', param="tools"
        )
    function = tool.function
    refuse_cache_marks(tool, path, "tools")
    refuse_cache_marks(function, f"{path}.function", "tools")
    if not _NAME.fullmatch(function.name):
        raise InvalidRequest(
            f"{path}.function.name is {function.name!r:.100}; it must be 1 to 64 letters, digits, _ or -", param="tools"
        )
    schema = function.parameters or {}
    if schema.get("type", "object") != "object" or not isinstance(schema.get("properties", {}), dict):
        raise InvalidRequest(f"{path}.function.parameters must be a JSON schema of type object", param="tools")
    return function


def _template_function(function: ToolFunction) -> dict[str, Any]:
    described = {} if function.description is None else {"description": function.description}
    parameters = function.parameters or {"type": "object", "properties": {}}
    return {"name": function.name, **described, "parameters": parameters}
