"""Random JSON schemas whose texts are short: every string, array and object has a bound."""

import random
from typing import Any

WORDS = ("name", "city", "age", "size", "tags", "note", "kind", "price", "is_open", "items", "id", "next")
CHOICES = ("red", "green", "blue", "small", "large", 7, 42, True, None)
PATTERNS = ("^[a-z]{2,6}$", "^[A-Z][a-z]{1,8}$", r"^\d{3}-\d{2}$", "^(yes|no|maybe)$", "^#[0-9a-f]{6}$")
FORMATS = ("date-time", "time", "uuid", "ipv4")


def generate_schema(randomness: random.Random, *, max_depth: int = 3) -> dict[str, Any]:
    """Return the schema of an object with nesting of at most max_depth objects and arrays."""
    return _object(randomness, max_depth)


def _any(randomness: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _integer, _number, _choice, _constant, _boolean, _null]
    if depth > 0:
        makers += [_object, _array, _any_of, _object, _array]
    return randomness.choice(makers)(randomness, depth)


def _object(randomness: random.Random, depth: int) -> dict[str, Any]:
    names = randomness.sample(WORDS, randomness.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(randomness, depth - 1) for name in names},
        "required": [name for name in names if randomness.random() < 0.7],
        "additionalProperties": False,
    }


def _array(randomness: random.Random, depth: int) -> dict[str, Any]:
    most = randomness.randint(1, 4)
    return {
        "type": "array",
        "items": _any(randomness, depth - 1),
        "minItems": randomness.randint(0, most),
        "maxItems": most,
    }


def _any_of(randomness: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(randomness, depth - 1) for _ in range(randomness.randint(2, 3))]}


def _string(randomness: random.Random, _: int) -> dict[str, Any]:
    kind = randomness.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": randomness.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": randomness.choice(FORMATS)}
    least = randomness.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + randomness.randint(0, 20)}


def _integer(randomness: random.Random, _: int) -> dict[str, Any]:
    least = randomness.randint(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + randomness.randint(0, 5000)}


def _number(randomness: random.Random, _: int) -> dict[str, Any]:
    least = randomness.randint(-50, 50)
    # Without a multiple a number has as many digits as the model likes.
    return {"type": "number", "minimum": least, "exclusiveMaximum": least + 10, "multipleOf": 0.25}


def _choice(randomness: random.Random, _: int) -> dict[str, Any]:
    return {"enum": randomness.sample(CHOICES, randomness.randint(1, 4))}


def _constant(randomness: random.Random, _: int) -> dict[str, Any]:
    return {"const": randomness.choice(CHOICES)}


def _boolean(_: random.Random, __: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(_: random.Random, __: int) -> dict[str, Any]:
    return {"type": ["null", "boolean"]}
