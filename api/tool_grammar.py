"""The grammar of answers that have to call a tool."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from llguidance import LLMatcher

from radixserve.api.requests import ToolFunction
from radixserve.errors import InvalidRequest
from radixserve.grammar import Grammar
from radixserve.tokenizer.hermes import CALL_BEGIN, CALL_END

# Without an end, a weak model might call tools until its context is full.
MAX_CALLS = 8

# JSON as chat templates write it, so that a call is the same text in the next prompt and its K/V are found again.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tool_grammar(
    functions: Sequence[ToolFunction], *, max_calls: int | None, special_texts: Collection[str]
) -> Grammar:
    """Return the grammar of one call of these functions after another, at most MAX_CALLS.

    special_texts: tags among them are special tokens of the model. Raises InvalidRequest, naming what is at fault, for
    parameters with a schema that cannot be enforced.
    """
    num_more = (max_calls or MAX_CALLS) - 1
    begin, end = (tag if tag in special_texts else _literal(tag) for tag in (CALL_BEGIN, CALL_END))
    rules = [
        "start: call" + (f' ("\\n" call){{0,{num_more}}}' if num_more else ""),
        f'call: {begin} "\\n" ({" | ".join(f"call_{index}" for index in range(len(functions)))}) "\\n" {end}',
    ]
    for index, function in enumerate(functions):
        schema = _arguments_schema(function)
        _check_schema(schema, function.name)
        opening = _literal(f'{{"name": "{function.name}", "arguments": ')
        rules.append(f'call_{index}: {opening} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return Grammar("lark", "\n".join(rules))


def _arguments_schema(function: ToolFunction) -> dict[str, Any]:
    """Return the schema of the arguments. An object has its listed properties alone, unless it says otherwise."""
    schema = function.parameters or {}
    closed = {} if schema.keys() & {"patternProperties", "allOf", "anyOf", "oneOf", "$ref"} else _closed(schema)
    return {**closed, **schema, "type": "object", "x-guidance": _SPACING}


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    return {"additionalProperties": False} if "properties" in schema or not schema else {}


def _check_schema(schema: dict[str, Any], name: str) -> None:
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    if error:
        problem = error.strip().partition("\n")[0]
        raise InvalidRequest(
            f'the parameters of {name} cannot be enforced: {problem}; change them, or send tool_choice "auto"',
            param="tools",
        )


def _literal(text: str) -> str:
    """Return a string of Lark, which is written as one of JSON."""
    return json.dumps(text)
