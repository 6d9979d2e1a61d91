"""The grammar of answers that have to call a tool."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from radixserve.engine.grammar_compiler import GrammarCompiler
from radixserve.errors import InvalidRequest
from radixserve.grammar import Grammar
from radixserve.tokenizer.hermes import CALL_BEGIN, CALL_END
from radixserve.tokenizer.tools import ToolFunction

# Without an end, a weak model might call tools until its context is full.
MAX_CALLS = 8

# JSON as chat templates write it, so that a call is the same text in the next prompt and its K/V are found again.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tool_grammar(
    functions: Sequence[ToolFunction], *, max_calls: int | None, special_texts: Collection[str]
) -> Grammar:
    """Return the grammar of calls of these functions, at least one and at most max_calls, or MAX_CALLS.

    special_texts: tags among them are special tokens of the model.
    """
    num_more = (max_calls or MAX_CALLS) - 1
    begin, end = (tag if tag in special_texts else _literal(tag) for tag in (CALL_BEGIN, CALL_END))
    rules = [
        "start: call" + (f' ("\\n" call){{0,{num_more}}}' if num_more else ""),
        f'call: {begin} "\\n" ({" | ".join(f"call_{index}" for index in range(len(functions)))}) "\\n" {end}',
    ]
    for index, function in enumerate(functions):
        opening = _literal(f'{{"name": "{function.name}", "arguments": ')
        rules.append(f'call_{index}: {opening} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {json.dumps(_arguments_schema(function))}")
    return Grammar("lark", "\n".join(rules))


def check_tool_grammar(grammar: Grammar, functions: Sequence[ToolFunction], grammars: GrammarCompiler) -> None:
    """Raise InvalidRequest, naming what is at fault, if the grammar of these functions cannot be enforced.

    Takes up to a tenth of a second.
    """
    for function in functions:
        schema = Grammar("json_schema", json.dumps(_arguments_schema(function)))
        _compile(schema, f"the parameters of {function.name}", grammars)
    _compile(grammar, "the parameters of these tools together", grammars)


def _compile(grammar: Grammar, name: str, grammars: GrammarCompiler) -> None:
    try:
        grammars.compile(grammar)
    except InvalidRequest as error:
        raise InvalidRequest(
            f'{name} cannot be enforced: {error.message}; change them, or send tool_choice "auto"', param="tools"
        ) from None


def _arguments_schema(function: ToolFunction) -> dict[str, Any]:
    """Return the schema of the arguments. An object has its listed properties alone, unless it says otherwise."""
    schema = function.parameters or {"properties": {}}
    is_plain = schema.keys().isdisjoint(("patternProperties", "allOf", "anyOf", "oneOf", "$ref"))
    closed = {"additionalProperties": False} if is_plain and "properties" in schema else {}
    return {**closed, **schema, "type": "object", "x-guidance": _STYLE}


def _literal(text: str) -> str:
    """Return a string of Lark, which is written as one of JSON."""
    return json.dumps(text)
