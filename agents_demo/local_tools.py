"""Three tools that need nothing but this file, and their descriptions for a model."""

import ast
import operator
from collections.abc import Callable
from typing import Any

from openai.types.chat import ChatCompletionFunctionToolParam

_MAX_EXPRESSION = 200
_MAX_POWER = 64
_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
_FACTS = {
    "paris": "Paris is the capital of France. About 2.1 million people live there.",
    "rome": "Rome is the capital of Italy. About 2.8 million people live there.",
    "everest": "Mount Everest is 8849 metres high.",
    "moon": "The Moon is about 384400 kilometres from the Earth.",
    "marathon": "A marathon is 42.195 kilometres long.",
}
# What one unit is in the base unit of its kind.
_UNITS = {
    "metre": ("length", 1.0),
    "kilometre": ("length", 1000.0),
    "mile": ("length", 1609.344),
    "foot": ("length", 0.3048),
    "kilogram": ("mass", 1.0),
    "pound": ("mass", 0.45359237),
}


def calculate(expression: str) -> str:
    """Evaluate arithmetic: numbers, + - * / % and **, parentheses."""
    if len(expression) > _MAX_EXPRESSION:
        return f"error: the expression has over {_MAX_EXPRESSION} characters"
    try:
        return f"{_evaluate(ast.parse(expression, mode='eval').body):.10g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
        return f"error: {error}"


def look_up(topic: str) -> str:
    """Return what is known of a topic."""
    found = [fact for name, fact in _FACTS.items() if name in topic.lower()]
    return " ".join(found) or f"nothing is known of that; topics are: {', '.join(_FACTS)}"


def convert(value: float, source: str, target: str) -> str:
    """Convert a value from one unit to another of the same kind."""
    try:
        (source_kind, source_size), (target_kind, target_size) = _UNITS[source], _UNITS[target]
    except KeyError as error:
        return f"error: {error} is no unit; units are: {', '.join(_UNITS)}"
    if source_kind != target_kind:
        return f"error: {source} is a {source_kind} and {target} a {target_kind}"
    return f"{value * source_size / target_size:.6g} {target}"


TOOLS: dict[str, Callable[..., str]] = {"calculate": calculate, "look_up": look_up, "convert": convert}


def call_tool(name: str, arguments: dict[str, Any]) -> str:
    """Run one of the tools. What goes wrong is told in the result: the model shall see it."""
    tool = TOOLS.get(name)
    if tool is None:
        return f"error: there is no tool {name!r}; there are: {', '.join(TOOLS)}"
    try:
        return tool(**arguments)
    except TypeError as error:
        return f"error: {error}"


def describe(name: str, description: str, properties: dict[str, Any]) -> ChatCompletionFunctionToolParam:
    """Return a tool's description in OpenAI's form; all of its properties are required."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_UNIT = {"type": "string", "enum": list(_UNITS)}
TOOL_DESCRIPTIONS = [
    describe(
        "calculate",
        "Evaluate an arithmetic expression with numbers, + - * / and parentheses.",
        {"expression": {"type": "string", "maxLength": 40}},
    ),
    describe("look_up", "Find a fact about a topic.", {"topic": {"type": "string", "enum": list(_FACTS)}}),
    describe(
        "convert",
        "Convert a value from one unit to another.",
        {"value": {"type": "number", "minimum": 0, "maximum": 1000000}, "source": _UNIT, "target": _UNIT},
    ),
]


def _evaluate(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, power = _evaluate(left), _evaluate(right)
            if abs(power) > _MAX_POWER or abs(base) > 1e6:
                raise ValueError("the power is too large")
            result: float | complex = base**power
            if isinstance(result, complex):
                raise ValueError("the result is not a real number")
            return result
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
    raise ValueError("only numbers, + - * / % **, and parentheses are taken")
