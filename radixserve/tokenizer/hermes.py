"""Tools, calls and results in the hermes format, for chat templates that do not write them.

A call is a JSON object between tags. What a template leaves out becomes text of messages that it does write: tools end
the system message, calls an assistant's, and results stand in a user's turn.
"""

import json
from typing import Any

import msgspec

CALL_BEGIN = "<tool_call>"
CALL_END = "</tool_call>"

_INSTRUCTIONS = """\
# Tools

You can call functions. Each line between <tools> and </tools> describes one, with a JSON schema of its parameters:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments between <tool_call> and </tool_call>:
<tool_call>
{{"name": "function_name", "arguments": {{"parameter": "value"}}}}
</tool_call>
You then get its result between <tool_response> and </tool_response>. If you need no function, just answer."""

Messages = list[dict[str, Any]]


def is_hermes(template: str) -> bool:
    """Return whether a chat template's source asks for calls in this format; some put XML between the same tags."""
    return CALL_BEGIN in template and "<function=" not in template


def add_tools(messages: Messages, tools: list[dict[str, Any]]) -> Messages:
    """Return the messages with the tools at the end of the system message, in the order given."""
    text = _INSTRUCTIONS.format(tools="\n".join(map(_to_json, tools)))
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def with_calls_as_text(messages: Messages) -> Messages:
    """Return the messages with calls written as the model writes them, and results that follow each other as one turn.

    Arguments keep the text that the model gave them, so that the cached prefix goes on.
    """
    rendered: Messages = []
    is_after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            response = f"<tool_response>\n{message['content']}\n</tool_response>"
            if is_after_result:
                rendered[-1]["content"] += f"\n{response}"
            else:
                rendered.append({"role": "user", "content": response})
        elif calls := message.get("tool_calls"):
            lines = [message["content"]] if message["content"] else []
            content = "\n".join([*lines, *(_call_text(call["function"]) for call in calls)])
            rendered.append({"role": message["role"], "content": content})
        else:
            rendered.append(message)
        is_after_result = is_result
    return rendered


def with_call_objects(messages: Messages) -> Messages:
    """Return the messages with call arguments that are a JSON object as an object, which most templates print."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    parsed = _parse_object(arguments) if isinstance(arguments, str) else arguments
    return call if parsed is None else {**call, "function": {**function, "arguments": parsed}}


def _call_text(function: dict[str, Any]) -> str:
    call = f'{{"name": {_to_json(function["name"])}, "arguments": {_arguments_text(function["arguments"])}}}'
    return f"{CALL_BEGIN}\n{call}\n{CALL_END}"


def _arguments_text(arguments: str | dict[str, Any]) -> str:
    if not isinstance(arguments, str):
        return _to_json(arguments)
    parsed = _parse_object(arguments)
    # Clients that parse arguments and write them anew may leave out the spaces that models put.
    if parsed is None or arguments == json.dumps(parsed, ensure_ascii=False, separators=(",", ":")):
        return _to_json(arguments if parsed is None else parsed)
    return arguments


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
