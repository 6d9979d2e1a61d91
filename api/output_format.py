"""What a request says of the form of its answer, as a grammar: response_format and structured_outputs.

Compiling a grammar takes up to a tenth of a second: call it off the event loop.
"""

from typing import Any, TypeVar

import msgspec

from radixserve.api.requests import GenerationRequest
from radixserve.engine.grammar_compiler import GrammarCompiler
from radixserve.errors import InvalidRequest
from radixserve.grammar import Grammar

T = TypeVar("T")

_ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


class _Format(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    """OpenAI's response_format."""


class _Text(_Format, tag="text"):
    pass


class _JsonObject(_Format, tag="json_object"):
    pass


class _NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    """name, description: for models that read them; here nothing does. strict: the schema always holds."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class _JsonSchema(_Format, tag="json_schema"):
    json_schema: _NamedSchema


class _StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """One of these. json: a schema, or its text. choice: the texts that the answer may be. grammar: Lark."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def output_grammar(request: GenerationRequest, grammars: GrammarCompiler) -> Grammar | None:
    """Return the grammar that the answer has to follow, which compiles; None for one that may be any text.

    Raises InvalidRequest, with the field as param and the unsupported keyword in the message.
    """
    by_field = {
        "response_format": _of_response_format(request.response_format),
        "structured_outputs": _of_structured_outputs(request.structured_outputs),
    }
    given = {field: grammar for field, grammar in by_field.items() if grammar is not None}
    if len(given) > 1:
        raise InvalidRequest(
            "response_format and structured_outputs both limit the answer; send one of them", param="structured_outputs"
        )
    for field, grammar in given.items():
        try:
            grammars.compile(grammar)
        except InvalidRequest as error:
            raise InvalidRequest(f"{field}: {error.message}", param=field) from None
        return grammar
    return None


def _of_response_format(value: Any) -> Grammar | None:
    if value is None:
        return None
    match _convert("response_format", value, _Text | _JsonObject | _JsonSchema):
        case _JsonObject():
            return _ANY_OBJECT
        case _JsonSchema(named):
            return _schema("response_format", named.schema)
        case _:
            return None


def _of_structured_outputs(value: Any) -> Grammar | None:
    if value is None:
        return None
    outputs = _convert("structured_outputs", value, _StructuredOutputs)
    given = [name for name in outputs.__struct_fields__ if getattr(outputs, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"structured_outputs takes one of json, regex, choice and grammar; it has {' and '.join(given) or 'none'}",
            param="structured_outputs",
        )
    if isinstance(outputs.json, str):
        return Grammar("json_schema", outputs.json)
    if outputs.json is not None:
        return _schema("structured_outputs", outputs.json)
    if outputs.regex is not None:
        return Grammar("regex", outputs.regex)
    if outputs.grammar is not None:
        return Grammar("lark", outputs.grammar)
    if not outputs.choice:
        raise InvalidRequest("structured_outputs.choice is an empty list", param="structured_outputs")
    return Grammar("regex", "|".join(map(_escape, outputs.choice)))


def _convert(field: str, value: Any, shape: Any) -> Any:
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{field} is not one: {error}", param=field) from None


def _schema(field: str, schema: dict[str, Any]) -> Grammar:
    try:
        return Grammar("json_schema", msgspec.json.encode(schema).decode())
    except RecursionError:
        raise InvalidRequest(f"{field}: the schema is nested too deeply", param=field) from None


def _escape(text: str) -> str:
    """Return a regular expression of this text alone, by code points: not all characters may follow a backslash."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
